"""Files of a job on one node's local disk: what its server holds, and directories that all processes map.

A server's file has no name by default and lives as long as somebody has it open: a killed server leaves no
bytes on the disk. Other processes of the node, which run as the same user, open it as `/proc/PID/fd/N`, and
keep reading when the server is gone. Directories are fetched over the fabric once:

    FOLDER/               0700: `headrace-job-SESSION` on the node's local disk
      lock                held (shared) by whoever uses the folder: the last one removes it
      UUID.hrd            a directory; its uuid is made of its content
      UUID.lock           held by the process that fetches it

A kill leaves the folder but no lock: `sweep` removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.files import NewFile, create_file, lock, lock_path, own_folder, unlock
from headrace.base.lifetime import Closing
from headrace.errors import CorruptStore, JobError, StoreNotFound, VolumeError
from headrace.store.segment import open_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace import _native
    from headrace.store.manifest import Segment

    Fetch = Callable[[int], None]  # fills a file of the directory's size


class LocalFile(Closing):
    """A file of known size that this process writes; without a `name` it has none.

    The disk's space is taken at once.

    Raises VolumeError if the disk is full, or refuses.
    """

    def __init__(self, folder: str, size: int = 0, name: str | None = None) -> None:
        self.name = None if name is None else f"{folder}/{name}"
        self.fd = -1
        try:
            if self.name is None:
                with tempfile.TemporaryFile(dir=folder) as file:
                    self.fd = os.dup(file.fileno())
            else:
                Path(self.name).unlink(missing_ok=True)
                self.fd = create_file(self.name, mode=0o600)
            if size:
                try:
                    os.posix_fallocate(self.fd, 0, size)
                except OSError as e:
                    if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
                    os.ftruncate(self.fd, size)
        except OSError as e:
            self.close()
            raise VolumeError(
                f"{folder}: a file of {size:,} bytes cannot be made: {e.strerror}.",
                path=folder,
                errno=e.errno,
                next_step="Free some space, or name a folder on a larger local disk: --local.",
            ) from e

    @property
    def path(self) -> str:
        """Opens it, from any process of this user on this node."""
        return self.name or f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Closes our descriptor: a file without a name goes with the last one."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


PREFIX = "headrace-job-"
_TRIES = 20


class Directories(Closing):
    """The directories of one session on this node; `fetched` counts those that this process had to fetch.

    Raises JobError if the folder is not safe: somebody else could put files there.
    """

    def __init__(self, local: Path, session: str) -> None:
        self.folder = local / f"{PREFIX}{session}"
        self.fetched = 0
        self._lock = -1
        self._pid = os.getpid()
        for _ in range(_TRIES):
            # The last one may have just left.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self._lock = _enter(self.folder)
                return
        raise JobError(f"{self.folder}: cannot be entered.", path=str(self.folder))

    def open(self, entry: Segment, fetch: Fetch) -> _native.Directory:
        """Opens a segment's directory; fetches it unless some process of the node has.

        Raises CorruptStore if what came is not the directory that the entry means.
        """
        path = self.folder / f"{entry.uuid}.hrd"
        if (directory := self._opened(path, entry)) is not None:
            return directory
        fetching = lock_path(self.folder / f"{entry.uuid}.lock", wait_s=None)
        assert fetching is not None
        try:
            if (directory := self._opened(path, entry)) is not None:
                return directory
            with NewFile(path, mode=0o600) as new:
                os.ftruncate(new.fd, entry.directory_bytes)
                fetch(new.fd)
                new.publish(sync=False)
            self.fetched += 1
        finally:
            unlock(fetching)
        return open_directory(str(path), entry)

    def close(self) -> None:
        """Leaves the folder; the last process on the node removes it. Mapped directories stay valid."""
        fd, self._lock = self._lock, -1
        if fd < 0:
            return
        if self._pid == os.getpid() and lock(fd):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_lock", -1) >= 0:
            self.close()

    @staticmethod
    def _opened(path: Path, entry: Segment) -> _native.Directory | None:
        with contextlib.suppress(StoreNotFound, CorruptStore, VolumeError):
            return open_directory(str(path), entry)
        return None


def sweep(local: Path) -> list[Path]:
    """Removes what killed processes left in a local folder; returns what it removed."""
    removed = []
    for folder in local.glob(f"{PREFIX}*"):
        if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            continue
        with contextlib.suppress(OSError):
            # One whose removal failed half-way may have no lock any more.
            fd = lock_path(folder / "lock")
            if fd is not None:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
                os.close(fd)
    return removed


def _enter(folder: Path) -> int:
    """Makes the folder if need be and takes its lock; FileNotFoundError if it was removed meanwhile."""
    try:
        own_folder(folder, JobError, "Remove it.")
        fd = lock_path(folder / "lock", shared=True, wait_s=None)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if nothing is in it
        raise
    assert fd is not None
    return fd
