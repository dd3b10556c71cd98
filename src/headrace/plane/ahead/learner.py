"""Learner: watches which files a dataset opens for each sample.

Python tells audit hooks of each `open`. Inside `watch()` the paths that the calling thread opens for
reading are collected, whoever opens them: the dataset, PIL, numpy, pickle. Files that are opened by
code in C are not seen, and cannot be served from memory either.

An audit hook cannot be removed: the process gets one, when the first learner begins, and it costs
one comparison per event while nobody watches.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

__all__ = ["Watch", "forget_in_child"]

_CODE = (".py", ".pyc", ".so")
_WATCHED_MAX = 256  # opens of one sample that are kept


class _Watching(threading.local):
    paths: list[str] | None = None


_watching = _Watching()
_lock = threading.Lock()
_installed = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "open":
        return
    paths = _watching.paths
    if paths is None or len(paths) >= _WATCHED_MAX:
        return
    path, mode, flags = args
    # os.open has no mode; what it gives is a descriptor, which is not served from memory.
    if mode is None or flags & os.O_ACCMODE != os.O_RDONLY:
        return
    if not isinstance(path, str):
        if not isinstance(path, bytes):
            return  # a descriptor
        path = os.fsdecode(path)
    if path not in paths and not path.endswith(_CODE):
        paths.append(path)


def _install() -> None:
    global _installed  # noqa: PLW0603  # one hook per process
    with _lock:
        if not _installed:
            _installed = True
            sys.addaudithook(_hook)


class Watch:
    """Collects the files that this thread opens for reading between `begin` and `end`."""

    __slots__ = ("_before", "paths")

    def __init__(self) -> None:
        if not _installed:
            _install()
        self.paths: list[str] = []
        self._before: list[str] | None = None

    def begin(self) -> None:
        """Start to collect; a watch may lie within another, which then sees less."""
        self._before = _watching.paths
        _watching.paths = self.paths

    def end(self) -> list[str]:
        """Stop, and return what was opened: paths as they were given, each once, in order."""
        _watching.paths = self._before
        return self.paths


def forget_in_child() -> None:
    """After a fork: the child's thread may have been forked inside a watch of the parent's."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _watching.paths = None
