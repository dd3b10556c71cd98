"""The pages as a process: listens, serves, ends at SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import TYPE_CHECKING, Any

from headrace.control.service.http import Listener, Server
from headrace.errors import ControlError
from headrace.web.app import Web
from headrace.web.http import web_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.web.options import WebOptions
    from headrace.web.policies import Desk
    from headrace.web.source import Source
    from headrace.web.stores import Shelf
    from headrace.web.tokens import Doors
    from headrace.web.traced import Runs

__all__ = ["serve"]

_log = logging.getLogger("headrace.web")


def serve(
    source: Source,
    doors: Doors,
    options: WebOptions,
    *,
    shelf: Shelf,
    desk: Desk | None = None,
    runs: Runs | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal ends it.

    Args:
        source: what is looked at.
        doors: knows tokens.
        options: where and for whom.
        shelf: stores.
        runs: that wrote a trace.
        desk: policies; None: there is no controller.
        ready: told the address when it listens.

    Raises:
        ControlError: it cannot listen there.
    """
    sock = _listen(options)
    web = Web(source, doors, options, shelf=shelf, desk=desk, runs=runs)
    try:
        asyncio.run(_serve(web, sock, ready))
    finally:
        sock.close()
        shelf.close()
        if desk is not None:
            desk.close()


async def _serve(web: Web, sock: socket.socket, ready: Callable[[str], None]) -> None:
    web.port = sock.getsockname()[1]
    server = Server(web_config(web.app), [Listener(sock)])

    def end() -> None:
        server.should_exit = True
        web.live.close()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    looking = asyncio.create_task(web.live.run())
    looking.add_done_callback(_told)
    host = sock.getsockname()[0]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{web.port}/")
    try:
        await server.serve()
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await looking


def _told(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("it looks no more", exc_info=task.exception())


def _listen(options: WebOptions) -> socket.socket:
    host, port = options.address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise ControlError(
            f"{options.listen}: cannot listen: {e}.", path=options.listen,
            next_step="Name another port: --listen 127.0.0.1:0 takes any that is free.",
        ) from e  # fmt: skip
