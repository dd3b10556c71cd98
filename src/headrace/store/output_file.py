"""OutputFile: writes a generated file so that it is there whole or not at all.

Bytes gather in an aligned buffer. A file that is not tiny is written with O_DIRECT, so that generation
runs at the disk's speed and does not fill the page cache with what the benchmark is to read; a tiny one
is one buffered write. The file has a temporary name, which no reader takes for data, until it is done.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any, Self

from headrace.base.files import NewFile
from headrace.errors import VolumeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

BUFFER_BYTES = 4 << 20  # of one write: beyond it a disk's bandwidth does not grow
_ALIGNMENT = 4096
_DIRECT_BYTES_MIN = 64 << 10
"""Below it a direct write waits longer for the disk than the page cache costs."""
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class WriteBuffer:
    """An aligned buffer for one thread's files, one after the other: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, BUFFER_BYTES))


class OutputFile:
    """A file that is written from its beginning to its end, and appears when `with` ends without an error.

    `direct=False` never uses O_DIRECT. With `sync` the disk has the bytes before; the name is durable once
    the folder is synced. Raises VolumeError if the disk is full, or the system refuses; nothing is left then.
    """

    def __init__(
        self, path: str, buffer: WriteBuffer, *, direct: bool = True, sync: bool = False
    ) -> None:
        self.path = path
        self.written = 0
        self._buffer = buffer
        self._held = 0
        self._new: NewFile | None = None
        self._direct = direct
        self._sync = sync

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as e:
            raise write_error(e, self.path) from e
        finally:
            if self._new is not None:
                self._new.discard()
        if isinstance(error, OSError) and not isinstance(error, VolumeError):
            raise write_error(error, self.path) from error

    @property
    def temporary(self) -> str:
        """The name that it has until it is whole, for a library that writes by name and then `adopt`."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # the library may lock it itself
        return self._file.temporary

    @property
    def _fd(self) -> int:
        return self._file.fd

    @property
    def _file(self) -> NewFile:
        if self._new is None:
            self._new = NewFile(self.path, os.O_WRONLY)
        return self._new

    def tell(self) -> int:
        """Bytes that were written so far."""
        return self.written

    def flush(self) -> None:
        """For libraries that ask for it: what is written becomes visible at the end alone."""

    def write(self, data: Any) -> int:
        """Appends a contiguous buffer."""
        size = self._gather(data)
        self.written += size
        return size

    def adopt(self) -> None:
        """Takes over what a library wrote under the temporary name."""
        assert not self.written
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._direct = False
        self.written = os.fstat(self._fd).st_size

    def fill(self, offset: int, blocks: Iterable[NDArray[np.uint8]]) -> None:
        """Overwrites bytes of an adopted file, from an aligned offset directly."""
        assert not self._held
        if offset % _ALIGNMENT == 0:
            self._set_direct(on=True)
        os.lseek(self._fd, offset, os.SEEK_SET)
        for block in blocks:
            self._gather(block)
        if self._held:
            self._set_direct(on=False)
            self._drain(self._held)

    def _gather(self, data: Any) -> int:
        """Takes bytes into the buffer, and writes it each time that it is full; returns how many."""
        given = memoryview(data).cast("B")
        at = 0
        while at < given.nbytes:
            piece = min(given.nbytes - at, BUFFER_BYTES - self._held)
            self._buffer.view[self._held : self._held + piece] = given[at : at + piece]
            self._held += piece
            at += piece
            if self._held == BUFFER_BYTES:
                self._drain(BUFFER_BYTES)
        return given.nbytes

    def _set_direct(self, *, on: bool) -> None:
        """Writes on with O_DIRECT, where the file system has it, or without."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(
                self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
            )
        except OSError as e:
            if e.errno not in _NO_DIRECT:
                raise
            on = False
        self._direct = on

    def _drain(self, size: int) -> None:
        if self._new is None and self._direct:
            self._set_direct(on=True)
        at = 0
        while at < size:
            try:
                at += os.write(self._fd, self._buffer.view[at:size])
            except OSError as e:
                if not self._direct or e.errno not in _NO_DIRECT:
                    raise
                self._set_direct(on=False)
                continue
            if self._direct and at % _ALIGNMENT:
                self._set_direct(on=False)  # a short write, near a full disk
        self._held = 0

    def _finish(self) -> None:
        if self._new is None:
            self._direct = self._held >= _DIRECT_BYTES_MIN and self._direct
            self._set_direct(on=self._direct)
        if self._direct and self._held:
            # The tail is padded to whole blocks and cut: one more direct write, not a page cache full.
            end = -(-self._held // _ALIGNMENT) * _ALIGNMENT
            self._buffer.view[self._held : end] = bytes(end - self._held)
            self._drain(end)
        if self._held:
            self._drain(self._held)
        if os.fstat(self._fd).st_size != self.written:
            os.ftruncate(self._fd, self.written)
        if self._sync:
            os.fsync(self._fd)
        self._file.publish(sync=False)


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
