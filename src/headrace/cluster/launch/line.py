"""Line: messages between the first node and the others: JSON, one a line, over TCP.

Small and few: what is launched, what began, ended or failed, and a sign of life every few seconds. The first
message of whoever connects bears the launch's secret; a line that is no message of ours, or too long, ends
the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from headrace.closing import Closing

__all__ = ["Line", "Message"]

Message = dict[str, Any]
_BYTES_MAX = 4 << 20
_PIECE = 1 << 16
_SEND_S = 5.0


class Line(Closing):
    """One end of a connection. Never waits for the other end, but to send.

    Attributes:
        gone: why there is no other end any more; "" while there is.
        heard_s: when something came last, by `time.monotonic`.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._rest = b""
        self.gone = ""
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """Of this end: by it the other one can reach this node."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: str, **fields: Any) -> bool:
        """Sends a message; False if there is nobody any more."""
        if self.gone:
            return False
        try:
            self._socket.settimeout(_SEND_S)
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as e:
            self.gone = e.strerror or str(e) or "it does not read"
        return not self.gone

    def take(self) -> list[Message]:
        """What has come."""
        while not self.gone:
            try:
                self._socket.settimeout(0)
                piece = self._socket.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError as e:
                self.gone = e.strerror or str(e)
                break
            if not piece:
                self.gone = "the connection ended"
                break
            self.heard_s = time.monotonic()
            self._rest += piece
            if len(self._rest) > _BYTES_MAX:
                self.gone = f"it sent a line of more than {_BYTES_MAX} bytes"
        *lines, self._rest = self._rest.split(b"\n")
        out = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not (isinstance(message, dict) and isinstance(message.get("kind"), str)):
                self.gone = self.gone or "it sent what is no message"
                break
            out.append(message)
        return out

    def silent_s(self) -> float:
        """How long nothing has come."""
        return time.monotonic() - self.heard_s

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()
        self.gone = self.gone or "closed"
