"""Reads a scan's samples in batches, in order, for packing, indexing and repair.

Each batch is one buffer, filled by one thread. Files are checked after they were read: a file that
grew, shrank or was touched since the listing is an error, never a torn sample.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.base.checksum import crc32c
from headrace.errors import SourceChanged, SourceError
from headrace.io.objects.faults import Failure
from headrace.store.directory import read_fully
from headrace.store.sources.scan import (
    Problem,
    Scan,
    check_unchanged,
    refused,
    source_changed,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.io.objects.transport import Found
    from headrace.store.sources.scan import Scan


BATCH_BYTES = 16 << 20
"""Bytes read by one task: long enough to hide its hand-over, short enough to keep few in memory."""

BATCH_SAMPLES = 8192
"""Samples read by one task, for tiny samples."""

LARGE_BYTES = 128 << 20
"""A sample above this is copied in pieces instead of being held in memory."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Samples `begin` to `end - 1`, read together; `large` marks one that is read in pieces."""

    begin: int
    end: int
    size_bytes: int
    large: bool


@dataclass(slots=True)
class SourceBatch:
    """The bytes of a batch.

    Attributes:
        plan: which samples.
        data: their extents back to back (skipped samples' left out); None for a large one.
        counts: (samples,) int64, extents of each sample; 0 for a skipped one.
        length: (extents,) uint64.
        crc: (extents,) uint32.
        problems: why samples were skipped.
        buffer: what `data` looks into, to be given back.
    """

    plan: ReadPlan
    data: memoryview | None
    counts: NDArray[np.int64]
    length: NDArray[np.uint64]
    crc: NDArray[np.uint32]
    problems: list[Problem]
    buffer: bytearray | None = None


def plan_batches(scan: Scan, begin: int = 0, batch_bytes: int = BATCH_BYTES) -> Iterator[ReadPlan]:
    """Cuts the samples from `begin` on into batches."""
    firsts = scan.columns.firsts.astype(np.int64)
    ends = np.zeros(scan.columns.extents + 1, np.int64)
    np.cumsum(scan.columns.length.astype(np.int64), out=ends[1:])
    ends = ends[firsts]  # bytes before each sample
    n = scan.columns.samples
    while begin < n:
        end = int(np.searchsorted(ends, ends[begin] + batch_bytes, side="right")) - 1
        end = min(max(end, begin + 1), begin + BATCH_SAMPLES, n)
        size = int(ends[end] - ends[begin])
        yield ReadPlan(begin, end, size, end == begin + 1 and size > LARGE_BYTES)
        begin = end


