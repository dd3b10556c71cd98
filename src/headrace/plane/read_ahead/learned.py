"""What is known of a dataset's samples: which files each one is made of, in few bytes.

A million samples of one file each take about 60 MB: paths are split into folder and name, folders
are kept once, and numbers lie in arrays. What is learned is handed to other processes as deltas,
which are plain bytes.

A file that many samples open (a shard, an index, an annotation) is recognised and left out; so is a
sample that opens other files each time.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import zlib
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


SHARED_AFTER = 8
"""A file that so many samples open is no sample's own."""

_SKETCH_BYTES = 1 << 22  # counters of opens by hash of the path: 4M files before they crowd
_UNKNOWN, _VOLATILE = -1, -2
_CHANGES_MAX = 3  # a sample whose files changed so often is not predicted
_NAME_BYTES_MAX = 4096
_FILES_MAX = 64  # of one sample
_RECORD = struct.Struct("<qH")
_LENGTH = struct.Struct("<H")
_EMPTY: tuple[str, ...] = ()


class LearnedFiles:
    """Files by sample index. Safe for concurrent users.

    Args:
        samples: how many samples the dataset has; other indices are not kept.
        budget_bytes: what the knowledge may take; what comes later is not kept.
    """

    def __init__(self, samples: int, budget_bytes: int = 256 << 20) -> None:
        self._samples = samples
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._first = array("q", [_UNKNOWN]) * samples  # an index's first entry
        self._count = array("B", [0]) * samples
        self._changes = array("B", [0]) * samples
        self._log = array("q")  # indices in the order in which they were learned
        self._folder_of: dict[bytes, int] = {}
        self._folders: list[bytes] = []
        self._folder_bytes = 0
        self._entry_folder = array("I")
        self._entry_start = array("Q", [0])
        self._names = bytearray()
        self._sketch = bytearray(0)
        self._shared: set[str] = set()

    @property
    def nbytes(self) -> int:
        """About how much memory the knowledge takes."""
        numbers = (self._first, self._log, self._entry_folder, self._entry_start)
        return (
            sum(len(a) * a.itemsize for a in numbers)
            + 2 * self._samples
            + len(self._names)
            + self._folder_bytes
            + len(self._sketch)
        )

    @property
    def known(self) -> int:
        """How many samples' files were learned."""
        return len(self._log)

    @property
    def full(self) -> bool:
        """Whether the budget is used up."""
        return self.nbytes >= self._budget_bytes

    def knows(self, index: int) -> bool:
        """Whether the files of sample `index` were learned (there may be none)."""
        return 0 <= index < self._samples and self._first[index] != _UNKNOWN

    def paths(self, index: int) -> tuple[str, ...]:
        """The files of a sample that are worth reading ahead; empty: none, or not known."""
        if not 0 <= index < self._samples:
            return _EMPTY
        with self._lock:
            first = self._first[index]
            if first < 0 or not self._count[index]:
                return _EMPTY
            paths = [os.fsdecode(self._path(first + i)) for i in range(self._count[index])]
            return tuple(path for path in paths if path not in self._shared)

    def learn(self, index: int, paths: Sequence[str]) -> bool:
        """Note what a sample opened.

        Returns:
            Whether that was news.
        """
        if not 0 <= index < self._samples or len(paths) > _FILES_MAX:
            return False
        with self._lock:
            return self._learn([os.fsencode(path) for path in paths], index)

    def _learn(self, raw: list[bytes], index: int) -> bool:
        first = self._first[index]
        if first == _VOLATILE:
            return False
        count = self._count[index]
        if first != _UNKNOWN:
            if len(raw) == count and all(self._path(first + i) == raw[i] for i in range(count)):
                return False
            self._changes[index] += 1
            if self._changes[index] >= _CHANGES_MAX:
                self._first[index] = _VOLATILE
                return True
        if self.full or any(len(path) > _NAME_BYTES_MAX for path in raw):
            return False
        for path in raw:
            self._note_open(path)
        self._first[index] = len(self._entry_folder)
        self._count[index] = len(raw)
        for path in raw:
            self._append(path)
        self._log.append(index)
        return True

    def _append(self, path: bytes) -> None:
        folder, slash, name = path.rpartition(b"/")
        folder += slash
        number = self._folder_of.get(folder)
        if number is None:
            number = self._folder_of[folder] = len(self._folders)
            self._folders.append(folder)
            self._folder_bytes += len(folder) + 150  # the objects around it
        self._entry_folder.append(number)
        self._names += name
        self._entry_start.append(len(self._names))

    def _path(self, entry: int) -> bytes:
        name = self._names[self._entry_start[entry] : self._entry_start[entry + 1]]
        return self._folders[self._entry_folder[entry]] + name

    def _note_open(self, path: bytes) -> None:
        """Count the samples that open a file, in a count-min sketch."""
        if not self._sketch:
            self._sketch = bytearray(_SKETCH_BYTES)
        value = hash(path)
        slots = (value % _SKETCH_BYTES, (value >> 24) % _SKETCH_BYTES)
        counts = [self._sketch[slot] for slot in slots]
        if min(counts) + 1 >= SHARED_AFTER and len(self._shared) < _SKETCH_BYTES >> 4:
            self._shared.add(os.fsdecode(path))
        for slot, count in zip(slots, counts, strict=True):
            self._sketch[slot] = min(count + 1, 255)

    def learned_since(self, mark: int) -> tuple[bytes, int]:
        """What was learned after `mark`, for `teach` in another process.

        Args:
            mark: 0, or what an earlier call returned.

        Returns:
            The delta, empty if there is no news, and the next mark.
        """
        with self._lock:
            news = dict.fromkeys(self._log[mark:])
            parts: list[bytes] = []
            for index in news:
                first = self._first[index]
                if first < 0:
                    continue
                parts.append(_RECORD.pack(index, self._count[index]))
                for i in range(self._count[index]):
                    path = self._path(first + i)
                    parts += (_LENGTH.pack(len(path)), path)
            mark = len(self._log)
        return (zlib.compress(b"".join(parts), 1) if parts else b""), mark

    def teach(self, delta: bytes) -> int:
        """Take over what another process learned.

        Args:
            delta: from `learned_since`.

        Returns:
            How many samples were news.

        Raises:
            ValueError: the delta is damaged; what came before the damage is kept.
        """
        if not delta:
            return 0
        try:
            data = zlib.decompress(delta)
        except zlib.error as error:
            raise ValueError(f"a delta of learned paths is damaged: {error}") from error
        news = at = 0
        try:
            while at < len(data):
                index, count = _RECORD.unpack_from(data, at)
                at += _RECORD.size
                raw = []
                for _ in range(count):
                    (length,) = _LENGTH.unpack_from(data, at)
                    at += _LENGTH.size
                    raw.append(data[at : at + length])
                    at += length
                if at > len(data):
                    raise ValueError("a delta of learned paths is cut short")
                if 0 <= index < self._samples and count <= _FILES_MAX:
                    with self._lock:
                        news += self._learn(raw, index)
        except struct.error as error:
            raise ValueError(f"a delta of learned paths is damaged: {error}") from error
        return news

    def forget_lock(self) -> None:
        """After a fork: a thread that does not exist here may have held the lock."""
        self._lock = threading.Lock()


