"""Sending: the writing end of a multiprocessing queue, without its feeder thread where that can be.

`multiprocessing.Queue.put` hands every object to a feeder thread, which has to win the GIL before it
can pickle and write: for small batches that costs more than all the rest. A `Sender` pickles at once
and writes at once if the message fits into the pipe without blocking; only what does not is left to
a thread, and then everything after it is too, until the thread has caught up: order is kept.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import struct
import threading
from collections import deque
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

PIPE_BYTES = select.PIPE_BUF
"""What a pipe that polls as writable takes whole, without blocking."""

LOCK_WAIT_S = 0.001
"""Another worker holds the pipe for microseconds, if it too sends something small."""

READER_CHECK_S = 1.0
"""How often somebody who waits for room in a pipe looks whether its reader lives: workers hold its reading end
open, too."""

_LENGTH = struct.Struct("!i")  # as multiprocessing.connection frames a message


class Sender:
    """The writing end of a queue in this process. One thread puts.

    Args:
        queue: a multiprocessing queue; any other kind of object is put into as it is.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        # What is not multiprocessing's own (a test's, another library's) is put into as it is.
        self._direct = isinstance(queue, Queue)
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._fd = -1
        if self._direct:
            self._lock = queue._wlock  # noqa: SLF001 - there is no other way past its thread
            # A descriptor of our own: the collector may close the queue's before what holds the queue, which
            # goes on saying its number, and that may be another file's by then.
            self._fd = os.dup(queue._writer.fileno())  # noqa: SLF001
            self._room = select.poll()
            self._room.register(self._fd, select.POLLOUT)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def put(self, message: Any) -> None:
        """Send a message. Never waits for the reader.

        Raises:
            Exception: the message cannot be pickled.
        """
        if not self._direct:
            self._queue.put(message)
            return
        content = ForkingPickler.dumps(message)
        self._queue._sem.acquire(False)  # noqa: SLF001 - the reader counts messages back
        if self._busy or not self._write(content):
            self._leave_to_thread(bytes(content))

    def flush(self) -> None:
        """Wait until all is written, or whoever started this process is gone: nobody reads then."""
        reader = multiprocessing.parent_process()
        with self._wake:
            while self._busy and (reader is None or reader.is_alive()):
                self._wake.wait(READER_CHECK_S)

    def close(self) -> None:
        """End the thread; what it has not written is dropped."""
        with self._wake:
            self._closed = True
            self._waiting.clear()
            self._wake.notify_all()

    def _write(self, content: Any) -> bool:
        """Write at once, if that cannot block."""
        if len(content) > PIPE_BYTES - _LENGTH.size:
            return False
        if self._fd < 0:
            return True  # it was collected: nobody waits for more
        if not self._lock.acquire(True, LOCK_WAIT_S):
            return False
        try:
            if not self._room.poll(0):
                return False
            os.write(self._fd, _LENGTH.pack(len(content)) + content)
            return True
        finally:
            self._lock.release()

    def _leave_to_thread(self, content: bytes) -> None:
        with self._wake:
            self._busy = True
            self._waiting.append(content)
            self._wake.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, daemon=True, name="headrace-send")
            self._thread.start()

    def _feed(self) -> None:
        while True:
            with self._wake:
                while not self._waiting:
                    if self._closed:
                        return
                    self._busy = False
                    self._wake.notify_all()
                    self._wake.wait()
                content = self._waiting.popleft()
            try:
                with self._lock:
                    self._queue._writer.send_bytes(content)  # noqa: SLF001
            except OSError:  # the queue was closed: nobody waits for more
                with self._wake:
                    self._waiting.clear()
