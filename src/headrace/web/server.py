"""The pages as a process: how they are served, and the end at SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.control.service.http import HttpListener, HttpServer, listen_tcp
from headrace.web.access import LOOPBACK
from headrace.web.app import Web

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from headrace.web.access import Sessions
    from headrace.web.live import PageSource
    from headrace.web.policies import Policies
    from headrace.web.stores import StoreBrowser
    from headrace.web.traced import TracedRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """How the pages are served.

    Attributes:
        listen: HOST:PORT; port 0 is any that is free.
        token_file: who may sign in; see `tokens`.
        public: whoever can connect may look without a token: every user of this machine. Never beyond it.
        names: that this server goes by, beside those of the machine itself: behind a proxy.
        stores: paths of stores that may be looked into.
        runs: folders of traced runs, or folders of such.

    Raises:
        ValueError: the address is none, or others could look without a token.
    """

    listen: str = "127.0.0.1:8470"
    token_file: Path | None = None
    public: bool = False
    names: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"--listen is {self.listen!r}, expected HOST:PORT, as 127.0.0.1:8470")
        if not self.is_loopback and (self.public or self.token_file is None):
            why = "--public: everybody" if self.public else "others"
            raise ValueError(
                f"--listen {self.listen}: {why} could look; give --token-file, so that people can sign in"
            )
        for name in self.names:
            if not name or any(c in name for c in "/:@ \t") or not name.isprintable():
                raise ValueError(f"--name is {name!r}, expected the name of a host, without a port")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        host = self.address[0]
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def needs_token(self) -> bool:
        """Whether looking takes a token."""
        return not self.public

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that requests may call this server by; None: any."""
        named = frozenset(name.lower() for name in self.names)
        if self.is_loopback:
            return LOOPBACK | {self.address[0]} | named
        return named or None


CONNECTIONS_MAX: Final = 1024

_log = logging.getLogger("headrace.web")


def serve(
    source: PageSource,
    sessions: Sessions,
    options: WebOptions,
    *,
    stores: StoreBrowser,
    policies: Policies | None = None,
    runs: TracedRuns | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal ends it.

    Raises:
        ControlError: it cannot listen there.
    """
    host, port = options.address
    sock = listen_tcp(
        host,
        port,
        options.listen,
        "Name another port: --listen 127.0.0.1:0 takes any that is free.",
    )
    web = Web(source, sessions, options, stores=stores, policies=policies, runs=runs)
    try:
        asyncio.run(_serve(web, sock, ready))
    finally:
        sock.close()
        stores.close()
        if policies is not None:
            policies.close()


async def _serve(web: Web, sock: socket.socket, ready: Callable[[str], None]) -> None:
    web.port = sock.getsockname()[1]
    server = HttpServer(web.app, [HttpListener(sock)], CONNECTIONS_MAX)

    def end() -> None:
        server.should_exit = True
        web.live.close()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    looking = asyncio.create_task(web.live.run())
    looking.add_done_callback(_log_failure)
    host = sock.getsockname()[0]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{web.port}/")
    try:
        await server.serve()
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await looking


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("it looks no more", exc_info=task.exception())
