"""DiskCopies: copies of one root's files on a local disk, which outlive the daemon.

    DIR/files/
      lock                   held (flock) by the daemon that uses it
      <hash of the root>/
        files.json           says that headrace made it, and of which root
        journal              a line for each copy that was published or removed
        tmp-<number>         a copy that is being written
        <number / 4096>/<number>

A copy is written under another name, renamed, and then put down in the journal with its original's
identity and its crc32c. After a kill the journal's last line may be torn, and copies may lie there that
it does not name: those are removed, by their names and in folders with our mark only. What an earlier
daemon left is not used before its crc was checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.base.files import (
    create_file,
    lock_path,
    make_folder,
    open_or_create,
    read_file,
    replace_file,
)
from headrace.errors import StoreError
from headrace.plane.disk_cache import disk_reserve
from headrace.store.directory import write_all

if TYPE_CHECKING:
    from headrace.node.files.copies import Bytes

_FORMAT = "headrace-files"
_BLOCK = 4096
_NUMBERS_A_FOLDER = 4096
_NAME = re.compile(rb"[0-9]{1,12}\Z")
_TEMPORARY = re.compile(rb"tmp-[0-9]{1,12}\Z")
_LINE_BYTES_MAX = 16384

_SPARE_LINES = 1024
"""Of a journal, beside two for each copy; a longer one is written anew."""


@dataclass(slots=True)
class DiskCopy:
    """A copy as the journal knows it; `number` names its file.

    `ino`, `size` and `mtime_ns` are of the original when it was copied. Not its device, whose number may change
    when a network file system is mounted again. `checked`: this daemon wrote it, or has checked it.
    """

    number: int
    ino: int
    size: int
    mtime_ns: int
    crc: int
    checked: bool = False

    @property
    def disk_bytes(self) -> int:
        """Bytes that it takes."""
        return -(-self.size // _BLOCK) * _BLOCK


class DiskFolder:
    """The folder that all roots share, and its quota (None: what leaves a part of the file system free).

    Raises:
        OSError: it cannot be used, or another daemon does.
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

    def room(self) -> int:
        """Bytes that may still be written."""
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        if self.quota_bytes is None:
            return max(0, free - disk_reserve(disk.f_blocks * disk.f_frsize))
        return max(0, min(self.quota_bytes - self.used_bytes, free))

    def close(self) -> None:
        """Let another daemon use it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class DiskCopies:
    """The copies of one root's files. Not thread-safe: its owner holds a lock.

    Raises:
        OSError: its folder cannot be used.
        StoreError: something lies there that is not ours.
    """

    def __init__(self, folder: DiskFolder, root: bytes) -> None:
        self._folder = folder
        name = hashlib.sha256(root).hexdigest()[:32]
        self.path = os.path.join(folder.path, name.encode())
        self.copies: dict[bytes, DiskCopy] = {}
        self.removed = 0
        self._next = 1
        self._mark(root)
        self._lines = 0
        self._journal = self._open_journal(b"journal")
        self._replay()
        self._clean()
        if self._lines > 2 * len(self.copies) + _SPARE_LINES:
            self._rewrite()
        folder.used_bytes += sum(copy.disk_bytes for copy in self.copies.values())

    def room(self) -> int:
        """Bytes that may still be written, by all roots."""
        return self._folder.room()

    def path_of(self, copy: DiskCopy) -> bytes:
        """Where a copy lies."""
        return self._file(copy.number)

    def find(self, path: bytes, row: tuple[int, ...]) -> DiskCopy | None:
        """The copy of a file that is now as `row` says; one of what it was is removed."""
        copy = self.copies.get(path)
        if copy is None:
            return None
        if (copy.ino, copy.size, copy.mtime_ns) != (row[1], row[2], row[3]):
            self.remove(path)
            return None
        return copy

    def write(self, path: bytes, row: tuple[int, ...], data: Bytes) -> DiskCopy:
        """Make and publish a copy.

        Raises:
            OSError: the disk is full, or fails; nothing is left then.
        """
        array = np.frombuffer(data, np.uint8)
        number, self._next = self._next, self._next + 1
        temporary = os.path.join(self.path, b"tmp-%d" % number)
        final = self._file(number)
        try:
            fd = create_file(temporary, os.O_WRONLY, mode=0o400)
            try:
                write_all(fd, array, 0)
            finally:
                os.close(fd)
            os.makedirs(os.path.dirname(final), exist_ok=True)
            os.rename(temporary, final)
            copy = DiskCopy(number, row[1], row[2], row[3], _native.crc32c(array), checked=True)
            self._record(path, copy)
        except BaseException:
            for left in (temporary, final):
                with contextlib.suppress(OSError):
                    os.unlink(left)
            raise
        self.copies[path] = copy
        self._folder.used_bytes += copy.disk_bytes
        return copy

    def check(self, copy: DiskCopy) -> bool:
        """Whether a copy has the bytes that it had. Reads it; may run without the owner's lock."""
        try:
            data = read_file(self._name(copy.number), copy.size + 1, within=self.path)
        except OSError:
            return False
        return len(data) == copy.size and _native.crc32c(np.frombuffer(data, np.uint8)) == copy.crc

    def remove(self, path: bytes) -> None:
        """Remove a copy. Whoever has it open keeps it."""
        copy = self.copies.pop(path, None)
        if copy is None:
            return
        self._folder.used_bytes -= copy.disk_bytes
        with contextlib.suppress(OSError):  # the journal must not fail it: its crc or absence will
            self._append([copy.number])
        with contextlib.suppress(OSError):
            os.unlink(self._file(copy.number))

    def close(self) -> None:
        """Let go; the copies stay."""
        self._folder.used_bytes -= sum(copy.disk_bytes for copy in self.copies.values())
        self.copies.clear()
        os.close(self._journal)

    def _file(self, number: int) -> bytes:
        return os.path.join(self.path, self._name(number))

    @staticmethod
    def _name(number: int) -> bytes:
        return b"%d/%d" % (number // _NUMBERS_A_FOLDER, number)

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

    def _open_journal(self, name: bytes) -> int:
        path = os.path.join(self.path, name)
        return open_or_create(path, os.O_RDWR | os.O_APPEND, mode=0o600, owned=True)

    def _rewrite(self) -> None:
        """Write the journal anew, without what was removed: the old one or the new one is there."""
        old, self._journal = self._journal, self._open_journal(b"journal-new")
        try:
            os.ftruncate(self._journal, 0)
            for path, copy in self.copies.items():
                self._record(path, copy)
            new = os.path.join(self.path, b"journal-new")
            os.rename(new, os.path.join(self.path, b"journal"))
        except OSError:  # the old one serves
            os.close(self._journal)
            self._journal = old
        else:
            os.close(old)

    def _record(self, path: bytes, copy: DiskCopy) -> None:
        text = path.decode("latin-1")
        self._append([text, copy.number, copy.ino, copy.size, copy.mtime_ns, copy.crc])

    def _append(self, record: list[object]) -> None:
        body = json.dumps(record, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        if os.write(self._journal, line) != len(line):
            raise OSError(28, "the journal could not be written whole", os.fsdecode(self.path))

    def _replay(self) -> None:
        """Read the journal, as far as its lines are whole."""
        numbers: dict[int, bytes] = {}
        torn = False
        with open(os.dup(self._journal), "rb") as f:
            for line in f:
                self._lines += 1
                torn = not line.endswith(b"\n")
                record = _parsed(line)
                if record is None:
                    continue
                if len(record) == 1:
                    self.copies.pop(numbers.get(record[0], b""), None)
                    continue
                path, number, ino, size, mtime_ns, crc = record
                key = path.encode("latin-1")
                numbers[number] = key
                self.copies[key] = DiskCopy(number, ino, size, mtime_ns, crc)
                self._next = max(self._next, number + 1)
        if torn:
            os.write(self._journal, b"\n")

    def _clean(self) -> None:
        """Remove copies that a kill kept from the journal, and those that were being written."""
        known = {copy.number for copy in self.copies.values()}
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            if _TEMPORARY.match(name):
                os.unlink(path)
                self.removed += 1
            elif _NAME.match(name) and os.path.isdir(path):
                for inner in os.listdir(path):
                    if _NAME.match(inner) and int(inner) not in known:
                        os.unlink(os.path.join(path, inner))
                        self.removed += 1
                    if _NAME.match(inner):
                        self._next = max(self._next, int(inner) + 1)


def _parsed(line: bytes) -> list[Any] | None:
    """A record, or None for a line that is torn or no record."""
    crc, _, body = line.rstrip(b"\n").partition(b" ")
    if len(line) > _LINE_BYTES_MAX or not re.fullmatch(rb"[0-9a-f]{8}", crc):
        return None
    if zlib.crc32(body) != int(crc, 16):
        return None
    record: Any = json.loads(body)
    kinds = [type(value) for value in record] if isinstance(record, list) else []
    whole = kinds in ([int], [str, int, int, int, int, int])
    return list(record) if whole else None
