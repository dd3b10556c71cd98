"""Interrupt: Ctrl-C as an event, for commands that look again and again."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["interrupt"]


@contextmanager
def interrupt() -> Iterator[Latch]:
    """A latch that Ctrl-C opens. The exception would be lost in a finaliser now and then."""
    ended = Latch()
    before = signal.signal(signal.SIGINT, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGINT, before)
