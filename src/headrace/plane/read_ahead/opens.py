"""Files that are open without having been opened: over bytes that were read ahead.

`serve` puts a layer over `open` while at least one plan is served in this process. A path that is planned,
and whose bytes are there and still true, is answered with an ordinary `io.BufferedReader` (or
`io.TextIOWrapper`) whose raw file lies in memory. All else goes to what lies beneath, with the arguments
it came with.

The raw file becomes a real one, at the same position, as soon as somebody asks for its descriptor
(`fileno`): mmap, np.fromfile, fstat and libraries in C work on it as ever.
"""

# ruff: noqa: D102  # the methods of a raw file are those of io.RawIOBase
from __future__ import annotations

import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

from headrace.io.replaced import MEMORY, python_open, real_open

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace import _native
    from headrace.plane.read_ahead.stage import ReadAhead


_CODE = (".py", ".pyc", ".so")
_WATCHED_MAX = 256  # opens of one sample that are kept


class _Watching(threading.local):
    paths: list[str] | None = None


_watching = _Watching()
_lock = threading.RLock()  # a loader may be collected, and stop serving, anywhere
_watches = 0  # samples that are watched now, by any thread


def _note(paths: list[str], file: Any) -> None:
    try:
        path = file if type(file) is str else os.fsdecode(file)
    except (TypeError, ValueError):
        return
    if path not in paths and not path.endswith(_CODE):
        paths.append(path)


class OpensWatch:
    """Collects the files that this thread opens for reading, by `open`, between `begin` and `end`.

    What is opened otherwise could not be served. An audit hook would see it, and can never be taken away: it
    costs every later open of the process a microsecond, a sixth of what 4 kB from the page cache cost.
    """

    __slots__ = ("_before", "paths")

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._before: list[str] | None = None

    def begin(self) -> None:
        """Start to collect; a watch may lie within another, which then sees less."""
        global _watches  # noqa: PLW0603  # there is one `open`
        self._before = _watching.paths
        _watching.paths = self.paths
        with _lock:
            _watches += 1
            if _watches == 1 and not _served:
                python_open.add(_open, MEMORY)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self) -> list[str]:
        """Stop, and return what was opened: paths as they were given, each once, in order."""
        global _watches  # noqa: PLW0603
        if (
            _watching.paths is self.paths
        ):  # not on another thread, which dropped what an error had left behind
            _watching.paths = self._before
        with _lock:
            _watches = max(0, _watches - 1)  # 0 in a child that was forked inside
            if not _watches and not _served:
                python_open.remove(_open)
        return self.paths


_BINARY = frozenset({"rb", "br"})
_TEXT = frozenset({"r", "rt", "tr"})
_FLAGS = os.O_RDONLY | os.O_CLOEXEC


class AheadFile(io.FileIO):
    """A raw file opened for reading whose bytes lie in memory until its descriptor is asked for.

    The base is never initialised (it opens nothing) before that, and serves all calls after it.
    """

    mode = "rb"
    closefd = True
    _memory: memoryview | None

    def __new__(cls, _content: _native.FileBytes, _name: str | bytes) -> Self:
        return super().__new__(cls)

    def __init__(self, content: _native.FileBytes, name: str | bytes) -> None:
        self._content: _native.FileBytes | None = content
        self._memory = memoryview(content)  # type: ignore[arg-type]  # a buffer since 3.12, to type checkers
        self._position = 0
        self.name = name

    def _in_memory(self) -> memoryview | None:
        """The bytes, or None when the real file serves."""
        if self._memory is None and super().closed:
            raise ValueError("I/O operation on closed file")
        return self._memory

    def readable(self) -> bool:
        return True if self._in_memory() is not None else super().readable()

    def seekable(self) -> bool:
        return True if self._in_memory() is not None else super().seekable()

    def writable(self) -> bool:
        self._in_memory()
        return False

    def isatty(self) -> bool:
        self._in_memory()
        return False

    def readall(self) -> bytes:
        memory = self._in_memory()
        if memory is None:
            return super().readall()
        start, self._position = self._position, max(self._position, len(memory))
        return bytes(memory[start:])

    def read(self, size: int | None = -1, /) -> bytes:
        memory = self._in_memory()
        if memory is None:
            return super().read(-1 if size is None else size)
        if size is None or size < 0:
            return self.readall()
        data = bytes(memory[self._position : self._position + size])
        self._position += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        memory = self._in_memory()
        if memory is None:
            return super().readinto(buffer)
        with memoryview(buffer) as view, view.cast("B") as target:
            data = memory[self._position : self._position + len(target)]
            target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        memory = self._in_memory()
        if memory is None:
            return super().seek(offset, whence)
        if whence not in {0, 1, 2}:
            return super(AheadFile, self._opened()).seek(offset, whence)
        position = (0, self._position, len(memory))[whence] + offset
        if position < 0:
            raise OSError(22, os.strerror(22))
        self._position = position
        return position

    def tell(self) -> int:
        return self._position if self._in_memory() is not None else super().tell()

    def write(self, _data: Any, /) -> int:
        self._in_memory()
        raise io.UnsupportedOperation("File not open for writing")

    def truncate(self, _size: int | None = None, /) -> int:
        self._in_memory()
        raise io.UnsupportedOperation("File not open for writing")

    def fileno(self) -> int:
        return super(AheadFile, self._opened()).fileno()

    def _opened(self) -> AheadFile:
        """This file, with a real descriptor at the same position."""
        memory = self._in_memory()
        content = self._content
        if memory is None or content is None:
            return self
        name = self.name
        super().__init__(name, "rb")
        if not content.same_as(super().fileno()):
            # The path names other bytes by now; this file was opened before that.
            copy = os.memfd_create("headrace", os.MFD_CLOEXEC)
            with real_open(copy, "wb", closefd=False) as file:
                file.write(memory)
            super().close()
            super().__init__(copy, "rb")
            self.name = name
        super().seek(self._position)
        self._release()
        return self

    def close(self) -> None:
        if self._memory is not None:
            self._release()
        elif not super().closed:
            super().close()

    def _release(self) -> None:
        self._memory = None  # not released: a reader on another thread may be copying from it
        self._content = None

    @property
    def closed(self) -> bool:
        return self._memory is None and super().closed

    def __repr__(self) -> str:
        if self.closed:
            return "<_io.FileIO [closed]>"
        return f"<_io.FileIO name={self.name!r} mode='rb' closefd=True>"


