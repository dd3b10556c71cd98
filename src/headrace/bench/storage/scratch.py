"""Scratch: a folder on the mount under test, of which nothing is left, however the measurement ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from typing import TYPE_CHECKING

from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["scratch"]


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
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
