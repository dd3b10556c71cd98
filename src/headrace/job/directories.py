"""Directories of a job on one node: fetched over the fabric once, and mapped by all its processes.

    FOLDER/               0700: `headrace-job-SESSION` on the node's local disk
      lock                held (shared) by whoever uses the folder: the last one removes it
      UUID.hrd            a directory; its uuid is made of its content
      UUID.lock           held by the process that fetches it

A kill leaves the folder but no lock: `sweep` removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from typing import TYPE_CHECKING

from headrace.closing import Closing
from headrace.errors import CorruptStore, JobError, VolumeError
from headrace.store.segment import check_directory, directory_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from headrace.store.manifest import Segment
    from headrace.store.segment import Directory

    Fetch = Callable[[int], None]
    """Fills a file of the directory's size."""

__all__ = ["Directories", "sweep"]

PREFIX = "headrace-job-"
_TRIES = 20


class Directories(Closing):
    """The directories of one session on this node.

    Args:
        local: a folder on the local disk.
        session: of the job.

    Attributes:
        fetched: how many this process had to fetch.

    Raises:
        JobError: the folder is not safe: somebody else could put files there.
    """

    def __init__(self, local: Path, session: str) -> None:
        self.folder = local / f"{PREFIX}{session}"
        self.fetched = 0
        self._lock = -1
        self._pid = os.getpid()
        for _ in range(_TRIES):
            self._lock = _enter(self.folder)
            if self._lock >= 0:
                return
        raise JobError(f"{self.folder}: cannot be entered.", path=str(self.folder))

    def open(self, entry: Segment, fetch: Fetch, *, reference: bool = False) -> Directory:
        """Opens a segment's directory; fetches it unless some process of the node has.

        Raises:
            CorruptStore: what came is not the directory that the entry means.
        """
        path = self.folder / f"{entry.uuid}.hrd"
        if (found := self._opened(path, entry, reference=reference)) is not None:
            return found
        with _locked(self.folder / f"{entry.uuid}.lock"):
            if (found := self._opened(path, entry, reference=reference)) is not None:
                return found
            temporary = path.with_suffix(f".{os.getpid()}.new")
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, entry.directory_bytes)
                fetch(fd)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            self.fetched += 1
        directory: Directory = directory_class(reference=reference).open(os.fsencode(path))
        check_directory(directory, entry, str(path))
        return directory

    def close(self) -> None:
        """Leaves the folder; the last process on the node removes it. Mapped directories stay valid."""
        fd, self._lock = self._lock, -1
        if fd < 0:
            return
        if self._pid == os.getpid():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.folder, ignore_errors=True)
        os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_lock", -1) >= 0:
            self.close()

    @staticmethod
    def _opened(path: Path, entry: Segment, *, reference: bool) -> Directory | None:
        with contextlib.suppress(FileNotFoundError, CorruptStore, VolumeError):
            if path.stat().st_size == entry.directory_bytes:
                directory: Directory = directory_class(reference=reference).open(os.fsencode(path))
                check_directory(directory, entry, str(path))
                return directory
        return None


def sweep(local: Path) -> list[Path]:
    """Removes what killed processes left in a local folder; returns what it removed."""
    removed = []
    for folder in local.glob(f"{PREFIX}*"):
        if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            continue
        with contextlib.suppress(OSError), (folder / "lock").open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _enter(folder: Path) -> int:
    """Makes the folder if need be and takes its lock; -1 if it was removed meanwhile."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise JobError(
                f"{folder}: expected a folder of mode 0700 of user {os.geteuid()}.",
                path=str(folder),
                next_step="Remove it.",
            )
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(fd), (folder / "lock").lstat()):
            return fd
    except FileNotFoundError:
        pass
    os.close(fd)
    return -1


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
