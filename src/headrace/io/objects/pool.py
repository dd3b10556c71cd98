"""Connections to object servers: kept open between requests, one request on each at a time."""

from __future__ import annotations

import asyncio
import errno
import ssl
import urllib.parse
from typing import TYPE_CHECKING

from headrace.io.objects.fault import Fault
from headrace.io.objects.wire import Connection

if TYPE_CHECKING:
    from headrace.io.objects.wire import Response

_SAFE = "/:?#[]@!$&'()*+,;=%~-._"


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
        address, head = _request(url, headers)
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


def _request(url: str, headers: dict[str, str]) -> tuple[tuple[str, str, int], bytes]:
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
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity",
             "User-Agent: headrace", *(f"{k}: {v}" for k, v in headers.items())]  # fmt: skip
    head = "\r\n".join(lines) + "\r\n\r\n"
    if any(c in line for line in lines for c in "\r\n\0"):
        raise Fault("final", "bad address: a line break in a header")
    return (parts.scheme, parts.hostname, port), head.encode("latin-1", "replace")
