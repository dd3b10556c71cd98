"""DiskCopies: copies of one root's files on a local disk, which outlive the daemon.

    DIR/files/
      lock                   held (flock) by the daemon that uses it
      <hash of the root>/
        files.json           says that headrace made it, and of which root
        tmp-<number>         a copy that is being written
        <two digits>/<hash of the path>-<hash of what the original was>-<crc32c>

A copy is written under another name and renamed: its name says all that is known of it, so that a kill leaves
whole copies and temporary files. Those are removed, by their names and in folders with our mark only. What an
earlier daemon left is not used before its crc was checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.base.files import (
    create_file,
    lock_path,
    make_folder,
    read_file,
    replace_file,
    write_all,
)
from headrace.errors import StoreError
from headrace.plane.disk_cache import disk_room

if TYPE_CHECKING:
    from headrace.node.files.copies import Bytes

_FORMAT = "headrace-files"
_BLOCK = 4096
_FOLDER = re.compile(rb"[0-9a-f]{1,12}\Z")
_NAME = re.compile(rb"([0-9a-f]{24})-([0-9a-f]{16})-([0-9a-f]{8})\Z")
_LEFT = re.compile(rb"tmp-[0-9]{1,12}\Z|journal(-new)?\Z|[0-9]{1,12}\Z")
"""What kills leave, and daemons that kept a journal of numbered copies."""


@dataclass(slots=True)
class DiskCopy:
    """A copy as its name has it.

    `original` is made of inode, size and times of the original when it was copied. The device's
    number may change when a network file system is mounted again. `checked`: this daemon wrote it, or has
    checked it.
    """

    name: bytes
    original: bytes
    size: int
    crc: int
    checked: bool = False

    @property
    def disk_bytes(self) -> int:
        """Bytes that it takes."""
        return -(-self.size // _BLOCK) * _BLOCK


class DiskFolder:
    """The folder that all roots share, and its quota (None: what leaves a part of the file system free).

    Raises OSError if it cannot be used, or another daemon does.
    """

    def __init__(self, path: str, quota_bytes: int | None = None) -> None:
        self.path = os.fsencode(os.path.realpath(os.path.join(path, "files")))
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        lock = lock_path(os.path.join(self.path, b"lock"), owned=True)
        if lock is None:
            raise BlockingIOError(errno.EAGAIN, "another daemon uses it", os.fsdecode(self.path))
        self._lock = lock

    def close(self) -> None:
        """Let another daemon use it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class DiskCopies:
    """The copies of one root's files. Not thread-safe: its owner holds a lock.

    Raises OSError if its folder cannot be used, and StoreError if something lies there that is not
    ours.
    """

    def __init__(self, folder: DiskFolder, root: bytes) -> None:
        self._folder = folder
        name = hashlib.sha256(root).hexdigest()[:32]
        self.path = os.path.join(folder.path, name.encode())
        self._copies: dict[bytes, DiskCopy] = {}
        self.removed = 0
        self._written = 0
        self._mark(root)
        self._look(self.path)

    def __len__(self) -> int:
        return len(self._copies)

    def room(self) -> int:
        """Bytes that may still be written, by all roots."""
        folder = self._folder
        return disk_room(folder.path, folder.quota_bytes, lambda: folder.used_bytes)

    def path_of(self, copy: DiskCopy) -> bytes:
        """Where a copy lies."""
        return os.path.join(self.path, copy.name)

    def find(self, path: bytes, row: tuple[int, ...]) -> DiskCopy | None:
        """The copy of a file that is now as `row` says; one of what it was is removed."""
        copy = self._copies.get(_hash(path, 12))
        if copy is not None and (copy.original, copy.size) != (_original(row), row[2]):
            self.remove(path)
            return None
        return copy

    def write(self, path: bytes, row: tuple[int, ...], data: Bytes) -> DiskCopy:
        """Make and publish a copy.

        Raises OSError if the disk is full, or fails; nothing is left then.
        """
        array = np.frombuffer(data, np.uint8)
        key, original, crc = _hash(path, 12), _original(row), _native.crc32c(array)
        copy = DiskCopy(
            b"%b/%b-%b-%08x" % (key[:2], key, original, crc), original, row[2], crc, True
        )
        self._written += 1
        temporary = os.path.join(self.path, b"tmp-%d" % self._written)
        try:
            fd = create_file(temporary, os.O_WRONLY, mode=0o400)
            try:
                write_all(fd, array, 0)
            finally:
                os.close(fd)
            os.makedirs(os.path.dirname(self.path_of(copy)), exist_ok=True)
            os.rename(temporary, self.path_of(copy))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._keep(key, copy)
        return copy

    def check(self, copy: DiskCopy) -> bool:
        """Whether a copy has the bytes that it had. Reads it; may run without the owner's lock."""
        try:
            data = read_file(copy.name, copy.size + 1, within=self.path)
        except OSError:
            return False
        return len(data) == copy.size and _native.crc32c(np.frombuffer(data, np.uint8)) == copy.crc

    def remove(self, path: bytes) -> None:
        """Remove a copy. Whoever has it open keeps it."""
        copy = self._copies.pop(_hash(path, 12), None)
        if copy is not None:
            self._folder.used_bytes -= copy.disk_bytes
            with contextlib.suppress(OSError):
                os.unlink(self.path_of(copy))

    def close(self) -> None:
        """Let go; the copies stay."""
        self._folder.used_bytes -= sum(copy.disk_bytes for copy in self._copies.values())
        self._copies.clear()

    def _keep(self, key: bytes, copy: DiskCopy) -> None:
        self._copies[key] = copy
        self._folder.used_bytes += copy.disk_bytes

    def _mark(self, root: bytes) -> None:
        """Make the folder, or see that it is ours."""
        mark = os.path.join(self.path, b"files.json")
        make_folder(self.path, mode=0o700, exist_ok=True)
        wanted = {"format": _FORMAT, "version": 1, "root": root.decode("latin-1")}
        if not os.listdir(self.path):
            replace_file(mark, json.dumps(wanted).encode(), sync=False)
            return
        content = None
        with contextlib.suppress(FileNotFoundError, ValueError):
            content = json.loads(read_file(mark, 1 << 16, owned=True))
        if content != wanted:
            raise StoreError(
                f"{os.fsdecode(self.path)} is no folder of copies of {os.fsdecode(root)}.",
                path=os.fsdecode(self.path),
                next_step="Remove what lies there, or name another folder as --cache-dir.",
            )

    def _look(self, folder: bytes) -> None:
        """Take over the copies that an earlier daemon left, and remove what it was writing."""
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if folder == self.path and _FOLDER.match(entry.name):
                        self._look(entry.path)
                    continue
                parts = _NAME.match(entry.name) if folder != self.path else None
                if parts is not None and parts[1] not in self._copies:
                    name, size = entry.path[len(self.path) + 1 :], entry.stat().st_size
                    self._keep(parts[1], DiskCopy(name, parts[2], size, int(parts[3], 16)))
                elif parts is not None or _LEFT.match(entry.name):
                    os.unlink(entry.path)
                    self.removed += 1


def _hash(data: bytes, nbytes: int) -> bytes:
    return hashlib.blake2b(data, digest_size=nbytes).hexdigest().encode()


def _original(row: tuple[int, ...]) -> bytes:
    return _hash(repr(row[1:]).encode(), 8)
