"""MetricsServer: answers Prometheus over HTTP from one thread of its own, and can harm nobody.

`GET /metrics` and `GET /healthz`, one request a connection, nothing else. Connections, bytes and time are
bounded: when all places are taken, whoever has been silent longest makes room, so that slow or idle
clients cannot keep a scraper out. Speaks plain HTTP; keep it on loopback or a trusted network.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Address", "MetricsServer", "address_of"]

_log = logging.getLogger("headrace.metrics")

PORT: Final = 9464
"""By convention the port of exporters like this one."""

CLIENTS_MAX: Final = 16
HEAD_BYTES_MAX: Final = 4096
REQUEST_S: Final = 5.0
"""A request comes whole, and its answer is taken, within this time each."""

KEPT_S: Final = 0.25
"""Scrapes within this time get the same answer: many scrapers cost no more than a few."""

_LINGER_S: Final = 1.0
_TICK_S: Final = 0.25
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def address_of(text: str) -> Address:
    """`9464`, `0.0.0.0:9464` or `[::1]:9464`; without a host it is loopback.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or bool(colon) != bool(host):
        raise ValueError(f"{text!r} is no address for metrics, expected [HOST:]PORT, as {PORT}")
    return Address(host or "127.0.0.1", int(port))


@dataclass(slots=True, eq=False)
class _Client:
    sock: socket.socket
    deadline_s: float
    head: bytearray = field(default_factory=bytearray)
    out: memoryview | None = None
    """What is left of the answer; None: the request is not whole."""
    ended: bool = False
    """All is said; what the client may still send is thrown away."""


class MetricsServer:
    """Serves until it is closed.

    Args:
        address: where; port 0 takes a free one.
        render: gives the metrics as text, or raises TimeoutError; called in the server's thread.
        healthy: whether what is measured is alive.

    Raises:
        HeadraceError: it cannot listen there.
    """

    def __init__(
        self, address: Address, render: Callable[[], bytes], healthy: Callable[[], bool]
    ) -> None:
        self._render = render
        self._healthy = healthy
        self._kept: tuple[float, bytes] = (-1.0, b"")
        self._clients: list[_Client] = []
        self._listener = _listen(address)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="headrace-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on all; returns when the thread has ended."""
        self._ending = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
        self._thread.join()

    def drop(self) -> None:
        """Let go of the descriptors in a forked child, where there is no thread."""
        for sock in (self._listener, *(client.sock for client in self._clients)):
            sock.close()
        self._selector.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                for key, events in self._selector.select(_TICK_S if self._clients else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._serve(key.data, events)
                now = time.monotonic()
                for client in [c for c in self._clients if now > c.deadline_s]:
                    self._hang_up(client)
        except Exception:  # noqa: BLE001 - whatever it is, only metrics end by it
            _log.exception("metrics are served no more")
        finally:
            self.drop()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_TICK_S)
            return
        if len(self._clients) >= CLIENTS_MAX:
            self._hang_up(min(self._clients, key=lambda c: c.deadline_s))
        sock.setblocking(False)
        client = _Client(sock, time.monotonic() + REQUEST_S)
        self._clients.append(client)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, events: int) -> None:
        if client not in self._clients:  # it made room for another
            return
        try:
            if events & selectors.EVENT_READ:
                self._receive(client)
            if client.out is not None and not client.ended:
                self._send(client)
        except OSError:
            self._hang_up(client)

    def _receive(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            data = client.sock.recv(HEAD_BYTES_MAX)
            if not data:
                self._hang_up(client)
            elif client.out is None:
                client.head += data
                self._look(client)

    def _look(self, client: _Client) -> None:
        """Answer a request that is whole."""
        # A line is enough to refuse what is no HTTP.
        line, newline, _ = bytes(client.head).partition(b"\n")
        words = line.split()
        if newline and (len(words) != 3 or not words[2].startswith(b"HTTP/1.")):
            answer = _answer(400, "no HTTP request\n")
        elif len(client.head) > HEAD_BYTES_MAX:
            answer = _answer(431, f"a request has at most {HEAD_BYTES_MAX} bytes here\n")
        elif b"\r\n\r\n" in client.head or b"\n\n" in client.head:
            answer = self._answer(words[0], words[1].partition(b"?")[0])
        else:
            return
        client.out = memoryview(answer)
        client.deadline_s = time.monotonic() + REQUEST_S

    def _answer(self, method: bytes, path: bytes) -> bytes:
        if path not in (b"/metrics", b"/healthz"):
            return _answer(404, "there is /metrics, and /healthz\n")
        if method != b"GET":
            return _answer(405, "only GET\n", "Allow: GET\r\n")
        try:
            if path == b"/metrics":
                return _answer(200, self._metrics())
            if self._healthy():
                return _answer(200, "ok\n")
        except TimeoutError:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, the next scrape may succeed
            _log.exception("metrics cannot be told")
        return _answer(503, "it does not answer\n")

    def _metrics(self) -> bytes:
        at, text = self._kept
        if at < 0.0 or time.monotonic() - at > KEPT_S:
            text = self._render()
            self._kept = (time.monotonic(), text)
        return text

    def _send(self, client: _Client) -> None:
        assert client.out is not None
        with contextlib.suppress(BlockingIOError):
            client.out = client.out[client.sock.send(client.out) :]
        if client.out:
            self._selector.modify(client.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
            return
        # Closed at once, with bytes of the client unread, the answer might never arrive.
        client.ended = True
        client.deadline_s = time.monotonic() + _LINGER_S
        client.sock.shutdown(socket.SHUT_WR)
        self._selector.modify(client.sock, selectors.EVENT_READ, client)

    def _hang_up(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.sock)
            client.sock.close()


def _answer(code: int, body: str | bytes, more: str = "") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {_CONTENT_TYPE}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n{more}\r\n"
    )
    return head.encode() + content


def _listen(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    except OSError as e:
        raise _cannot(address, e) from e
    try:
        # Or a daemon that is started again would have to wait for a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(CLIENTS_MAX)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise _cannot(address, e) from e
    return sock


def _cannot(address: Address, error: OSError) -> HeadraceError:
    taken = error.errno == errno.EADDRINUSE
    why = "another process listens there" if taken else error.strerror or str(error)
    return HeadraceError(
        f"{address}: metrics cannot be served there: {why}.",
        next_step="Name another: --metrics [HOST:]PORT; port 0 takes a free one.",
    )