def _open(
    beneath: Callable[..., Any],
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    *rest: Any,
    **named: Any,
) -> Any:
    """`open`, looking into the plans first; a watched thread's file is noted."""
    if (mode in _BINARY or mode in _TEXT) and not isinstance(file, int):
        paths = _watching.paths
        if paths is not None and len(paths) < _WATCHED_MAX:
            _note(paths, file)
        opened = _serve(file, mode, buffering, rest, named)
        if opened is not None:
            return opened
    return beneath(file, mode, buffering, *rest, **named)


_served: tuple[ReadAhead, ...] = ()


def serve(files: ReadAhead) -> None:
    """Answer opens of planned files from memory, from now on and in this process."""
    with _lock:
        if any(served is files for served in _served):
            return
        if not _served and not _watches:
            python_open.add(_open, MEMORY)
        _change_served(lambda before: (*before, files))


def _change_served(change: Callable[[tuple[ReadAhead, ...]], tuple[ReadAhead, ...]]) -> None:
    global _served  # noqa: PLW0603  # there is one `open`
    while True:
        before = _served
        after = change(before)
        if _served is before:  # else a loader was collected meanwhile, and stopped serving
            _served = after
            return


def stop_serving(files: ReadAhead) -> None:
    """Let go of the files; the last one puts the real `open` back."""
    with _lock:
        _change_served(lambda before: tuple(one for one in before if one is not files))
        if not _served and not _watches:
            python_open.remove(_open)


def forget_in_child() -> None:
    """After a fork: what was read ahead belongs to the parent."""
    global _served, _watches, _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _served, _watches = (), 0
    _watching.paths = None  # this thread may have been forked inside a watch of the parent's
    python_open.remove(_open)


def _after_buffering(
    encoding: Any = None,
    errors: Any = None,
    newline: Any = None,
    closefd: Any = True,
    opener: Any = None,
) -> tuple[Any, Any, Any, bool]:
    """The arguments of `open` after `buffering`; the last says whether the file is opened by its path."""
    return encoding, errors, newline, bool(closefd) and opener is None


def _serve(
    file: Any,
    mode: str,
    buffering: int,
    rest: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """An open file over memory, or None."""
    try:
        key = file if type(file) is str else os.fsdecode(file)
    except (TypeError, ValueError):
        return None
    for files in _served:
        if key not in files.planned:
            continue
        text = mode in _TEXT
        try:
            encoding, errors, newline, by_path = _after_buffering(*rest, **named)
        except TypeError:  # the real open will say what is wrong
            break
        if text:
            plain = newline in {None, "", "\n", "\r", "\r\n"} and buffering != 0
        else:
            plain = (encoding, errors, newline) == (None, None, None) and buffering != 1
        if not by_path or not plain:  # the real open raises better than we could
            break
        content = files.take(key)
        if content is None:
            continue
        name = file if type(file) is str else os.fspath(file)
        sys.audit("open", name, mode, _FLAGS)
        raw = AheadFile(content, name)
        if buffering == 0:
            return raw
        buffer = io.BufferedReader(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        if not text:
            return buffer
        wrapper = io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)
        wrapper.mode = mode  # type: ignore[misc]
        return wrapper
    return None
