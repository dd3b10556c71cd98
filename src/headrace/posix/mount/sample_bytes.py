"""SampleBytes: ranges of samples, each byte checked before it is handed out.

A checksum covers a whole part of a sample. Parts up to 4 MiB are read and checked whole, and the last
ones are kept, because a program reads a file in several pieces. A larger part is gone through once when
it is first touched: its checksum is compared, and the checksums of its blocks are remembered, with which
every later range is checked. Parts above `check_bytes_max` come unchecked, and the log says so.

Shared by threads. Two that want the same part wait for one read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.errors import CorruptSample
from headrace.store.store import CHECKED_RANGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.store import Store

_log = logging.getLogger("headrace.mount")

BLOCK_BYTES = 64 << 10
"""What one remembered checksum covers: 4 bytes of memory for it, and the least that is read at once."""

_STEP_BYTES = 4 << 20
"""Read at once when a large part is gone through; a multiple of `BLOCK_BYTES`."""

_CHUNK_BYTES = 1 << 20
"""Of a large part that is read front to back, so much at a time: eight of the kernel's reads of 128 KiB."""

_SUMS_MAX = 1024
"""Large parts whose checksums are remembered: 64 MiB of them at 1 GiB each."""

_LOCKS = 64

_WHOLE = -1


class SampleBytes:
    """Reads ranges; keeps whole parts that were read last, and checks parts up to `check_bytes_max`."""

    def __init__(
        self, store: Store, *, kept_bytes: int = 64 << 20, check_bytes_max: int = 1 << 30
    ) -> None:
        self._store = store
        self._kept_bytes = kept_bytes
        self._check_bytes_max = check_bytes_max
        self._kept: OrderedDict[tuple[int, int, int], memoryview] = OrderedDict()
        self._held_bytes = 0
        self._sums: OrderedDict[tuple[int, int], NDArray[np.uint32]] = OrderedDict()
        self._ends: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._unchecked: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        # Taken before one of those, never after.
        self._chunk_locks = [threading.Lock() for _ in range(_LOCKS)]
        self._local = store.objects is None

    def kept(self, sample: int, part: int, start: int, count: int) -> memoryview | None:
        """A range, if what it lies in is in memory: a whole part, or a chunk of a large one."""
        with self._lock:
            for chunk in (_WHOLE, start // _CHUNK_BYTES):
                data = self._kept.get((sample, part, chunk))
                if data is None:
                    continue
                begin = start if chunk == _WHOLE else start % _CHUNK_BYTES
                if chunk != _WHOLE and begin + count > len(data) and len(data) == _CHUNK_BYTES:
                    return None  # it goes on in the next chunk
                self._kept.move_to_end((sample, part, chunk))
                return data[begin : begin + count]
        return None

    def read(self, sample: int, part: int, size: int, start: int, count: int) -> memoryview:
        """At most `count` bytes of a part of `size` bytes, from `start` on; fewer at its end.

        Raises:
            CorruptSample: the bytes differ from their checksum.
            HeadraceError: they cannot be read.
        """
        count = max(0, min(count, size - start))
        if not count:
            return memoryview(b"")
        if size <= CHECKED_RANGE_BYTES:
            return self._whole(sample, part)[start : start + count]
        if size <= self._check_bytes_max and self._has_checksum(sample):
            return self._large(sample, part, size, start, count)
        self._say_unchecked(sample, part, size)
        return self._range(sample, part, start, count)

    def _whole(self, sample: int, part: int) -> memoryview:
        with self._locks[hash((sample, part)) % _LOCKS]:
            key = (sample, part, _WHOLE)
            with self._lock:
                data = self._kept.get(key)
            if data is None:
                # A copy: what the reader hands out may be a small piece of a large buffer.
                data = memoryview(bytes(self._range(sample, part, 0, -1)))
                self._keep(key, data)
        return data

    def _keep(self, key: tuple[int, int, int], data: memoryview) -> None:
        if len(data) > self._kept_bytes:
            return
        with self._lock:
            if key not in self._kept:
                self._kept[key] = data
                self._held_bytes += len(data)
            while self._held_bytes > self._kept_bytes:
                _, old = self._kept.popitem(last=False)
                self._held_bytes -= len(old)

    def _goes_on(self, key: tuple[int, int], start: int, count: int) -> bool:
        """Whether a range follows the one before, about: the kernel reads ahead in two requests."""
        with self._lock:
            before = self._ends.get(key)
            self._ends[key] = start + count
            while len(self._ends) > _SUMS_MAX:
                self._ends.popitem(last=False)
        return before is not None and abs(start - before) <= 4 * BLOCK_BYTES

    def _large(self, sample: int, part: int, size: int, start: int, count: int) -> memoryview:
        """A range of a large part. What is read front to back is read in chunks, which are kept."""
        if not self._goes_on((sample, part), start, count):
            return self._checked_range(sample, part, size, start, count)
        first = start // _CHUNK_BYTES
        if (start + count - 1) // _CHUNK_BYTES != first:
            return self._checked_range(sample, part, size, start, count)
        with self._chunk_locks[hash((sample, part)) % _LOCKS]:
            data_of_range = self.kept(sample, part, start, count)
            if data_of_range is None:
                begin = first * _CHUNK_BYTES
                data = self._checked_range(
                    sample, part, size, begin, min(_CHUNK_BYTES, size - begin)
                )
                self._keep((sample, part, first), data)
                data_of_range = data[start - begin : start - begin + count]
        return data_of_range

    def _checked_range(
        self, sample: int, part: int, size: int, start: int, count: int
    ) -> memoryview:
        sums = self._block_sums(sample, part, size)
        first = start // BLOCK_BYTES
        end = min(size, -(-(start + count) // BLOCK_BYTES) * BLOCK_BYTES)
        data = self._range(sample, part, first * BLOCK_BYTES, end - first * BLOCK_BYTES)
        checksums = _native.crc32c_blocks(np.frombuffer(data, np.uint8), BLOCK_BYTES)
        if not np.array_equal(checksums, sums[first : first + len(checksums)]):
            raise self._corrupt(sample, "a block that was read before", "other bytes now")
        begin = start - first * BLOCK_BYTES
        return data[begin : begin + count]

    def _block_sums(self, sample: int, part: int, size: int) -> NDArray[np.uint32]:
        """The checksums of a part's blocks, once the whole part has been found good."""
        key = (sample, part)
        with self._locks[hash(key) % _LOCKS]:
            with self._lock:
                known = self._sums.get(key)
                if known is not None:
                    self._sums.move_to_end(key)
                    return known
            crc, pieces = 0, []
            for start in range(0, size, _STEP_BYTES):
                data = np.frombuffer(self._range(sample, part, start, _STEP_BYTES), np.uint8)
                crc = _native.crc32c(data, crc)
                pieces.append(_native.crc32c_blocks(data, BLOCK_BYTES))
            expected = self.checksum(sample, part) or 0
            if crc != expected:
                raise self._corrupt(sample, f"{expected:08x}", f"{crc:08x}")
            sums = np.concatenate(pieces)
            with self._lock:
                self._sums[key] = sums
                while len(self._sums) > _SUMS_MAX:
                    self._sums.popitem(last=False)
            return sums

    def _range(self, sample: int, part: int, start: int, count: int) -> memoryview:
        """Bytes as the store reads them: checked where they are a whole part with a checksum."""
        store = self._store
        if not self._local:
            size = None if count < 0 else count
            return store.read(sample, start, size, part=store.parts[part])
        catalog = store.catalog
        batch = catalog.read_one(sample, part, start, count)
        if batch.failed:
            raise store.failure_error(sample, catalog.failures(batch)[0])
        return memoryview(batch.data).toreadonly()  # type: ignore[arg-type]  # numpy's stubs lag

    def checksum(self, sample: int, part: int) -> int | None:
        """The crc32c of a part; None where the store has none."""
        segment = self._store.segment_of(sample)
        if not segment.directory.has_crc:
            return None
        wanted = os.fsencode(self._store.parts[part])
        names = segment.directory.part_names
        return next(e.crc or 0 for e in segment.extents(sample) if names[e.part] == wanted)

    def _has_checksum(self, sample: int) -> bool:
        return self._store.segment_of(sample).directory.has_crc

    def _corrupt(self, sample: int, expected: str, actual: str) -> CorruptSample:
        name = self._store.names[sample]
        return CorruptSample(
            f"{self._store.path}: sample {sample} ({name!r}) has the checksum {actual}, expected "
            f"{expected}.",
            path=self._store.path,
            next_step=f"Run `headrace verify {self._store.path}` to list every bad sample.",
            index=sample,
            name=name,
        )

    def _say_unchecked(self, sample: int, part: int, size: int) -> None:
        with self._lock:
            if (sample, part) in self._unchecked or len(self._unchecked) >= _SUMS_MAX:
                return
            self._unchecked.add((sample, part))
        why = "the store has no checksums"
        if self._has_checksum(sample):
            why = f"it is larger than {self._check_bytes_max:,} bytes (--check-up-to)"
        _log.warning(
            "sample %d (%r, %s bytes) is delivered unchecked: %s", sample,
            self._store.names[sample], f"{size:,}", why,
        )  # fmt: skip