def read_ahead(
    plans: Iterable[ReadPlan], read: Callable[[ReadPlan], SourceBatch], workers: int
) -> Iterator[SourceBatch]:
    """Reads batches with threads and gives them in order, at most `workers` + 1 at once in memory."""
    pending: deque[Future[SourceBatch]] = deque()
    with ThreadPoolExecutor(workers, "headrace-read") as pool:
        try:
            for plan in plans:
                pending.append(pool.submit(read, plan))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class ScanReader:
    """Reads the extents of a scan. Safe for several threads."""

    def __init__(self, scan: Scan, *, on_error: str = "raise") -> None:
        self._scan = scan
        self.skip = on_error == "skip"
        self._firsts = scan.columns.firsts
        self._buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()

    def read(self, plan: ReadPlan) -> SourceBatch:
        """Reads one batch.

        Raises:
            SourceChanged: a file is not as it was listed.
            SourceError: a file cannot be read.
        """
        first, last = int(self._firsts[plan.begin]), int(self._firsts[plan.end])
        firsts = self._firsts[plan.begin : plan.end + 1].astype(np.int64)
        counts: NDArray[np.int64] = firsts[1:] - firsts[:-1]
        length = self._scan.columns.length[first:last].astype(np.uint64)
        if plan.large:
            return SourceBatch(plan, None, counts, length, np.zeros(len(length), np.uint32), [])
        buffer = self._take_buffer(plan.size_bytes)
        batch = SourceBatch(plan, None, counts, length, np.zeros(0, np.uint32), [], buffer)
        crc: list[int] = []
        kept: list[int] = []
        at = 0
        with _Files(self._scan) as files:
            files.fetch_objects(first, last)
            view = memoryview(buffer)
            for k, sample in enumerate(range(plan.begin, plan.end)):
                begin, end = int(self._firsts[sample]), int(self._firsts[sample + 1])
                try:
                    sample_crc, after = self._read_sample(files, sample, view, at)
                except SourceError as e:
                    if not self.skip:
                        raise
                    batch.problems.append(Problem(e.path or "", e.message, e.offset_bytes))
                    counts[k] = 0
                    continue
                crc += sample_crc
                kept += range(begin - first, end - first)
                at = after
        batch.data = view[:at]
        batch.crc = np.array(crc, np.uint32)
        batch.length = length[kept] if batch.problems else length
        return batch

    def recycle(self, batch: SourceBatch) -> None:
        """Gives a batch's buffer back, so that its memory is touched once."""
        buffer, batch.buffer, batch.data = batch.buffer, None, None
        if buffer is not None and len(buffer) == BATCH_BYTES:
            self._buffers.put(buffer)

    def pieces(self, extent: int, piece_bytes: int = BATCH_BYTES) -> Iterator[memoryview]:
        """The bytes of one extent, piece by piece; each piece is valid until the next."""
        sample = int(np.searchsorted(self._firsts, extent, side="right")) - 1
        size = int(self._scan.columns.length[extent])
        stated = self._scan.columns.crc
        buffer = bytearray(min(piece_bytes, size))
        value = 0
        with _Files(self._scan) as files:
            for start in range(0, size, piece_bytes):
                view = memoryview(buffer)[: min(piece_bytes, size - start)]
                files.read(extent, sample, view, start)
                value = crc32c(view, value)
                yield view
            if stated is not None and value != int(stated[extent]):
                raise files.wrong_crc(extent, sample, value)

    def _read_sample(
        self, files: _Files, sample: int, view: memoryview, at: int
    ) -> tuple[list[int], int]:
        """Reads a sample's extents to `view[at:]`; returns their CRCs and the end."""
        columns = self._scan.columns
        crc = []
        for extent in range(int(self._firsts[sample]), int(self._firsts[sample + 1])):
            size = int(columns.length[extent])
            piece = view[at : at + size]
            files.read(extent, sample, piece, 0)
            crc.append(crc32c(piece))
            if columns.crc is not None and crc[-1] != int(columns.crc[extent]):
                raise files.wrong_crc(extent, sample, crc[-1])
            at += size
        return crc, at

    def _take_buffer(self, size: int) -> bytearray:
        if size > BATCH_BYTES:
            return bytearray(size)
        try:
            return self._buffers.get_nowait()
        except queue.Empty:
            return bytearray(BATCH_BYTES)


