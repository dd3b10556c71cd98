"""Serving: threads that take requests from /dev/fuse and give the file system's answers back.

One thread at a time waits for a request. While a request can be answered from memory it stays that one
thread: handing over would cost more than the answer. Before it reads from the store it lets the next one
take its place, so that slow reads wait beside each other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from typing import TYPE_CHECKING

from headrace.latch import Latch
from headrace.posix.mount import protocol
from headrace.posix.mount.protocol import REQUEST_BYTES, BadRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.posix.mount.filesystem import FileSystem, Reply

__all__ = ["Serving"]

_log = logging.getLogger("headrace.mount")

_GOES_ON = frozenset((errno.EINTR, errno.EAGAIN, errno.ENOENT))
"""ENOENT: the request was interrupted before it was taken, or before it was answered."""


class Serving:
    """Threads over one connection.

    Args:
        device: file descriptor of /dev/fuse, mounted; closed by `close`.
        file_system: what answers.
        threads: reads of the store under way at most.
    """

    def __init__(self, device: int, file_system: FileSystem, *, threads: int = 16) -> None:
        self._device = device
        self._file_system = file_system
        self._turn = threading.Lock()
        self._over = Latch()
        self._threads = [
            threading.Thread(target=self._serve, name=f"mount-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until it is unmounted, or `stop` is called; signals are handled meanwhile."""
        self._over.wait()

    def stop(self) -> None:
        """Let `wait` return."""
        self._over.set()

    def close(self) -> None:
        """End the connection: whoever waits for an answer gets an error."""
        # Not closed: a thread that is about to read must not meet another file under this number.
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, self._device, inheritable=False)
        os.close(nothing)

    def _serve(self) -> None:
        buffer = memoryview(bytearray(REQUEST_BYTES))
        turn = self._turn
        mine = False

        def let_others() -> None:
            nonlocal mine
            if mine:
                mine = False
                turn.release()

        try:
            while not self._over.is_set():
                if not mine:
                    turn.acquire()
                    mine = True
                if not self._one(buffer, let_others):
                    break
        finally:
            let_others()
            self._over.set()

    def _one(self, buffer: memoryview, let_others: Callable[[], None]) -> bool:
        """Takes and answers one request; False when there will be none."""
        try:
            count = os.readv(self._device, [buffer])
        except OSError as e:
            if e.errno in _GOES_ON:
                return True
            if e.errno != errno.ENODEV and not self._over.is_set():  # ENODEV says: unmounted
                _log.error("the connection to the kernel broke: %s", e)
            return False
        if not count:
            return False
        try:
            reply = self._file_system.answer(buffer[:count], let_others)
        except BadRequestError as e:
            _log.error("not a request: %s", e)
            return True
        if reply is None:
            return True
        self._write(reply)
        return True

    def _write(self, reply: Reply) -> None:
        try:
            os.writev(self._device, reply)
        except OSError as e:
            if e.errno in _GOES_ON or e.errno == errno.ENODEV:
                return
            _log.error("the kernel refused an answer: %s", e)
            # Without any answer the caller would wait until the kernel's timeout.
            with contextlib.suppress(OSError):
                os.writev(self._device, protocol.error_reply(protocol.unique_of(reply), errno.EIO))
