"""A reverse proxy that injects the faults of object stores, and counts what it injected.

Stands between headrace and an S3 server on loopback. Each request is compared with the rules in order;
the first that fits and is not used up is applied. Tests assert on `injected`, so that no test passes
because its fault never happened.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

EXPIRED = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)

_PATIENCE_S = 60


@dataclass
class Rule:
    """One fault.

    Attributes:
        fault: `status`, `reset`, `truncate`, `stall`, `slow`, `wrong_range`, `wrong_etag`, `wrong_bytes`,
            `no_range` (the whole object), `garbage` (no HTTP), `endless_head`, `huge`.
        pattern: what the request line must contain (a regular expression).
        times: how often; None for ever.
        skip: how many fitting requests pass before.
        status: of `status`.
        headers: of `status`.
        body: of `status`.
        head: what the whole request head must contain.
        seconds: pause between two pieces of `slow`.
    """

    fault: str
    pattern: str = "GET "
    times: int | None = 1
    skip: int = 0
    status: int = 503
    headers: tuple[str, ...] = ()
    body: bytes = b"<Error><Code>SlowDown</Code></Error>"
    head: str = ""
    seconds: float = 0.02


class FaultyProxy:
    """The proxy; use as a context manager.

    Args:
        port: the server's.
        authorization: sent to it in place of what the client says of itself.

    Attributes:
        injected: how often each fault was injected.
        requests: request lines, with their Range header, in the order they came.
    """

    def __init__(self, port: int, authorization: str | None = None) -> None:
        self._origin = port
        self._authorization = authorization
        self._rules: list[Rule] = []
        self.injected: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.connections = 0
        self.open_now = 0
        self.open_most = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        future = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self.port = future.result(_PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(self, fault: str, **fields: Any) -> None:
        """Adds a rule."""
        self._rules.append(Rule(fault, **fields))

    def clear(self) -> None:
        """Forgets rules and counts."""
        self._rules.clear()
        self.injected.clear()
        self.requests.clear()

    def gets(self, text: str = "") -> list[tuple[str, str]]:
        """The GET requests whose line contains `text`."""
        return [r for r in self.requests if r[0].startswith("GET ") and text in r[0]]

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: a connection is ours, to be closed, from the moment that it stands."""
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(lambda done: (writer.transport.abort(), self._serving.discard(done)))

    async def _close(self) -> None:
        # Nothing new is accepted, and what asyncio is accepting is waited for: a task of its own that
        # is cancelled, or finds the server closed, leaves the connection's socket open.
        for listener in self._server.sockets:
            self._loop.remove_reader(listener.fileno())
        mine = asyncio.current_task()
        while others := [t for t in asyncio.all_tasks() if t is not mine]:
            for task in self._serving:
                task.cancel()
            await asyncio.wait(others)
        self._server.close()
        for _ in range(3):
            await asyncio.sleep(0)  # aborted transports close their sockets in later rounds

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open_now -= 1

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode()
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        wanted = re.search(rb"(?i)\r\nrange: *([^\r]*)", head)
        self.requests.append((line, wanted[1].decode() if wanted else ""))
        rule = self._choose(line, head.decode("latin-1"))
        if rule is None:
            writer.write(await self._forward(head, body))
            await writer.drain()
            return True
        self.injected[rule.fault if rule.fault != "status" else str(rule.status)] += 1
        return await self._misbehave(rule, head, body, writer)

    def _choose(self, line: str, head: str) -> Rule | None:
        for rule in self._rules:
            if not re.search(rule.pattern, line) or rule.head not in head or rule.times == 0:
                continue
            if rule.skip:
                rule.skip -= 1
                continue
            if rule.times is not None:
                rule.times -= 1
            return rule
        return None

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """The origin's whole answer."""
        lines = [
            x
            for x in head.rstrip(b"\r\n").split(b"\r\n")
            if not x.lower().startswith(b"connection:")
        ]
        if self._authorization is not None:
            lines = [x for x in lines if not x.lower().startswith(b"authorization:")]
            lines.append(b"Authorization: " + self._authorization.encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._origin)
        try:
            writer.write(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body)
            answer = await reader.read()
        finally:
            writer.transport.abort()
        answer_head, _, answer_body = answer.partition(b"\r\n\r\n")
        kept = [x for x in answer_head.split(b"\r\n") if not x.lower().startswith(b"connection:")]
        kept[0] = kept[0].replace(b"HTTP/1.0", b"HTTP/1.1")
        if not any(x.lower().startswith((b"content-length", b"transfer-encoding")) for x in kept):
            kept.append(b"Content-Length: %d" % len(answer_body))
        return b"\r\n".join(kept) + b"\r\n\r\n" + answer_body

    async def _misbehave(
        self, rule: Rule, head: bytes, body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Answers wrongly; whether the connection can go on."""
        if rule.fault in ("status", "reset", "stall", "garbage", "endless_head"):
            return await self._answer_alone(rule, writer)
        if rule.fault == "no_range":
            head = re.sub(rb"(?i)\r\nrange:[^\r]*", b"", head)
        answer = await self._forward(head, body)
        start, _, data = answer.partition(b"\r\n\r\n")
        if rule.fault == "slow":
            writer.write(start + b"\r\n\r\n")
            step = max(1, len(data) // 8)
            for at in range(0, len(data), step):
                writer.write(data[at : at + step])
                await writer.drain()
                await asyncio.sleep(rule.seconds)
            return True
        start, data = _altered(rule.fault, start, data)
        writer.write(start + b"\r\n\r\n" + data)
        await writer.drain()
        return rule.fault != "truncate"

    async def _answer_alone(self, rule: Rule, writer: asyncio.StreamWriter) -> bool:
        """Faults that the server itself never hears of."""
        if rule.fault == "reset":
            writer.transport.abort()
            return False
        if rule.fault == "status":
            lines = [f"HTTP/1.1 {rule.status} Injected", f"Content-Length: {len(rule.body)}"]
            writer.write("\r\n".join([*lines, *rule.headers]).encode() + b"\r\n\r\n" + rule.body)
        elif rule.fault == "garbage":
            writer.write(b"SSH-2.0-what\r\n\r\n")
        elif rule.fault == "endless_head":
            writer.write(b"HTTP/1.1 206 OK\r\n" + b"x-filler: y\r\n" * 8000)
        await writer.drain()
        if rule.fault in ("stall", "endless_head"):
            await asyncio.sleep(3600)
        return rule.fault == "status"


def _altered(fault: str, head: bytes, data: bytes) -> tuple[bytes, bytes]:
    """A right answer made wrong."""
    if fault == "truncate":
        data = data[: len(data) // 2]
    elif fault == "wrong_range":
        head = re.sub(rb"(?i)(content-range: bytes )\d+-\d+", rb"\g<1>1-2", head)
    elif fault == "wrong_etag":
        head = re.sub(rb"(?i)(etag: )[^\r]*", rb'\g<1>"another"', head)
    elif fault == "wrong_bytes":
        data = bytes(b ^ 0xFF for b in data)
    elif fault == "huge":
        head = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: 99999999999999", head)
    return head, data
