"""Fail the Nth call: the operating system refuses one call that changes files, whichever it is.

`Refusing(folder, number, code)` stands in for the functions of `os` (and `open`) that change files. Calls on
what lies below `folder` are counted, of whichever thread; the one with the number is refused. Refusals of
calls that only tidy up are harmless by design, so the caller looks at what is left.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base import files

if TYPE_CHECKING:
    import pytest

CHANGING = (
    "open", "write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "rename", "replace", "mkdir",
    "ftruncate", "truncate", "posix_fallocate", "link", "unlink", "remove", "rmdir", "fchmod",
)  # fmt: skip


class Refusing:
    """Counts calls below a folder, and refuses one of them."""

    def __init__(self, folder: Path, number: int, code: int = errno.EIO) -> None:
        self._folder = folder.resolve()
        self._number, self._code = number, code
        self._lock = threading.Lock()
        self.calls = 0
        self.refused = ""
        """The call that was refused: "" if there were not so many."""
        self.tidying = False
        """It was one of those that remove a folder: what is left of that is expected."""

    def install(self, patch: pytest.MonkeyPatch) -> Refusing:
        for name in CHANGING:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        patch.setattr(io, "open", self._watched("io.open", io.open))
        patch.setattr(builtins, "open", self._watched("io.open", builtins.open))
        if hasattr(files, "_renameat2"):
            patch.setattr(files, "_renameat2", self._watched("renameat2", files._renameat2))
        return self

    def _watched(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_below(args[0] if args else None, kwargs.get("dir_fd")):
                with self._lock:
                    self.calls += 1
                    refuse = self.calls == self._number
                if refuse:
                    self.refused = name
                    self.tidying = name in {"rmdir", "unlink"} or _within_rmtree()
                    path = args[0] if isinstance(args[0], str | bytes | os.PathLike) else None
                    raise OSError(self._code, os.strerror(self._code), path)
            return call(*args, **kwargs)

        return watched

    def _is_below(self, what: Any, folder: object) -> bool:
        try:
            if isinstance(what, int):
                path = Path(f"/proc/self/fd/{what}").readlink()
            elif isinstance(folder, int):
                path = Path(f"/proc/self/fd/{folder}").readlink() / os.fsdecode(what)
            else:
                path = Path.cwd() / os.fsdecode(what)
        except (OSError, TypeError, ValueError):
            return False
        return path.is_relative_to(self._folder)


def _within_rmtree() -> bool:
    """Whether `shutil.rmtree` has called: it opens folders and looks at them before it removes anything."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == shutil.__file__:
            return True
        frame = frame.f_back
    return False
