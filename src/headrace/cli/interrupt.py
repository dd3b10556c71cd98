"""Interrupt: Ctrl-C as an event, for commands that look again and again."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["interrupt"]


@contextmanager
def interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets. The exception would be lost in a finaliser now and then."""
    ended = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGINT, before)
