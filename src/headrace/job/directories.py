"""Directories of a job on one node: fetched over the fabric once, and mapped by all its processes.

    FOLDER/               0700: `headrace-job-SESSION` on the node's local disk
      lock                held (shared) by whoever uses the folder: the last one removes it
      UUID.hrd            a directory; its uuid is made of its content
      UUID.lock           held by the process that fetches it

A kill leaves the folder but no lock: `sweep` removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from typing import TYPE_CHECKING

from headrace.base.files import NewFile, lock, lock_path
from headrace.closing import Closing
from headrace.errors import CorruptStore, JobError, StoreNotFound, VolumeError
from headrace.store.segment import open_directory

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
        with self._fetching(entry):
            if (found := self._opened(path, entry, reference=reference)) is not None:
                return found
            with NewFile(path, mode=0o600) as new:
                os.ftruncate(new.fd, entry.directory_bytes)
                fetch(new.fd)
                new.publish(sync=False)
            self.fetched += 1
        return open_directory(str(path), entry, reference=reference)

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
    def _opened(path: Path, entry: Segment, *, reference: bool) -> Directory | None:
        with contextlib.suppress(StoreNotFound, CorruptStore, VolumeError):
            return open_directory(str(path), entry, reference=reference)
        return None

    @contextlib.contextmanager
    def _fetching(self, entry: Segment) -> Iterator[None]:
        fd = lock_path(self.folder / f"{entry.uuid}.lock", wait_s=None)
        assert fd is not None
        try:
            yield
        finally:
            os.close(fd)


def sweep(local: Path) -> list[Path]:
    """Removes what killed processes left in a local folder; returns what it removed."""
    removed = []
    for folder in local.glob(f"{PREFIX}*"):
        if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            continue
        with contextlib.suppress(OSError):
            fd = lock_path(folder / "lock", make=False)
            if fd is not None:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
                os.close(fd)
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
        fd = lock_path(folder / "lock", shared=True, wait_s=None)
    except FileNotFoundError:
        return -1
    assert fd is not None
    return fd
