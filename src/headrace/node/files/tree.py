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
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from headrace import _native

__all__ = ["STAT_COLUMNS", "FileTree", "Scan", "is_far", "joined", "pay", "stat_row"]

STAT_COLUMNS = (
    "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_mode", "st_nlink", "st_uid", "st_gid",
    "st_atime_ns", "st_ctime_ns", "st_blocks", "st_blksize", "is_link",
)  # fmt: skip
"""The columns of `FileTree.stats`; the first four say which file it was. `is_link`: the path is a
symbolic link, and the rest is its target's."""

FILES_MAX = 1 << 24
"""Of one root; about 300 bytes each. More are not looked at, and open as ever."""

FAR_THREADS = 16
ERRORS_MAX = 16
"""Messages that are kept."""

_REMOTE_TYPES = frozenset(
    {
        0x6969,  # nfs
        0xFF534D42, 0xFE534D42, 0x517B,  # cifs, smb2, smb
        0x0BD00BD0,  # lustre
        0x00C36400,  # ceph
        0x47504653,  # gpfs
        0x19830326,  # beegfs
        0x65735546,  # fuse
        0x7461636F,  # ocfs2
        0x01021997,  # 9p
        0x6A656A63,  # vboxsf, virtiofs guests
        0x20030528,  # orangefs
        0x5346414F,  # afs
    }
)  # fmt: skip
"""Kinds of file systems whose files lie on other machines, or behind a program of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class FileTree:
    """The regular files below a root.

    Attributes:
        root: its absolute path.
        paths: absolute, sorted.
        stats: int64, (files, columns) as `STAT_COLUMNS` says.
        unread: folders and files that could not be looked at.
        errors: what was wrong with some of them.
    """

    root: bytes
    paths: list[bytes]
    stats: NDArray[np.int64]
    unread: int = 0
    errors: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return int(self.stats[:, 2].sum())

    def same_as(self, other: FileTree) -> bool:
        """Whether both have the same files, unchanged."""
        mine, theirs = self.stats[:, :4], other.stats[:, :4]
        return np.array_equal(mine, theirs) and self.paths == other.paths


def stat_row(s: os.stat_result, *, is_link: bool = False) -> tuple[int, ...]:
    """A row of `FileTree.stats`."""
    return (
        s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode, s.st_nlink, s.st_uid, s.st_gid,
        s.st_atime_ns, s.st_ctime_ns, s.st_blocks, s.st_blksize, int(is_link),
    )  # fmt: skip


def is_far(path: bytes) -> bool:
    """Whether files there are slow to open, even where their bytes are at hand."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 64)()  # struct statfs is smaller everywhere; f_type comes first
    if libc.statfs(path, ctypes.byref(buffer)) != 0:
        return False
    return buffer[0] & 0xFFFFFFFF in _REMOTE_TYPES


@dataclass(slots=True)
class _Found:
    """What a scan has so far."""

    entries: list[tuple[bytes, tuple[int, ...]]] = field(default_factory=list)
    unread: int = 0
    errors: list[str] = field(default_factory=list)


class Scan:
    """Looks at everything below a root.

    Args:
        root: absolute path of a folder (or of one file).
        threads: how many look at the same time.
        model: a simulated storage, whose look-ups are paid for as a client with many of them in flight
            would.
    """

    def __init__(
        self, root: bytes, *, threads: int = 1, model: _native.SlowModel | None = None
    ) -> None:
        self.root = root
        self._threads_max = threads
        self._model = model
        self._found = _Found()
        self._todo: deque[tuple[bytes, frozenset[tuple[int, int]]]] = deque()
        self._busy = 0
        self._changed = threading.Condition()
        self._ended = False

    @property
    def files(self) -> int:
        """Files found so far."""
        return len(self._found.entries)

    def stop(self) -> None:
        """End the scan early; what it found is not used."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def run(self) -> FileTree:
        """Look at everything; blocks until all is seen, or `stop`."""
        try:
            status = os.stat(self.root)
        except OSError as e:
            self._failed(e)
        else:
            if stat.S_ISDIR(status.st_mode):
                self._todo.append((self.root, frozenset({(status.st_dev, status.st_ino)})))
            elif stat.S_ISREG(status.st_mode):
                self._found.entries.append((self.root, stat_row(status)))
        others = [
            threading.Thread(target=self._work, name="headrace-node-scan", daemon=True)
            for _ in range(self._threads_max - 1)
        ]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        return self._tree()

    def _tree(self) -> FileTree:
        listing = self._found
        listing.entries.sort()
        stats = np.array([row for _, row in listing.entries], np.int64).reshape(
            -1, len(STAT_COLUMNS)
        )
        paths = [path for path, _ in listing.entries]
        return FileTree(self.root, paths, stats, listing.unread, tuple(listing.errors))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._todo and self._busy and not self._ended:
                    self._changed.wait()
                if self._ended or not self._todo:
                    self._changed.notify_all()
                    return
                folder, above = self._todo.pop()
                self._busy += 1
            try:
                self._look(folder, above)
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _look(self, folder: bytes, above: frozenset[tuple[int, int]]) -> None:
        """Look at one folder."""
        files: list[tuple[bytes, tuple[int, ...]]] = []
        folders: list[tuple[bytes, frozenset[tuple[int, int]]]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._entry(entry, above, files, folders)
        except OSError as e:
            self._failed(e)
        self._pay(1 + len(files))
        with self._changed:
            room = FILES_MAX - len(self._found.entries)
            if len(files) > room:
                self._found.unread += len(files) - room
                self._ended = self._ended or not room
            self._found.entries += files[:room]
            self._todo.extend(folders)
            self._changed.notify_all()

    def _entry(
        self,
        entry: os.DirEntry[bytes],
        above: frozenset[tuple[int, int]],
        files: list[tuple[bytes, tuple[int, ...]]],
        folders: list[tuple[bytes, frozenset[tuple[int, int]]]],
    ) -> None:
        try:
            if entry.is_dir():
                status = entry.stat()
                key = (status.st_dev, status.st_ino)
                if key not in above:  # a link to a folder above leads round in circles
                    folders.append((entry.path, above | {key}))
            elif entry.is_file():
                files.append((entry.path, stat_row(entry.stat(), is_link=entry.is_symlink())))
        except OSError as e:
            self._failed(e)

    def _failed(self, error: OSError) -> None:
        with self._changed:
            self._found.unread += 1
            if len(self._found.errors) < ERRORS_MAX:
                self._found.errors.append(str(error))

    def _pay(self, looks: int) -> None:
        """Take as long as the simulated storage would for so many look-ups in flight together."""
        if self._model is not None:
            pay(self._model, looks)


def pay(model: _native.SlowModel, looks: int) -> None:
    """Sleep until so many look-ups that began together are done."""
    now = model.now_ns()
    due = max((model.admit_open(now) for _ in range(looks)), default=now)
    time.sleep(max(0, due - model.now_ns()) / 1e9)


def joined(trees: Iterable[FileTree]) -> tuple[list[bytes], NDArray[np.int64]]:
    """All files of some trees: paths, and their rows."""
    paths: list[bytes] = []
    rows = [np.empty((0, len(STAT_COLUMNS)), np.int64)]
    for tree in trees:
        paths += tree.paths
        rows.append(tree.stats)
    return paths, np.concatenate(rows)