_MAGIC = b"hrLEARN1"
_HEADER = struct.Struct("<8sIIQ")  # magic, bytes, crc32, pid


class SharedLog:
    """Deltas by all processes that hold it. Safe for concurrent writers.

    Args:
        limit_bytes: no record is appended beyond this size.
    """

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._fd = os.memfd_create("headrace-learned", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    def append(self, delta: bytes) -> bool:
        """Hand a delta to the others; False: the log is full, or closed."""
        if self._fd < 0 or os.fstat(self._fd).st_size + len(delta) > self._limit_bytes:
            return False
        record = _HEADER.pack(_MAGIC, len(delta), zlib.crc32(delta), os.getpid()) + delta
        # One write with O_APPEND: the kernel puts concurrent records one after the other.
        return os.write(self._fd, record) == len(record)

    def read_since(self, mark: int) -> tuple[list[bytes], int]:
        """What other processes appended after `mark` (0: the beginning), and the next mark."""
        if self._fd < 0:
            return [], mark
        size = os.fstat(self._fd).st_size
        if size <= mark:
            return [], mark
        data = os.pread(self._fd, size - mark, mark)
        deltas: list[bytes] = []
        at = 0
        while (found := data.find(_MAGIC, at)) >= 0 and found + _HEADER.size <= len(data):
            _, length, crc, pid = _HEADER.unpack_from(data, found)
            start = found + _HEADER.size
            delta = data[start : start + length]
            if len(delta) == length and zlib.crc32(delta) == crc:
                at = start + length
                if pid != os.getpid():
                    deltas.append(delta)
            else:
                at = found + 1  # cut short, or the magic by chance: look for the next
        # A record that is still being written is read next time; one that never will be, too.
        return deltas, mark + at if at or not data else mark

    def close(self) -> None:
        """Let go of the file; the others keep it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        from multiprocessing.reduction import DupFd

        return {"limit_bytes": self._limit_bytes, "fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._limit_bytes = state["limit_bytes"]
        self._fd = state["fd"].detach()
