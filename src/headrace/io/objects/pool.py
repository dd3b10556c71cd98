"""Connections to object servers: kept open between requests, one request on each at a time."""

from __future__ import annotations

import asyncio
import errno
import ssl
import urllib.parse
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.io.objects.fault import Fault
from headrace.io.objects.wire import Connection

if TYPE_CHECKING:
    from headrace.io.objects.wire import Response

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
                self._drop_idle()
                raise Fault("descriptors", f"no file descriptor was left: {e.strerror}") from e
            raise Fault("transient", f"connect failed: {host}:{port}: {e.strerror or e}") from e
        return connection

    def _drop_idle(self) -> None:
        """Gives descriptors back that rest with other servers."""
        self.close()


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