class _Files:
    """The source files that one batch has open; closing checks that none changed meanwhile."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._open: dict[int, int] = {}
        self._objects: ObjectExtents | None = None

    def fetch_objects(self, first: int, last: int) -> None:
        """Fetches extents that lie in objects, together: `read` then copies them."""
        if self._scan.objects is not None and last > first:
            self._objects = ObjectExtents(self._scan, first, last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                for number, fd in self._open.items():
                    volume = self._scan.volumes[number]
                    status = os.fstat(fd)
                    check_unchanged(volume.path, status, volume.bytes or 0, volume.mtime_ns)
        finally:
            for fd in self._open.values():
                os.close(fd)

    def read(self, extent: int, sample: int, view: memoryview, start: int) -> None:
        """Fills `view` from byte `start` of an extent."""
        columns = self._scan.columns
        number = int(columns.volume[extent])
        volume = self._scan.volumes[number]
        if volume.kind == "tree":
            self._read_tree_file(extent, sample, view, start)
            return
        if volume.kind == "object":
            self._read_object(extent, view, start)
            return
        with _translated(volume.path):
            fd = self._open.get(number)
            if fd is None:
                fd = self._open[number] = os.open(volume.path, os.O_RDONLY | os.O_CLOEXEC)
            offset = int(columns.offset[extent]) + start
            if read_fully(fd, view, offset) < len(view):
                check_unchanged(volume.path, os.fstat(fd), volume.bytes or 0, volume.mtime_ns)
                raise source_changed(volume.path, "file", "shorter", "as long as listed")

    def _read_object(self, extent: int, view: memoryview, start: int) -> None:
        if self._objects is not None:
            self._objects.read(extent, view)
            return
        columns, engine = self._scan.columns, self._scan.objects
        assert engine is not None
        path = self._scan.volumes[int(columns.volume[extent])].path
        outcome = engine.fetch_many([(path, int(columns.offset[extent]) + start, view)])[0]
        if isinstance(outcome, Failure):
            raise failed_source(outcome)

    def path(self, extent: int, sample: int) -> str:
        """The file that holds an extent."""
        volume = self._scan.volumes[int(self._scan.columns.volume[extent])]
        if volume.kind != "tree":
            return volume.path
        return os.path.join(volume.path, os.fsdecode(self._scan.columns.name(sample)))

    def wrong_crc(self, extent: int, sample: int, computed: int) -> SourceError:
        """The error for a sample that its own format says is damaged."""
        columns: Any = self._scan.columns
        return refused(
            self.path(extent, sample), f"the checksum of sample "
            f"{os.fsdecode(columns.name(sample))!r} is {computed:08x}, the file says "
            f"{int(columns.crc[extent]):08x} (offset {int(columns.offset[extent]):,}).",
            "The source is damaged: restore it, or pass on_error='skip'.",
            int(columns.offset[extent]),
        )  # fmt: skip

    def _read_tree_file(self, extent: int, sample: int, view: memoryview, start: int) -> None:
        columns = self._scan.columns
        path = self.path(extent, sample)
        with _translated(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                read_fully(fd, view, start)
                mtime = None if columns.mtime is None else int(columns.mtime[extent])
                check_unchanged(path, os.fstat(fd), int(columns.length[extent]), mtime)
            finally:
                os.close(fd)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise SourceChanged(
            f"{path}: vanished after it was listed.",
            path=path,
            next_step="Wait until nobody writes there, then pack or index again.",
        ) from None
    except OSError as e:
        raise unreadable(
            path, e, "Make it readable, or pass on_error='skip' to leave it out."
        ) from e


GAP_BYTES = 128 << 10
"""A gap up to this long is read rather than skipped, as by the native reader (`remote_gap_bytes`).
Extents come in the order of their source here, so there are few gaps and no bound on them together."""

RANGE_BYTES = 8 << 20


def neighbours(
    volume: NDArray[np.int64],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    *,
    gap_bytes: int,
    span_bytes: int,
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Sorts extents by place and cuts them into runs that are read at once.

    Args:
        volume: of each extent, as `offset` and `length`.
        offset: where each extent begins.
        length: bytes of each extent.
        gap_bytes: a gap up to this long is read too.
        span_bytes: a run is no longer than this, unless one extent is.

    Yields:
        The numbers of a run's extents, by offset, and where the run begins and ends.
    """
    order = np.lexsort((offset, volume))
    stops = (offset + length)[order].tolist()
    volumes, starts = volume[order].tolist(), offset[order].tolist()
    first = end = 0
    for i, (number, start, stop) in enumerate(zip(volumes, starts, stops, strict=True)):
        near = number == volumes[first] and start <= end + gap_bytes
        if i and not (near and stop - starts[first] <= span_bytes):
            yield order[first:i], starts[first], end
            first, end = i, 0
        end = max(end, stop)
    if len(order):
        yield order[first:], starts[first], end


class ObjectExtents:
    """What was fetched of one batch's extents."""

    def __init__(self, scan: Scan, first: int, last: int) -> None:
        self._scan = scan
        self._first = first
        self._place = np.zeros(last - first, np.int64)
        self._failures: dict[int, Failure] = {}
        self._spans: list[tuple[int, int, memoryview]] = []
        columns = scan.columns
        volume, offset, length = (
            column[first:last].astype(np.int64)
            for column in (columns.volume, columns.offset, columns.length)
        )
        runs = neighbours(volume, offset, length, gap_bytes=GAP_BYTES, span_bytes=RANGE_BYTES)
        for number, (run, begin, end) in enumerate(runs):
            self._place[run] = number
            self._spans.append((int(volume[run[0]]), begin, memoryview(bytearray(end - begin))))
        self._fetch()

    def read(self, extent: int, view: memoryview) -> None:
        """Copies one extent.

        Raises:
            SourceError: its range could not be read.
        """
        place = int(self._place[extent - self._first])
        failure = self._failures.get(place)
        if failure is not None:
            raise failed_source(failure)
        _, begin, data = self._spans[place]
        start = int(self._scan.columns.offset[extent]) - begin
        view[:] = data[start : start + len(view)]

    def _fetch(self) -> None:
        engine: Any = self._scan.objects
        wanted = [place for place, (_, _, data) in enumerate(self._spans) if len(data)]
        outcomes: list[Found | Failure] = engine.fetch_many(
            [
                (self._scan.volumes[v].path, begin, data)
                for v, begin, data in (self._spans[place] for place in wanted)
            ]
        )
        for place, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._failures[place] = outcome


def failed_source(failure: Failure) -> SourceError:
    """A failed read as what packing and indexing can skip or raise."""
    error = failure.to_error()
    kind = SourceChanged if failure.fault.kind in ("changed", "missing") else SourceError
    return kind(
        error.message, path=error.path, offset_bytes=error.offset_bytes, next_step=error.next_step
    )
