"""Local files of a node's server: without a name by default, so that nothing can be left behind.

A file without a name lives as long as somebody has it open: a killed server leaves no bytes on the disk.
Other processes of the node, which run as the same user, open it as `/proc/PID/fd/N`, and keep reading
when the server is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from headrace.base.files import create_file
from headrace.closing import Closing
from headrace.errors import VolumeError

__all__ = ["LocalFile"]


class LocalFile(Closing):
    """A file of known size that this process writes.

    Args:
        folder: on the local disk.
        size: bytes; the disk's space is taken at once. 0 leaves it empty.
        name: keep it under this name; else it has none.

    Raises:
        VolumeError: the disk is full, or refuses.
    """

    def __init__(self, folder: str, size: int = 0, name: str | None = None) -> None:
        self.name = None if name is None else f"{folder}/{name}"
        try:
            self.fd = _unnamed(folder) if self.name is None else _named(self.name)
        except OSError as e:
            raise _refused(folder, size, e) from e
        try:
            if size:
                _allocate(self.fd, size)
        except OSError as e:
            self.close()
            raise _refused(folder, size, e) from e

    @property
    def path(self) -> str:
        """Opens it, from any process of this user on this node."""
        return self.name or f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Closes our descriptor: a file without a name goes with the last one."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _unnamed(folder: str) -> int:
    with contextlib.suppress(OSError):  # some file systems have no O_TMPFILE
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="headrace-", dir=folder)
    Path(path).unlink()
    return fd


def _named(path: str) -> int:
    Path(path).unlink(missing_ok=True)
    return create_file(path, mode=0o600)


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def _refused(folder: str, size: int, e: OSError) -> VolumeError:
    return VolumeError(
        f"{folder}: a file of {size:,} bytes cannot be made: {e.strerror}.",
        path=folder,
        errno=e.errno,
        next_step="Free some space, or name a folder on a larger local disk: --local.",
    )
