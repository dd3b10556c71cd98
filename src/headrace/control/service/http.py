"""HTTP: connections with deadlines, over uvicorn's protocol.

A request must come whole within seconds of its first byte, or of the connection's beginning: whoever
sends a byte a minute, or nothing, is hung up on. Where all connections are taken, the peer that has most
of them loses its oldest. What the kernel knows of the other end is handed to the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import h11
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.base.peers import Crowd, peer_name, peer_user
from headrace.control.service.auth import Peer, Refused
from headrace.errors import ControlError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from starlette.requests import Request

    from headrace.base.peers import Address

_log = logging.getLogger("headrace")

REQUEST_S: Final = 5.0  # a request comes whole within this
ANSWER_S: Final = 15.0  # an answer is written and taken within this
IDLE_S: Final = 75.0  # a connection between two requests; longer than planes are silent
HANDSHAKE_S: Final = 5.0
HEAD_BYTES_MAX: Final = 16 << 10
CONNECTIONS_MAX: Final = 12_000
UNREAD_BYTES_MAX: Final = 1 << 20
"""Of a body that comes after its answer: so much is thrown away before it is hung up on."""
STOP_S: Final = 1

GONE_MS: Final = 20_000
"""Whose machine has not acknowledged anything of a stream for so long is gone."""

SEND_BYTES: Final = 1 << 18
"""What the kernel keeps for whoever does not read a stream: it is to be seen soon."""


class HttpConnection(H11Protocol):
    """One connection, which the application finds as `request.state.connection`."""

    _deadline: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    peer = Peer()
    crowd: Crowd[HttpConnection]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Know the other end, and expect a request."""
        super().connection_made(transport)
        self.peer = _peer_of(transport)
        self.app_state = {**self.app_state, "peer": self.peer, "connection": self}
        self.crowd.join(self.peer.name, self)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Part of a request has come."""
        if self.cycle is not None and self.cycle.response_complete:
            self._unread_bytes += len(data) if self.conn.their_state is h11.SEND_BODY else 0
            if self._unread_bytes > UNREAD_BYTES_MAX:
                self.hang_up()
                return
        if self._deadline is None and self._between():
            self._expect()
        super().data_received(data)
        if not self._between() and not getattr(self.cycle, "more_body", False):
            self._relax()
            self._expect(ANSWER_S)

    def on_response_complete(self) -> None:
        """Be ready for the next request."""
        self._relax()
        super().on_response_complete()
        if not self._between():  # the next request had come whole
            self._expect(ANSWER_S)
        elif self.conn.trailing_data[0]:  # or in part
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._relax()
        self.crowd.leave(self.peer.name, self)
        super().connection_lost(exc)

    def hang_up(self) -> None:
        """End it at once, whatever waits to be sent."""
        self.transport.abort()

    def hold(self) -> None:
        """What is answered now may last: it is seen by other means whether anybody is there."""
        self._relax()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

    def _between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self, seconds: float = REQUEST_S) -> None:
        self._deadline = self.loop.call_later(seconds, self.hang_up)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _peer_of(transport: asyncio.Transport) -> Peer:
    sock = transport.get_extra_info("socket")
    name = "nobody" if sock is None else peer_name(sock)
    if sock is not None and sock.family == socket.AF_UNIX:
        return Peer(uid=peer_user(sock), name=name)
    tls = transport.get_extra_info("ssl_object")
    return Peer(certified=tls is not None and bool(tls.getpeercert()), name=name)


class HttpListener(NamedTuple):
    """A socket to serve on, and its TLS."""

    sock: socket.socket
    tls: ssl.SSLContext | None = None


def listen_tcp(address: Address, where: str, next_step: str = "") -> socket.socket:
    """A socket that listens at what people call `where`; raises ControlError if it cannot."""
    try:
        return address.listen()
    except OSError as e:
        # A socket's own words name the address again; those of a look-up have a number below 0.
        why = os.strerror(e.errno) if e.errno and e.errno > 0 else e
        raise ControlError(
            f"{where}: cannot listen: {why}.", path=where, next_step=next_step
        ) from e


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body, bounded in bytes and time.

    Raises Refused if it is longer, and TimeoutError if it did not come in time.
    """
    body = bytearray()
    async with asyncio.timeout(REQUEST_S):
        async for chunk in request.stream():
            body += chunk
            if len(body) > bytes_max:
                raise Refused(413, f"the body has more than {bytes_max} bytes")
    return bytes(body)


def refusal(
    status: int, message: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    """A refusal as our clients and pages read it."""
    return JSONResponse({"error": {"message": message, **more}}, status, headers)


class HttpServer(uvicorn.Server):
    """Serves one application on several sockets, each with TLS of its own or none.

    Beyond `connections_max` the peer that has most of them loses its oldest.
    """

    def __init__(
        self, app: Any, listeners: Sequence[HttpListener], connections_max: int = CONNECTIONS_MAX
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=HttpConnection, ws="none", lifespan="off", log_config=None,
                access_log=False, proxy_headers=False, server_header=False, date_header=False,
                timeout_keep_alive=int(IDLE_S), timeout_graceful_shutdown=STOP_S,
                h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            )
        )  # fmt: skip
        self._listeners = listeners
        self._crowd: Crowd[HttpConnection] = Crowd(connections_max, HttpConnection.hang_up)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on its own sockets; `sockets` are none of them."""
        del sockets
        loop = asyncio.get_running_loop()
        self.servers = []

        def connection() -> asyncio.Protocol:
            protocol = HttpConnection(self.config, self.server_state, {})
            protocol.crowd = self._crowd
            return protocol

        for sock, tls in self._listeners:
            handshake_s = None if tls is None else HANDSHAKE_S
            self.servers.append(
                await loop.create_server(
                    connection, sock=sock, ssl=tls, backlog=512, ssl_handshake_timeout=handshake_s
                )
            )
        self.started = True

    async def serve_beside(
        self, work: Coroutine[Any, Any, None], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until a signal comes, which calls `ended`, while `work` is done beside."""

        def end() -> None:
            self.should_exit = True
            ended()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)
        try:
            await self.serve()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("what is done beside serving has failed", exc_info=task.exception())
