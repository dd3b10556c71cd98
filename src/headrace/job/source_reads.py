"""SourceReads: the last resort of a job's reads: the source, when no node has the bytes.

A range of a share's volume is made of the samples that lie in it. They are read from the source and cut
as the directory says, so that who asked for the range cannot tell. An engine in Python behind the native
one (`headrace._native.FabricFailover`), entered only for what the nodes cannot serve.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.config import ReaderOptions
from headrace.errors import HeadraceError
from headrace.io.batch_reader import BatchReader
from headrace.store.format import DATA_OFFSET

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.store import Store
    from headrace.store.segment import Directory

__all__ = ["SharePart", "SourceReads"]

_THREADS = 4
_CHUNK_BYTES = 32 << 20
_CHUNK_RANGES = 1024


@dataclass(frozen=True, slots=True)
class SharePart:
    """A segment of the job, as the source has it: its directory and its first sample there."""

    directory: Directory
    base: int


@dataclass(slots=True)
class _Range:
    """A range that somebody waits for."""

    number: int
    share: SharePart
    offset: int
    length: int
    begin: int
    """The first sample that may lie in it, of the share."""
    end: int


class SourceReads:
    """Reads ranges of shares' volumes from the source.

    Args:
        open_source: opens it, when it is first needed in a process.
        shares: what each volume holds, by its path.
        options: how to read.
    """

    def __init__(
        self,
        open_source: Callable[[], Store],
        shares: dict[str, SharePart],
        options: ReaderOptions | None = None,
    ) -> None:
        self._open_source = open_source
        self._shares = shares
        self._options = options or ReaderOptions()
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._reader: BatchReader | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.bytes = 0
        self.failure: HeadraceError | None = None

    def read(self, requests: Any) -> None:
        """Begins to read a batch (`headrace._native.RemoteRequests`) and returns."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "headrace-source")
            pool = self._pool
        offsets, lengths = requests.offsets.tolist(), requests.lengths.tolist()
        chunk: list[_Range] = []
        nbytes = 0
        for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            share = self._shares[os.fsdecode(requests.path(i))]
            first, last = _samples_of(share.directory, offset, offset + length)
            chunk.append(_Range(i, share, offset, length, first, last))
            nbytes += length
            if nbytes >= _CHUNK_BYTES or len(chunk) >= _CHUNK_RANGES:
                pool.submit(self._serve, requests, chunk)
                chunk, nbytes = [], 0
        if chunk:
            pool.submit(self._serve, requests, chunk)

    def turn(self, reads_in_flight: int) -> None:
        """The knob is the fabric's; the source's reader keeps its own depth."""

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
            reader, self._reader = self._reader, None
            store, self._store = self._store, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if reader is not None:
            reader.close()
        if store is not None:
            store.close()

    def _serve(self, requests: Any, ranges: list[_Range]) -> None:
        """Reads what a chunk of ranges needs, and hands it over."""
        try:
            self._fill(requests, ranges)
        except HeadraceError as e:
            self.failure = e
            code = getattr(e, "errno", None) or errno.EIO
            for each in ranges:
                requests.finish(each.number, 0, code)
        except BaseException:
            for each in ranges:
                requests.finish(each.number, 0, errno.EIO)
            raise

    def _fill(self, requests: Any, ranges: list[_Range]) -> None:
        store, reader = self._opened()
        wanted = np.unique(
            np.concatenate(
                [np.arange(r.begin, r.end, dtype=np.int64) + r.share.base for r in ranges]
            )
        )
        batch = reader.submit(wanted).take() if len(wanted) else None
        bad: dict[int, int] = {}
        if batch is not None and batch.failed:
            for failure in store.catalog.failures(batch):
                bad[failure["slot"]] = failure["errno"] or errno.EIO
        for each in ranges:
            if not requests.open(each.number):
                continue
            dest = np.frombuffer(requests.dest(each.number), np.uint8)
            code = _cut(each, dest, wanted, batch, bad)
            if not code:
                self.bytes += each.length
            requests.finish(each.number, 0 if code else each.length, code)

    def _opened(self) -> tuple[Store, BatchReader]:
        with self._lock:
            if self._store is None or self._reader is None:
                self._store = self._open_source()
                parts = list(range(len(self._store.parts)))
                self._reader = BatchReader(self._store.catalog, parts, self._options)
            return self._store, self._reader


def _samples_of(directory: Directory, begin: int, end: int) -> tuple[int, int]:
    """The samples of a share that lie between two offsets of its volume: (first, behind the last)."""

    def behind(offset: int) -> int:
        """The first sample whose last byte lies behind `offset`."""
        low, high = 0, directory.samples
        while low < high:
            middle = (low + high) // 2
            found = directory.extents_of(np.array([middle], np.int64))
            ends = found["offset"] + found["length"]
            # A sample without extents lies nowhere: it counts with those before.
            if len(ends) and int(ends.max()) > offset:
                high = middle
            else:
                low = middle + 1
        return low

    return behind(begin), min(behind(end - 1) + 1, directory.samples)


def _cut(
    wanted: _Range, dest: NDArray[np.uint8], indices: NDArray[np.int64], batch: Any,
    bad: dict[int, int],
) -> int:  # fmt: skip
    """Lays the samples of a range where its directory says; returns 0 or an errno value."""
    begin, end = wanted.offset, wanted.offset + wanted.length
    if begin < DATA_OFFSET:
        dest[: min(DATA_OFFSET - begin, len(dest))] = 0  # the header page: no sample's
    local = np.arange(wanted.begin, wanted.end, dtype=np.int64)
    if not len(local):
        dest[:] = 0
        return 0
    found = wanted.share.directory.extents_of(local)
    places = np.searchsorted(indices, found["sample"] + wanted.share.base)
    covered = 0
    for k in range(len(found["length"])):
        slot = int(places[k]) * batch.parts + int(found["part"][k])
        at, size = int(found["offset"][k]), int(found["length"][k])
        first, last = max(at, begin), min(at + size, end)
        if first >= last:
            continue
        if slot in bad:
            return bad[slot]
        start = int(batch.offsets[slot]) + first - at
        dest[first - begin : last - begin] = batch.data[start : start + last - first]
        covered = max(covered, last - begin)
    dest[covered:] = 0  # the padding behind the last sample
    return 0
