"""Live: looks at a source now and then, and sends browsers what changed, by server-sent events.

After the first look, nobody looks while nobody watches. A browser that comes is sent everything once, then
what changes; one that does not keep up, or is gone without a word, is hung up on, and comes again by itself.
So memory is bounded: `CLIENTS_MAX` browsers, `QUEUE_MAX` messages each, which all share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import HeadraceError
from headrace.web.views import Wire, sentence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from headrace.web.source import ClusterSource

_log = logging.getLogger("headrace.web")

CLIENTS_MAX: Final = 128
QUEUE_MAX: Final = 8  # messages that wait for a browser: at two seconds each, a quarter of a minute
HEARTBEAT_S: Final = 10.0
STREAM_S: Final = 3600.0
"""A stream ends then, and the browser comes again: who may not look any more is seen."""

RETRY_MS: Final = 2000
SHARE: Final = 0.2  # looking takes no more than this share of the time


class Full(Exception):
    """There are as many browsers as there may be."""


@dataclass(slots=True, eq=False)
class LiveClient:
    """A browser that is told."""

    grid: bool  # it wants the cluster, not only the news that there is some
    hang_up: Callable[[], None]  # ends its connection at once
    may: Callable[[], bool] = lambda: True
    """Whether it may still look: who signed in may be signed out meanwhile."""
    queue: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(QUEUE_MAX))

    def tell(self, message: bytes) -> bool:
        """Whether it keeps up."""
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.hang_up()
            return False
        return True


def event(name: str, document: Any) -> bytes:
    """A message as it goes over the wire."""
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"event: {name}\ndata: {data}\n\n".encode()


class Live:
    """Looks for all browsers together."""

    def __init__(self, source: ClusterSource, clients_max: int = CLIENTS_MAX) -> None:
        self.source = source
        self.clients: set[LiveClient] = set()
        self.dropped = 0
        self.looks = 0
        self.trouble = ""
        self._clients_max = clients_max
        # One thread: a source is asked by one at a time.
        self._thread = ThreadPoolExecutor(1, "headrace-web-look")
        self._wire = Wire(source.label)
        self._full: bytes | None = None
        self._looked_s = -1e9
        self._looking = asyncio.Lock()
        self._watched = asyncio.Event()

    async def run(self) -> None:
        """Look once, so that who comes first need not wait, and then as long as somebody watches."""
        await self.look()
        while True:
            await self._watched.wait()
            if not self.clients:
                self._watched.clear()
                continue
            began_s = time.monotonic()
            await self.look()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(self.source.period_s - took_s, took_s * (1 / SHARE - 1)))

    def close(self) -> None:
        """Hang up on all."""
        for client in self.clients:
            client.hang_up()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- browsers -----------------------------------------------------------------------------------

    async def stream(self, client: LiveClient) -> AsyncIterator[bytes]:
        """What a browser is told, message by message."""
        self.join(client)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            yield await self._hello(client)
            until_s = time.monotonic() + STREAM_S
            while time.monotonic() < until_s:
                message = b": still here\n\n"
                with contextlib.suppress(TimeoutError):
                    message = await asyncio.wait_for(client.queue.get(), HEARTBEAT_S)
                if not client.may():
                    return
                yield message
        finally:
            self.clients.discard(client)

    def join(self, client: LiveClient) -> None:
        """Tell this browser, too; raises Full if there are too many."""
        if client in self.clients:
            return
        if len(self.clients) >= self._clients_max:
            raise Full
        self.clients.add(client)
        self._watched.set()

    async def _hello(self, client: LiveClient) -> bytes:
        await self.soon()
        # What was told meanwhile is in what comes now.
        while not client.queue.empty():
            client.queue.get_nowait()
        if not client.grid:
            return event("look", self._status())
        if self._full is None or self.trouble:
            return event("trouble", {"text": self.trouble})
        return self._full

    def _status(self) -> dict[str, Any]:
        return {"look": self.looks, "trouble": self.trouble, "label": self.source.label}

    # -- looks ----------------------------------------------------------------------------------------

    async def soon(self) -> None:
        """Look, if what was seen is not fresh: somebody comes."""
        await self.look(2 * self.source.period_s)

    async def look(self, fresh_s: float = 0.0) -> None:
        """Look once, and tell all; not if that was done so lately."""
        async with self._looking:
            if time.monotonic() - self._looked_s <= fresh_s:
                return
            try:
                tick, self._full = await self.ask(self._see)
            except Exception as e:  # noqa: BLE001 - whoever watches is told, and it looks again
                if not isinstance(e, HeadraceError):
                    _log.exception("a look failed")
                self.trouble = sentence(e) or type(e).__name__
                self._tell(event("trouble", {"text": self.trouble}), grid=True)
            else:
                self.looks += 1
                self._looked_s = time.monotonic()
                self.trouble = ""
                self._tell(tick, grid=True)
            self._tell(event("look", self._status()), grid=False)

    def _see(self) -> tuple[bytes, bytes]:
        tick = self._wire.tick(self.source.cluster())
        return event("tick", tick), event("full", self._wire.full())

    def _tell(self, message: bytes, *, grid: bool) -> None:
        for client in [client for client in self.clients if client.grid == grid]:
            if not client.tell(message):
                self.dropped += 1
                self.clients.discard(client)

    async def ask(self, make: Callable[[], Any]) -> Any:
        """Something of the source, off the loop; raises HeadraceError if it cannot be seen."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)
