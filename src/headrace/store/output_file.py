"""OutputFile: writes a generated file so that it is there whole or not at all.

Bytes gather in an aligned buffer. A file that is not tiny is written with O_DIRECT, so that generation
runs at the disk's speed and does not fill the page cache with what the benchmark is to read; a tiny one
is one buffered write. The file has a temporary name, which no reader takes for data, until it is done.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.errors import VolumeError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["BUFFER_BYTES", "OutputFile", "WriteBuffer", "write_error"]

BUFFER_BYTES = 4 << 20
"""Of one write: beyond it a disk's bandwidth does not grow."""

_ALIGNMENT = 4096
_DIRECT_BYTES_MIN = 64 << 10
"""Below it a direct write waits longer for the disk than the page cache costs."""
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_TEMPORARY = ".part"


class WriteBuffer:
    """An aligned buffer for one thread's files, one after the other: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BUFFER_BYTES)
        self.view = memoryview(self.memory)
        self.array = np.frombuffer(self.memory, np.uint8)


class OutputFile:
    """A file that is being written from its beginning to its end.

    Args:
        path: where the file appears when `with` is left without an error.
        buffer: the thread's buffer.
        direct: False never uses O_DIRECT.
        sync: whether the disk has the file's bytes before it appears. Its name is durable once the folder
            is synced.

    Raises:
        VolumeError: the disk is full, or the operating system refuses; nothing is left then.
    """

    def __init__(
        self, path: str, buffer: WriteBuffer, *, direct: bool = True, sync: bool = False
    ) -> None:
        self.path = path
        self.written = 0
        folder, name = os.path.split(path)
        self.temporary = os.path.join(folder, f".{name}{_TEMPORARY}")
        self._buffer = buffer
        self._held = 0
        self._fd = -1
        self._direct = direct
        self._sync = sync
        self._done = False
        self._patches: list[tuple[int, bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as e:
            raise write_error(e, self.path) from e
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            if kind is not None or not self._done:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.temporary)
        if isinstance(error, OSError) and not isinstance(error, VolumeError):
            raise write_error(error, self.path) from error

    def tell(self) -> int:
        """Bytes that were written so far."""
        return self.written

    def flush(self) -> None:
        """For libraries that ask for it: what is written becomes visible at the end alone."""

    def write(self, data: Any) -> int:
        """Appends a contiguous buffer."""
        given = memoryview(data).cast("B")
        size = at = given.nbytes
        at = 0
        while at < size:
            piece = min(size - at, BUFFER_BYTES - self._held)
            self._buffer.view[self._held : self._held + piece] = given[at : at + piece]
            self._held += piece
            at += piece
            if self._held == BUFFER_BYTES:
                self._drain(BUFFER_BYTES)
        self.written += size
        return size

    def adopt(self) -> None:
        """Takes over what a library wrote under the temporary name."""
        assert not self.written
        self._fd = os.open(self.temporary, os.O_WRONLY | os.O_CLOEXEC)
        self._direct = False
        self.written = os.fstat(self._fd).st_size

    def fill(self, offset: int, blocks: Iterable[NDArray[np.uint8]]) -> None:
        """Overwrites bytes of an adopted file, from an aligned offset directly."""
        assert not self._held
        direct = offset % _ALIGNMENT == 0 and self._reopen_direct()
        for block in blocks:
            at = 0
            while at < block.size:
                piece = min(block.size - at, BUFFER_BYTES - self._held)
                self._buffer.array[self._held : self._held + piece] = block[at : at + piece]
                self._held += piece
                at += piece
                if self._held == BUFFER_BYTES:
                    self._pwrite(offset, BUFFER_BYTES)
                    offset += BUFFER_BYTES
                    self._held = 0
        if direct and self._held:
            self._buffered()
        self._pwrite(offset, self._held)
        self._held = 0

    def _reopen_direct(self) -> bool:
        try:
            again = os.open(self.temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as e:
            if e.errno not in _NO_DIRECT:
                raise
            return False
        os.close(self._fd)
        self._fd, self._direct = again, True
        return True

    def _pwrite(self, offset: int, size: int) -> None:
        at = 0
        while at < size:
            try:
                at += os.pwrite(self._fd, self._buffer.view[at:size], offset + at)
            except OSError as e:
                if not self._direct or e.errno not in _NO_DIRECT:
                    raise
                self._buffered()
            else:
                if self._direct and at % _ALIGNMENT:
                    self._buffered()

    def patch(self, offset: int, data: bytes) -> None:
        """Replaces bytes that were written before."""
        assert offset + len(data) <= self.written
        self._patches.append((offset, data))

    def _open(self, *, direct: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if direct:
            try:
                self._fd = os.open(self.temporary, flags | os.O_DIRECT, 0o666)
            except OSError as e:
                if e.errno not in _NO_DIRECT:
                    raise
            else:
                return
        self._direct = False
        self._fd = os.open(self.temporary, flags, 0o666)

    def _drain(self, size: int) -> None:
        if self._fd < 0:
            self._open(direct=self._direct)
        at = 0
        while at < size:
            try:
                at += os.write(self._fd, self._buffer.view[at:size])
            except OSError as e:
                if not self._direct or e.errno not in _NO_DIRECT:
                    raise
                self._buffered()
                continue
            if self._direct and at % _ALIGNMENT:
                self._buffered()  # a short write, near a full disk
        self._held = 0

    def _buffered(self) -> None:
        """Writes on without O_DIRECT."""
        again = os.open(self.temporary, os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(again, os.lseek(self._fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.close(self._fd)
        self._fd, self._direct = again, False

    def _finish(self) -> None:
        if self._fd < 0:
            self._open(direct=self._direct and self._held >= _DIRECT_BYTES_MIN)
        if self._direct and self._held:
            # The tail is padded to whole blocks and cut: one more direct write, not a page cache full.
            end = -(-self._held // _ALIGNMENT) * _ALIGNMENT
            self._buffer.array[self._held : end] = 0
            self._drain(end)
        if self._held:
            self._drain(self._held)
        if os.fstat(self._fd).st_size != self.written:
            os.ftruncate(self._fd, self.written)
        if self._patches:
            if self._direct:
                self._buffered()
            for offset, data in self._patches:
                os.pwrite(self._fd, data, offset)
        if self._sync:
            os.fsync(self._fd)
        os.rename(self.temporary, self.path)
        self._done = True


def write_error(error: OSError, path: str) -> VolumeError:
    """An error of the operating system, while a file is written, as ours."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "the disk is full" if full else f"cannot be written: {error.strerror or error}"
    step = (
        "Free some space and run the same command: it goes on where it stopped."
        if full
        else "Check the folder and its permissions."
    )
    return VolumeError(f"{path}: {what}.", path=path, errno=error.errno, next_step=step)
