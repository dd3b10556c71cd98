"""Loop: one thread waits for descriptors, and runs what other threads ask it to run.

Whoever owns the loop calls `wait` again and again, and does between the calls what comes with time: deadlines,
sending. A function that fails is logged, and costs nobody else the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
from collections import deque
from selectors import EVENT_READ, EVENT_WRITE
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

__all__ = ["EVENT_READ", "EVENT_WRITE", "Loop"]

_log = logging.getLogger("headrace")


class Loop:
    """Descriptors and their handlers. All methods but `call_soon` and `stop` are for the loop's thread."""

    def __init__(self) -> None:
        self.stopping = False
        self._selector = selectors.DefaultSelector()
        self._soon: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, EVENT_READ, self._woken)

    def register(self, file: socket | int, handler: Callable[[int], None]) -> None:
        """Have `handler` called with the events when there is something to read."""
        self._selector.register(file, EVENT_READ, handler)

    def modify(self, file: socket, events: int) -> None:
        """Wait for these events of a registered descriptor from now on."""
        key = self._selector.get_key(file)
        if key.events != events:
            self._selector.modify(file, events, key.data)

    def unregister(self, file: socket | int) -> None:
        """Do not wait for a descriptor any more; nothing happens to one that is not registered."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run a function in the loop. Thread-safe; after `close` it is never run."""
        self._soon.append(function)
        self._ring()

    def stop(self) -> None:
        """End the loop. From any thread, and from signal handlers."""
        self.stopping = True
        self._ring()

    def wait(self, seconds: float | None) -> None:
        """Wait for events (None: for ever), call their handlers, and run what was asked for."""
        for key, events in self._selector.select(seconds):
            key.data(events)
        for _ in range(len(self._soon)):
            try:
                self._soon.popleft()()
            except Exception:  # noqa: BLE001 - a mistake of ours must not cost everybody the loop
                _log.exception("something failed that should not")

    def close(self) -> None:
        """Close what is the loop's own; registered descriptors stay open."""
        self._selector.close()
        wake, self._wake = self._wake, -1  # first: others may ring meanwhile
        os.close(wake)

    def _ring(self) -> None:
        if (wake := self._wake) >= 0:
            os.eventfd_write(wake, 1)

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
