"""Line: one connection of the daemon: bytes in and out of a socket that never blocks.

Keeps the deadlines: hello within seconds, a message whole within seconds of its first byte. What waits
to be sent is bounded: while too much does, nothing more is taken in, so a client that stopped reading
costs no more memory. Descriptors that a client sends are never accepted.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING

from headrace.node.wire import FRAME_BYTES_MAX, HELLO_BYTES_MAX, Splitter, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from msgspec import Struct

__all__ = ["Line", "peer_of"]

MESSAGE_S = 5.0
"""A hello, or the rest of a message that has begun, comes within this time."""

OUT_BYTES_MAX = 8 << 20
"""While more than this waits to be sent, nothing is taken in."""

_CHUNK_BYTES = 256 << 10
_PEER = struct.Struct("3i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The other side of a UNIX socket, as the kernel says: process id (0: unknown) and user id."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(found)
    return pid, uid


class Line:
    """A client's connection.

    Args:
        sock: accepted; becomes the line's own.
        now: monotonic seconds.
    """

    def __init__(self, sock: socket.socket, now: float) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid, self.uid = peer_of(sock)
        self.pidfd = -1
        if self.pid > 0:
            with contextlib.suppress(OSError):  # gone, or of another process namespace
                self.pidfd = os.pidfd_open(self.pid)
        self.greeted = False
        self._splitter = Splitter(HELLO_BYTES_MAX)
        self._deadline: float | None = now + MESSAGE_S
        self._out: deque[tuple[memoryview, Sequence[int], object]] = deque()
        self._out_bytes = 0

    @property
    def choked(self) -> bool:
        """Whether nothing should be taken in."""
        return self._out_bytes > OUT_BYTES_MAX

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    def overdue(self, now: float) -> bool:
        """Whether a hello or the rest of a message did not come in time."""
        return self._deadline is not None and now > self._deadline

    def greet(self) -> None:
        """The client has said hello."""
        self.greeted = True
        self._splitter.frame_bytes_max = FRAME_BYTES_MAX
        self._deadline = None

    def receive(self) -> Iterator[bytes]:
        """Bodies of messages that have come.

        Raises:
            EOFError: the client hung up.
            OSError: the connection is broken.
            WireError: a frame is empty or too large.
        """
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        yield from self.rest(data)

    def rest(self, data: bytes = b"") -> Iterator[bytes]:
        """Bodies of messages that came before, and were not taken.

        Raises:
            WireError: a frame is empty or too large.
        """
        yield from self._splitter.feed(data)
        if self.greeted:
            if not self._splitter.partial:
                self._deadline = None
            elif self._deadline is None:
                self._deadline = time.monotonic() + MESSAGE_S

    def send(self, message: Struct, fds: Sequence[int] = (), owner: object = None) -> None:
        """Queue a message, with descriptors that stay open as long as `owner` lives."""
        data = memoryview(encode(message))
        self._out.append((data, fds, owner))
        self._out_bytes += len(data)

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: the connection is broken.
        """
        while self._out:
            data, fds, _ = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self.sock.sendmsg([data], rights)
            except BlockingIOError:
                return
            self._out_bytes -= sent
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], (), None)

    def close(self) -> None:
        """Hang up."""
        self.sock.close()
        self._out.clear()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
