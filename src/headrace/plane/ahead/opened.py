"""Files that are open without having been opened: over bytes that were read ahead.

`serve` puts a callable in the place of `builtins.open` and `io.open` while at least one plan is
served in this process. A path that is planned, and whose bytes are there and still true, is answered
with an ordinary `io.BufferedReader` (or `io.TextIOWrapper`) whose raw file lies in memory. All else
goes to the real `open` with the arguments it came with.

The raw file becomes a real one, at the same position, as soon as somebody asks for its descriptor
(`fileno`): mmap, np.fromfile, fstat and libraries in C work on it as ever.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace import _native

__all__ = ["PlannedFiles", "forget_in_child", "real_open", "serve", "stop_serving"]

real_open = io.open
"""The interpreter's own `open`."""

_BINARY = frozenset({"rb", "br"})
_TEXT = frozenset({"r", "rt", "tr"})
_FLAGS = os.O_RDONLY | os.O_CLOEXEC


class PlannedFiles(Protocol):
    """Files that are read ahead, as `open` sees them."""

    planned: Any
    """A container of the paths (str) that are planned, for `in`."""

    def take(self, path: str) -> _native.FileBytes | None:
        """The file's bytes, or None when the real open must serve."""
        ...


class AheadFile(io.FileIO):
    """A raw file opened for reading whose bytes lie in memory until its descriptor is asked for.

    The base is never initialised (it opens nothing) before that, and serves all calls after it.
    """

    mode = "rb"
    closefd = True
    _memory: memoryview | None

    def __new__(cls, _content: _native.FileBytes, _name: str | bytes) -> AheadFile:
        return super().__new__(cls, -1)

    def __init__(self, content: _native.FileBytes, name: str | bytes) -> None:
        self._content: _native.FileBytes | None = content
        self._memory = memoryview(content)
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

    def write(self, data: Any, /) -> int:
        self._in_memory()
        raise io.UnsupportedOperation("File not open for writing")

    def truncate(self, size: int | None = None, /) -> int:
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


class _Open:
    """`open`, looking into the plans first. No function: stored in a class, it must not bind."""

    __slots__ = ("__doc__",)
    __name__ = "open"
    __qualname__ = "open"
    __module__ = "io"

    def __init__(self) -> None:
        self.__doc__ = real_open.__doc__

    def __call__(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,  # noqa: FBT001, FBT002  # the signature of open
        opener: Any = None,
    ) -> Any:
        if opener is None and (mode in _BINARY or mode in _TEXT) and not isinstance(file, int):
            opened = _serve(file, mode, buffering, encoding, errors, newline)
            if opened is not None:
                return opened
        return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def __reduce__(self) -> str:
        return "open"


_open = _Open()
_served: tuple[PlannedFiles, ...] = ()
_lock = threading.Lock()


def serve(files: PlannedFiles) -> None:
    """Answer opens of planned files from memory, from now on and in this process."""
    global _served  # noqa: PLW0603  # there is one `open`
    with _lock:
        if any(served is files for served in _served):
            return
        _served = (*_served, files)
        _install(_open)


def stop_serving(files: PlannedFiles) -> None:
    """Let go of the files; the last one puts the real `open` back."""
    global _served  # noqa: PLW0603
    with _lock:
        _served = tuple(served for served in _served if served is not files)
        if not _served:
            _remove()


def forget_in_child() -> None:
    """After a fork: what was read ahead belongs to the parent."""
    global _served, _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _served = ()
    _remove()


def _install(replacement: Any) -> None:
    # Somebody else's replacement stays: it would be lost, or call us after we are gone.
    if builtins.open is real_open:
        builtins.open = replacement
    if io.open is real_open:
        io.open = replacement


def _remove() -> None:
    if builtins.open is _open:  # type: ignore[comparison-overlap]
        builtins.open = real_open
    if io.open is _open:  # type: ignore[comparison-overlap]
        io.open = real_open


def _serve(
    file: Any,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> Any:
    """An open file over memory, or None."""
    key = file if type(file) is str else _key_of(file)
    if key is None:
        return None
    for files in _served:
        if key not in files.planned:
            continue
        text = mode in _TEXT
        if not _is_plain(text, buffering, encoding, errors, newline):
            return None
        content = files.take(key)
        if content is None:
            continue
        sys.audit("open", key if type(file) is str else os.fspath(file), mode, _FLAGS)
        raw = AheadFile(content, os.fspath(file))
        if buffering == 0:
            return raw
        buffer = io.BufferedReader(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        if not text:
            return buffer
        wrapper = io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)
        wrapper.mode = mode  # type: ignore[misc]
        return wrapper
    return None


def _key_of(file: Any) -> str | None:
    try:
        return os.fsdecode(file)
    except (TypeError, ValueError):
        return None


def _is_plain(
    text: bool,  # noqa: FBT001
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> bool:
    """Whether the real open would accept this; it raises or warns better than we could."""
    if text:
        return buffering != 0 and newline in {None, "", "\n", "\r", "\r\n"}
    return buffering != 1 and encoding is None and errors is None and newline is None
