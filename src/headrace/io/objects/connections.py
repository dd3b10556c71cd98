"""HTTP/1.1 to object servers: bodies go straight into the memory of the caller, connections stay open.

A `Connection` carries one request at a time and belongs to one event loop; a `Pool` keeps those that rest. Both
know requests and responses, no retries and no credentials. What a server sends is not believed: lengths
are checked against the memory there is before a byte is stored, heads and error texts have caps.

Clients of others either copy bodies or hide what a retry needs to know (Retry-After, Content-Range).
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import ssl
import urllib.parse
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.io.objects.faults import Fault

if TYPE_CHECKING:
    from headrace.io.objects.faults import FaultKind

_HEAD_BYTES_MAX = 32 << 10
_TEXT_BYTES_MAX = 16 << 10
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?\Z")
_CHUNKED_END = b"0\r\n\r\n"
_HEADERS = re.compile(
    rb"(?im)^(content-length|content-range|etag|last-modified|location|retry-after|connection)"
    rb":[ \t]*([^\r\n]*?)[ \t]*\r?$"
)
"""What anybody asks of an answer; to take all of its lines apart costs a quarter of a read."""


@dataclass(slots=True)
class Response:
    """An answer's head; of a success the body is in the caller's memory, else in `text`.

    `headers` has those of `_HEADERS` only, by their names in lower case.
    """

    status: int
    headers: dict[str, str]
    received: int = 0
    text: str = ""


class Connection(asyncio.BufferedProtocol):
    """A connection to one server. Made by an event loop's `create_connection`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(8 << 10)
        self._head = bytearray()
        self._dest = memoryview(b"")
        self._sink: memoryview | None = None
        self._text: bytearray | None = None
        self._left: int | None = None
        self._response: Response | None = None
        self._done: asyncio.Future[Response] | None = None
        self._seen_s = 0.0
        self.requests = 0
        self.reusable = True

    async def get(self, head: bytes, dest: memoryview, stall_s: float) -> Response:
        """Sends a request; a body of status 206, or of 200 if it fits, goes to `dest`.

        Raises:
            Fault: the connection broke, stalled or made no sense. It cannot be used again.
        """
        loop = asyncio.get_running_loop()
        self._head.clear()
        self._dest, self._sink, self._text, self._left = dest, None, None, None
        self._response, self._done = None, loop.create_future()
        self._seen_s = loop.time()
        self.requests += 1
        if self._transport is None or not self.reusable:
            self.abort()
            raise Fault("transient", "connection lost before the request")
        self._watch_handle = loop.call_later(stall_s, self._watch, loop, stall_s)
        try:
            self._transport.write(head)
            return await self._done
        except BaseException:
            self.abort()
            raise
        finally:
            self._watch_handle.cancel()
            self._dest = memoryview(b"")
            self._sink = None

    def abort(self) -> None:
        """Closes at once; nothing more is stored."""
        self.reusable = False
        self._sink, self._dest = None, memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    @property
    def answered(self) -> bool:
        """Whether a byte of an answer to the last request came."""
        return self._response is not None or bool(self._head)

    # -- asyncio's side -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = transport  # type: ignore[assignment]  # a stream's transport

    def get_buffer(self, _sizehint: int) -> memoryview | bytearray:
        """Where the next bytes go: into the caller's memory once the head has come."""
        if self._sink is not None and self._left:
            return self._sink[len(self._sink) - self._left :]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        if self._done is None or self._done.done():
            self.abort()  # nobody asked for them
            return
        self._seen_s = asyncio.get_running_loop().time()
        try:
            if self._sink is not None and self._left:
                self._count(nbytes)
            else:
                self._feed(memoryview(self._scratch)[:nbytes])
        except Fault as fault:
            self._fail(fault.reason)

    def eof_received(self) -> bool:
        """The server ended its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if self._response is not None and self._text is not None and self._left is None:
            self._finish()  # a text without a stated length ends with the connection
        elif self._sink is not None:
            got = len(self._sink) - (self._left or 0)
            self._fail(f"truncated: {got:,} of {len(self._sink):,} bytes came")
        else:
            self._fail(f"connection lost: {exc or 'closed by the server'}")

    # -- an answer, piece by piece --------------------------------------------------------------------

    def _feed(self, data: memoryview) -> None:
        if self._response is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > _HEAD_BYTES_MAX:
                    raise Fault("transient", "nonsense: a head without an end")
                return
            rest = bytes(self._head[end + 4 :])
            self._begin(bytes(self._head[:end]))
            if self._response is None:  # 1xx: the real answer follows
                self._head.clear()
                if rest:
                    self._feed(memoryview(rest))
                return
            data = memoryview(rest)
        self._body(data)

    def _begin(self, head: bytes) -> None:
        first, _, rest = head.partition(b"\r\n")
        line = _STATUS.match(first)
        if line is None:
            raise Fault("transient", f"nonsense: {first[:40]!r} is no HTTP status")
        status = int(line[2])
        if status < 200:
            return
        headers = {
            name.lower().decode("latin-1"): value.decode("latin-1")
            for name, value in _HEADERS.findall(rest)
        }
        self._response = Response(status, headers)
        if line[1] == b"0" or headers.get("connection", "").lower() == "close":
            self.reusable = False
        length = headers.get("content-length", "")
        self._left = (
            int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        )
        if status != 206 and (status != 200 or (self._left or 0) > len(self._dest)):
            self._text = bytearray()
            return
        if self._left is None:
            raise Fault("transient", "nonsense: bytes without Content-Length")
        if self._left > len(self._dest):
            reason = f"wrong range: {self._left:,} bytes for {len(self._dest):,}"
            raise Fault("transient", reason)
        self._sink = self._dest[: self._left]

    def _body(self, data: memoryview) -> None:
        if self._sink is not None:
            if len(data) > (self._left or 0):
                raise Fault("transient", "nonsense: more bytes than Content-Length")
            at = len(self._sink) - (self._left or 0)
            self._sink[at : at + len(data)] = data
            self._count(len(data))
            return
        text = self._text
        if text is None:
            return
        text += data
        ended = self._left is not None and len(text) >= self._left
        chunks_ended = self._left is None and text.endswith(_CHUNKED_END)
        if ended or chunks_ended or len(text) > _TEXT_BYTES_MAX:
            if not ended or len(text) != self._left:
                self.reusable = False
            self._finish()

    def _count(self, nbytes: int) -> None:
        self._left = (self._left or 0) - nbytes
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        response, done = self._response, self._done
        if response is None or done is None or done.done():
            return
        if self._sink is not None:
            response.received = len(self._sink)
        if self._text is not None:
            response.text = bytes(self._text[:_TEXT_BYTES_MAX]).decode("utf-8", "replace")
        self._sink = None
        done.set_result(response)

    def _fail(self, reason: str) -> None:
        self.abort()
        if self._done is not None and not self._done.done():
            self._done.set_exception(Fault("transient", reason))

    def _watch(self, loop: asyncio.AbstractEventLoop, stall_s: float) -> None:
        """Fires when a request may have stalled; looks again later if bytes came meanwhile."""
        quiet_s = loop.time() - self._seen_s
        if quiet_s >= stall_s:
            self._fail(f"stalled: no byte for {quiet_s:.1f} s")
        else:
            self._watch_handle = loop.call_later(stall_s - quiet_s, self._watch, loop, stall_s)


_SAFE = "/:?#[]@!$&'()*+,;=%~-._"

_TARGETS_KEPT = 4096
"""URLs whose request line is kept: taking one apart costs as much as all else about a request."""


class Pool:
    """The connections of one event loop.

    Args:
        stall_s: a connection that is silent this long while we wait is given up.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._idle: dict[tuple[str, str, int], list[Connection]] = {}
        self._reached: set[tuple[str, str, int]] = set()
        self._tls: ssl.SSLContext | None = None

    async def get(self, url: str, headers: dict[str, str], dest: memoryview) -> Response:
        """Sends a GET and waits for the answer.

        Raises:
            Fault: as `Connection.get`.
        """
        address, start = _target(url)
        head = start + _lines(headers)
        while True:
            connection = await self._take(address)
            reused = connection.requests > 0
            try:
                response = await connection.get(head, dest, self._stall_s)
            except Fault as fault:
                # A server may close a connection that rests; that is no fault of this request.
                if (
                    reused
                    and not connection.answered
                    and fault.reason.startswith("connection lost")
                ):
                    continue
                raise
            if connection.reusable:
                self._idle.setdefault(address, []).append(connection)
            else:
                connection.abort()
            return response

    def close(self) -> None:
        """Closes the connections that rest."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    async def _take(self, address: tuple[str, str, int]) -> Connection:
        resting = self._idle.get(address)
        while resting:
            connection = resting.pop()
            if connection.reusable:
                return connection
        scheme, host, port = address
        loop = asyncio.get_running_loop()
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._stall_s):
                _, connection = await loop.create_connection(
                    Connection, host, port, ssl=self._tls if scheme == "https" else None
                )
        except TimeoutError:
            raise Fault("transient", f"connect timed out: {host}:{port}") from None
        except ssl.SSLCertVerificationError as e:
            raise Fault("final", f"certificate refused: {host}: {e.verify_message}") from e
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                self.close()  # descriptors that rest with other servers
                raise Fault("descriptors", f"no file descriptor was left: {e.strerror}") from e
            # A server that has answered may be starting anew; one that never has is a wrong address.
            kind: FaultKind = "transient" if address in self._reached else "unreachable"
            why = os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror or e
            raise Fault(kind, f"connect failed: {host}:{port}: {why}") from e
        self._reached.add(address)
        return connection


@lru_cache(_TARGETS_KEPT)
def _target(url: str) -> tuple[tuple[str, str, int], bytes]:
    """The server to ask, and the head of a request up to the lines that differ between ranges."""
    parts = urllib.parse.urlsplit(urllib.parse.quote(url, safe=_SAFE))
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as e:
        raise Fault("final", f"bad address: {e}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Fault("final", f"bad address: {parts.scheme}://{parts.hostname or ''}")
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.port is not None:
        host += f":{port}"
    start = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n"
    return (parts.scheme, parts.hostname, port), start.encode("latin-1", "replace") + _ALWAYS


def _lines(headers: dict[str, str]) -> bytes:
    text = "\r\n".join([f"{name}: {value}" for name, value in headers.items()])
    if text.count("\r") != len(headers) - 1 or text.count("\n") != len(headers) - 1 or "\0" in text:
        raise Fault("final", "bad address: a line break in a header")
    return text.encode("latin-1", "replace") + b"\r\n\r\n"


_ALWAYS = b"Accept-Encoding: identity\r\nUser-Agent: headrace\r\n"
