"""HTTP: the controller's connections with deadlines, and streams that last."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, Final

from headrace.control.service.http import Connection, config_for

if TYPE_CHECKING:
    import asyncio

    import uvicorn

__all__ = ["WebConnection", "web_config"]

GONE_MS: Final = 20_000
"""Whose machine has not acknowledged anything for so long is gone."""

SEND_BYTES: Final = 1 << 18
"""What the kernel keeps for a browser that does not read: it is to be seen soon."""

CONNECTIONS_MAX: Final = 1024


class WebConnection(Connection):
    """A connection that may become a stream."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let the application find its connection."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}

    def hold(self) -> None:
        """What is answered now may last: it is seen by other means whether anybody is there."""
        self._relax()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_MS)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def web_config(app: Any) -> uvicorn.Config:
    """How connections are served."""
    return config_for(app, connection=WebConnection, connections_max=CONNECTIONS_MAX)
