"""Lifetime: what ends with a `with` block, an event that signal handlers may set, values computed once."""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Closing", "Latch", "lazy"]

T_co = TypeVar("T_co", covariant=True)


class Closing:
    """Calls its own `close` at the end of a `with` block, however that ends."""

    if TYPE_CHECKING:
        close: Callable[[], object]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


class Latch:
    """As `threading.Event`, but once it is set it stays so. From any thread, and from signal handlers.

    `threading.Event` may not be set by a handler: for a moment its waiter holds a lock that the handler, which
    runs in the same thread, would then wait for, for ever.
    """

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
        """Wait until it is set (at most `timeout` seconds); signals are handled meanwhile.

        Returns whether it is set.
        """
        limit_s = -1 if timeout is None else max(0.0, timeout)
        if not self._set and self._shut.acquire(timeout=limit_s):
            self._open()  # for the next one
        return self._set

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody was quicker
            self._shut.release()


class lazy(cached_property[T_co]):  # noqa: N801 - a decorator, as the one it stands for
    """As `functools.cached_property`, without the lock that Python 3.11 has there, one for all instances.

    A child that is forked while another thread computes the property of whatever instance would wait for that
    lock for ever. Two threads may compute the same here; the later value stays.
    """

    def __init__(self, function: Callable[[Any], T_co]) -> None:
        super().__init__(function)
        self.lock = contextlib.nullcontext()
