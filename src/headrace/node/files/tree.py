"""FileTree: the files below one root, as a scan found them; and the scan.

A tree never changes: a newer scan makes a newer tree. A scan runs in threads of its own: one where
looking costs processor time only, many where each look is a round trip. What cannot be looked at is
counted and named, and is no error: the program will say it better.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.machine.host import mounts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace import _native

STAT_COLUMNS = (
    "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_mode", "st_nlink", "st_uid", "st_gid",
    "st_atime_ns", "st_ctime_ns", "st_blocks", "st_blksize", "is_link",
)  # fmt: skip
"""The columns of `FileTree.stats`. `is_link`: the path is a symbolic link, and the rest is its target's."""

IDENTITY = [0, 1, 2, 3, STAT_COLUMNS.index("st_ctime_ns")]
"""Columns that say which file it was, and as of when: st_ctime too, since programs set st_mtime back."""

FILES_MAX = 1 << 24  # of one root; about 300 bytes each. More are not looked at, and open as ever.
FAR_THREADS = 16
ERRORS_MAX = 16  # messages that are kept

_OF_THE_KERNEL = frozenset(
    (
        "proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "bpf",
        "pstore", "nsfs", "mqueue", "devpts", "binfmt_misc", "fusectl",
    )
)  # fmt: skip
"""File systems without files: a link to /proc leads to the root folder of each process, and so to all else."""

_Folder = tuple[bytes, frozenset[tuple[int, int]]]
"""A folder's path, and the (device, inode) of each folder above it."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTree:
    """The regular files below a root: sorted absolute paths, and int64 columns as `STAT_COLUMNS` says.

    `unread` counts folders and files that could not be looked at; `errors` says what was wrong with some.
    """

    root: bytes
    paths: list[bytes]
    stats: NDArray[np.int64]
    unread: int = 0
    errors: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def same_as(self, other: FileTree) -> bool:
        """Whether both have the same files, unchanged."""
        mine, theirs = self.stats[:, IDENTITY], other.stats[:, IDENTITY]
        return np.array_equal(mine, theirs) and self.paths == other.paths


def stat_row(s: os.stat_result, *, is_link: bool = False) -> tuple[int, ...]:
    """A row of `FileTree.stats`."""
    return (
        s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode, s.st_nlink, s.st_uid, s.st_gid,
        s.st_atime_ns, s.st_ctime_ns, s.st_blocks, s.st_blksize, int(is_link),
    )  # fmt: skip


def identity(s: os.stat_result) -> tuple[int, ...]:
    """The columns `IDENTITY` of a file's row."""
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


class TreeScan:
    """Looks at everything below a root: the absolute path of a folder, or of one file.

    The look-ups of a simulated storage (`model`) are paid for as a client with many in flight would.
    """

    def __init__(
        self, root: bytes, *, threads: int = 1, model: _native.SlowModel | None = None
    ) -> None:
        self._root = root
        self._threads_max = threads
        self._model = model
        self._files: list[tuple[bytes, tuple[int, ...]]] = []
        self._unread = 0
        self._errors: list[str] = []
        self._lock = threading.Lock()
        self._ended = False
        self._left_out = {
            os.makedev(*map(int, mount.device.split(":")))
            for mount in mounts()
            if mount.kind in _OF_THE_KERNEL
        }

    def stop(self) -> None:
        """End the scan early; what it found is not used."""
        self._ended = True

    def run(self) -> FileTree:
        """Look at everything; blocks until all is seen, or `stop`."""
        folders: list[_Folder] = []
        try:
            status = os.stat(self._root)
        except OSError as e:
            self._failed(e)
        else:
            if stat.S_ISDIR(status.st_mode):
                folders.append((self._root, frozenset({(status.st_dev, status.st_ino)})))
            elif stat.S_ISREG(status.st_mode):
                self._files.append((self._root, stat_row(status)))
        while folders and not self._ended:  # one level of the tree after the other
            folders = self._level(folders)
        self._files.sort()
        stats = np.array([row for _, row in self._files], np.int64)
        return FileTree(
            self._root, [path for path, _ in self._files], stats.reshape(-1, len(STAT_COLUMNS)),
            self._unread, tuple(self._errors),
        )  # fmt: skip

    def _level(self, folders: list[_Folder]) -> list[_Folder]:
        """Look at some folders; returns those in them."""
        inner: list[_Folder] = []

        def work() -> None:
            while True:
                with self._lock:
                    if self._ended or not folders:
                        return
                    folder = folders.pop()
                inner.extend(self._look(folder))

        others = [  # daemons: a look may never return
            threading.Thread(target=work, name="headrace-node-scan", daemon=True)
            for _ in range(min(self._threads_max, len(folders)) - 1)
        ]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
        return inner

    def _look(self, folder: _Folder) -> list[_Folder]:
        """Look at one folder; returns those in it."""
        files: list[tuple[bytes, tuple[int, ...]]] = []
        folders: list[_Folder] = []
        path, above = folder
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    self._entry(entry, above, files, folders)
        except OSError as e:
            self._failed(e)
        if self._model is not None:  # sleep until so many look-ups that began together are done
            now = self._model.now_ns()
            due = max(self._model.admit_open(now) for _ in range(1 + len(files)))
            time.sleep(max(0, due - self._model.now_ns()) / 1e9)
        with self._lock:
            room = FILES_MAX - len(self._files)
            self._unread += max(0, len(files) - room)
            self._ended = self._ended or (len(files) > room and not room)
            self._files += files[:room]
        return folders

    def _entry(
        self,
        entry: os.DirEntry[bytes],
        above: frozenset[tuple[int, int]],
        files: list[tuple[bytes, tuple[int, ...]]],
        folders: list[_Folder],
    ) -> None:
        try:
            if entry.is_dir():
                status = entry.stat()
                key = (status.st_dev, status.st_ino)
                # A link to a folder above leads round in circles.
                if key not in above and status.st_dev not in self._left_out:
                    folders.append((entry.path, above | {key}))
            elif entry.is_file():
                files.append((entry.path, stat_row(entry.stat(), is_link=entry.is_symlink())))
        except OSError as e:
            self._failed(e)

    def _failed(self, error: OSError) -> None:
        with self._lock:
            self._unread += 1
            if len(self._errors) < ERRORS_MAX:
                self._errors.append(str(error))
