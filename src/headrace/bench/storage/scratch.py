"""Scratch: a folder on the mount under test, of which nothing is left, however the measurement ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Final

from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["scratch"]

_REMOVE_S: Final = 30.0


@contextlib.contextmanager
def scratch(path: str) -> Iterator[str]:
    """A new folder in `path`, removed at the end, which Ctrl-C and SIGTERM also are.

    Raises:
        BenchError: `path` is no folder, or nothing can be written there.
    """
    if not os.path.isdir(path):
        raise BenchError(
            f"{path} is no folder.", path=path, next_step="Give a folder of the mount."
        )
    with _term_is_an_exit():
        try:
            folder = tempfile.mkdtemp(prefix=".headrace-storage-", dir=path)
        except OSError as e:
            raise BenchError(f"{path} cannot be written to: {e.strerror}.", path=path) from e
        try:
            yield folder
        except BaseException:
            _remove(folder)
            raise
        if not _remove(folder):
            raise BenchError(f"{folder} cannot be removed.", path=folder, next_step="Remove it.")


def _remove(folder: str) -> bool:
    """Whether it is gone. A thread that an interrupt left behind may write on for a moment: try again."""
    until = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        gone = not os.path.exists(folder)
        if gone or time.monotonic() > until:
            return gone
        time.sleep(0.05)


@contextlib.contextmanager
def _term_is_an_exit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
