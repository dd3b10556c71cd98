"""Latch: an event that a signal handler may set while its own thread waits for it.

`threading.Event` may not be set so: for a moment its waiter holds a lock that the handler, which runs in the
same thread, would then wait for, for ever.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["Latch"]


class Latch:
    """As `threading.Event`, but once it is set it stays so. From any thread, and from signal handlers."""

    def __init__(self) -> None:
        self._set = False
        self._shut = threading.Lock()
        self._shut.acquire()

    def set(self) -> None:
        """Let all who wait go on, now and later."""
        self._set = True
        self._open()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; signals are handled meanwhile.

        Args:
            timeout: seconds; None: for ever.

        Returns:
            Whether it is set.
        """
        if not self._set and self._shut.acquire(
            timeout=-1 if timeout is None else max(0.0, timeout)
        ):
            self._open()  # for the next one
        return self._set

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody was quicker
            self._shut.release()
