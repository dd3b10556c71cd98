"""Random reads: blocks and small samples at random, in batches, by headrace's own reader, as training asks."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace import _native
from headrace.bench.metrics.own import percentiles
from headrace.config import ReaderOptions
from headrace.errors import BenchError
from headrace.io.batch_reader import BatchReader
from headrace.store.directory import DirectoryColumns, write_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.io.batch_reader import PendingBatch

__all__ = ["Blocks", "Rate", "file_rate", "latencies_s"]

_AHEAD: Final = 4
"""Batches that are read at the same time."""

_BUDGET_BYTES: Final = 256 << 20
_BATCH_BYTES_MOST: Final = 16 << 20
_DEADLINE_S: Final = 60.0
_TICK_S: Final = 0.05
"""Files that changed within the clock's last tick are not read: nobody could see whether they change again."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What was read.

    Attributes:
        per_s: blocks, samples or files.
        batch_s: percentiles of the time from a batch's request to its arrival.
    """

    per_s: float
    bytes_per_s: float
    batch_s: dict[str, float]


class Blocks:
    """A file's blocks of one size, read at random.

    Args:
        path: the file.
        block_bytes: of a block.
        direct: past the page cache.
        seed: of the order.
    """

    def __init__(self, path: str, block_bytes: int, *, direct: bool, seed: int = 0) -> None:
        size = os.stat(path).st_size
        count = size // block_bytes
        names = np.char.mod("%010d", np.arange(count)).astype("S10")
        columns = DirectoryColumns(
            names=names.view(np.uint8).reshape(-1),
            name_offsets=np.arange(count + 1, dtype=np.uint64) * 10,
            volume=np.zeros(count, np.uint32),
            offset=np.arange(count, dtype=np.uint64) * np.uint64(block_bytes),
            length=np.full(count, block_bytes, np.uint64),
            first_extent=None, part=None, part_names=(b"",),
        )  # fmt: skip
        fd = os.memfd_create("headrace-storage", os.MFD_CLOEXEC)
        try:
            write_directory(columns, fd)
            directory = _native.Directory.from_fd(fd, "the blocks of a storage test")
        finally:
            os.close(fd)
        catalog = _native.Catalog([(directory, [("file", os.fsencode(path), size, -1)])])
        options = ReaderOptions(
            direct="always" if direct else "auto", budget_bytes=_BUDGET_BYTES, verify=False,
            reads_in_flight=1, deadline_s=_DEADLINE_S,
        )  # fmt: skip
        self._reader = BatchReader(catalog, range(1), options)
        self._count, self._block_bytes = count, block_bytes
        self._random = np.random.default_rng(seed)

    @property
    def engine(self) -> str:
        """What reads: io_uring, threads."""
        return self._reader.engine[0]

    def rate(self, depth: int, batch: int, seconds: float) -> Rate:
        """Read batches for some time, with so many reads in flight.

        Raises:
            BenchError: a block cannot be read.
        """
        batch = max(1, min(batch, self._count, _BATCH_BYTES_MOST // self._block_bytes))
        self._reader.turn(reads_in_flight=depth)
        pending: deque[tuple[float, PendingBatch]] = deque()
        waits: list[float] = []
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + seconds or pending:
            if now < begin + seconds and len(pending) < _AHEAD:
                indices = self._random.choice(self._count, batch, replace=False)
                pending.append((now, self._reader.submit(np.sort(indices))))
                continue
            asked_s, job = pending.popleft()
            if job.take().failed:
                raise BenchError("a block of the test's own file cannot be read.")
            waits.append(time.perf_counter() - asked_s)
        rate = len(waits) * batch / (time.perf_counter() - begin)
        return Rate(rate, rate * self._block_bytes, percentiles(waits))

    def close(self) -> None:
        """End the threads."""
        self._reader.close()


def file_rate(paths: Sequence[str], depth: int, batch: int) -> Rate:
    """Read whole files once, in random order and in batches, past the page cache where possible.

    Raises:
        BenchError: a file cannot be read.
    """
    time.sleep(_TICK_S)
    order = [os.fsencode(paths[i]) for i in np.random.default_rng(0).permutation(len(paths))]
    reader = _native.FileReader(reads_in_flight=depth, buffer_bytes=_BUDGET_BYTES, cold="direct")
    waits, nbytes = [], 0
    jobs: deque[tuple[float, _native.FileJob]] = deque()
    begin = time.perf_counter()
    try:
        for first in range(0, len(order), batch):
            jobs.append((time.perf_counter(), reader.submit(order[first : first + batch])))
            if len(jobs) < _AHEAD and first + batch < len(order):
                continue
            while jobs and (len(jobs) >= _AHEAD or first + batch >= len(order)):
                asked_s, job = jobs.popleft()
                done = job.wait(_DEADLINE_S)
                if done is None or done.errors.any():
                    raise BenchError("a file of the test's own cannot be read.")
                nbytes += int(done.lengths.sum())
                waits.append(time.perf_counter() - asked_s)
        seconds = time.perf_counter() - begin
    finally:
        reader.close()
    return Rate(len(order) / seconds, nbytes / seconds, percentiles(waits))


def latencies_s(path: str, *, direct: bool, seconds: float, most: int) -> dict[str, float]:
    """Percentiles of single reads of 4 KiB at random, one after the other."""
    import mmap

    blocks = os.stat(path).st_size // 4096
    random = np.random.default_rng(1)
    offsets = (random.integers(0, blocks, most) * 4096).tolist()
    found: list[float] = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        with mmap.mmap(-1, 4096) as buffer:
            until = time.perf_counter() + seconds
            for offset in offsets:
                begin = time.perf_counter()
                os.preadv(fd, [buffer], offset)
                end = time.perf_counter()
                found.append(end - begin)
                if end > until:
                    break
    finally:
        os.close(fd)
    return percentiles(found) | {"reads": len(found)}
