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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.files import read_fully
from headrace.errors import SourceChanged, SourceError
from headrace.io.objects.faults import Failure
from headrace.store.sources.scan import (
    Problem,
    check_unchanged,
    refused,
    source_changed,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.store.sources.scan import Scan


BATCH_BYTES = 16 << 20
"""Bytes read by one task: long enough to hide its hand-over, short enough to keep few in memory."""

BATCH_SAMPLES = 8192  # samples read by one task, for tiny samples
_OPEN_MAX = 8  # files that one task has open at once
LARGE_BYTES = 128 << 20  # a sample above this is copied in pieces instead of being held in memory


class ReadPlan(NamedTuple):
    """Samples `begin` to `end - 1`, read together; `large` marks one that is read in pieces."""

    begin: int
    end: int
    size_bytes: int
    large: bool


@dataclass(slots=True)
class SourceBatch:
    """The bytes of a batch."""

    plan: ReadPlan  # which samples
    counts: NDArray[np.int64]  # (samples,) int64, extents of each sample; 0 for a skipped one
    length: NDArray[np.uint64]  # (extents,) uint64
    crc: NDArray[np.uint32]  # (extents,) uint32
    data: memoryview | None = None
    """Their extents back to back (skipped samples' left out); None for a large one."""
    problems: list[Problem] = field(default_factory=list)  # why samples were skipped
    buffer: bytearray | None = None  # what `data` looks into, to be given back


def plan_batches(scan: Scan, begin: int = 0, batch_bytes: int = BATCH_BYTES) -> Iterator[ReadPlan]:
    """Cuts the samples from `begin` on into batches."""
    ends = np.zeros(scan.columns.extents + 1, np.int64)
    np.cumsum(scan.columns.length.astype(np.int64), out=ends[1:])
    ends = ends[scan.columns.firsts.astype(np.int64)]  # bytes before each sample
    n = scan.columns.samples
    while begin < n:
        end = int(np.searchsorted(ends, ends[begin] + batch_bytes, side="right")) - 1
        end = min(max(end, begin + 1), begin + BATCH_SAMPLES, n)
        size = int(ends[end] - ends[begin])
        yield ReadPlan(begin, end, size, end == begin + 1 and size > LARGE_BYTES)
        begin = end


_Read = TypeVar("_Read")


def read_ahead(
    plans: Iterable[ReadPlan], read: Callable[[ReadPlan], _Read], workers: int
) -> Iterator[_Read]:
    """Reads batches with threads and gives them in order, at most `workers` + 1 at once in memory."""
    pending: deque[Future[_Read]] = deque()
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
        self._skip = on_error == "skip"
        self._firsts = scan.columns.firsts
        self._buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()

    def read(self, plan: ReadPlan) -> SourceBatch:
        """Reads one batch; of a large sample only what is known of it.

        Raises SourceChanged if a file is not as it was listed, and SourceError if a file cannot be read.
        """
        columns = self._scan.columns
        firsts = self._firsts[plan.begin : plan.end + 1].astype(np.int64)
        first = int(firsts[0])
        length = columns.length[first : int(firsts[-1])].astype(np.uint64)
        batch = SourceBatch(plan, np.diff(firsts), length, np.zeros(len(length), np.uint32))
        if plan.large:
            return batch
        batch.buffer = self._take_buffer(plan.size_bytes)
        view = memoryview(batch.buffer)
        ends = [0, *np.cumsum(length.astype(np.int64)).tolist()]
        bounds = (firsts - first).tolist()
        kept = np.ones(len(length), bool)
        with _Files(self._scan) as files:
            files.fetch_objects(first, first + len(length))
            for k in self._by_place(firsts):
                sample = plan.begin + k
                try:
                    for i in range(bounds[k], bounds[k + 1]):
                        piece = view[ends[i] : ends[i + 1]]
                        files.read(first + i, sample, piece, 0)
                        batch.crc[i] = files.checked(first + i, sample, crc32c(piece))
                except SourceError as e:
                    if not self._skip:
                        raise
                    batch.problems.append(Problem.of(e))
                    batch.counts[k] = 0
                    kept[bounds[k] : bounds[k + 1]] = False
        at = ends[-1]
        if not kept.all():
            at = 0
            for i in np.flatnonzero(kept).tolist():
                view[at : at + ends[i + 1] - ends[i]] = view[ends[i] : ends[i + 1]]
                at += ends[i + 1] - ends[i]
        batch.data = view[:at]
        batch.length, batch.crc = length[kept], batch.crc[kept]
        return batch

    def _by_place(self, firsts: NDArray[np.int64]) -> list[int]:
        """Samples, counted from the first of a batch, file by file and front to back in each."""
        columns = self._scan.columns
        if not columns.extents:
            return list(range(len(firsts) - 1))
        extents = np.minimum(firsts[:-1], columns.extents - 1)
        order: list[int] = np.lexsort((columns.offset[extents], columns.volume[extents])).tolist()
        return order

    def read_checksums(self, plan: ReadPlan) -> SourceBatch:
        """As `read`; of a large sample, which is read in pieces, the checksums too."""
        batch = self.read(plan)
        first = int(self._firsts[plan.begin])
        try:
            for k in range(len(batch.length) if plan.large else 0):
                for piece in self.pieces(first + k):
                    batch.crc[k] = crc32c(piece, int(batch.crc[k]))
        except SourceError as e:
            if not self._skip:
                raise
            batch.problems.append(Problem.of(e))
            batch.counts[:] = 0
            batch.length, batch.crc = batch.length[:0], batch.crc[:0]
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
        buffer = bytearray(min(piece_bytes, size))
        value = 0
        with _Files(self._scan) as files:
            for start in range(0, size, piece_bytes):
                view = memoryview(buffer)[: min(piece_bytes, size - start)]
                files.read(extent, sample, view, start)
                value = crc32c(view, value)
                yield view
            files.checked(extent, sample, value)

    def _take_buffer(self, size: int) -> bytearray:
        with contextlib.suppress(queue.Empty):
            if size <= BATCH_BYTES:
                return self._buffers.get_nowait()
        return bytearray(max(size, BATCH_BYTES))


class _Files:
    """The source files that one batch has open; closing checks that none changed meanwhile."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._open: dict[int, int] = {}
        self._spans: dict[int, tuple[int, memoryview, Failure | None]] = {}
        """By extent: what was fetched of its object, from where on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                for number, fd in self._open.items():
                    self._check_unchanged(number, fd)
        finally:
            for fd in self._open.values():
                os.close(fd)

    def fetch_objects(self, first: int, last: int) -> None:
        """Fetches extents that lie in objects, together: `read` then copies them."""
        engine, columns = self._scan.objects, self._scan.columns
        if engine is None:
            return
        places = [
            column[first:last].astype(np.int64)
            for column in (columns.volume, columns.offset, columns.length)
        ]
        runs, ranges = [], []
        for run, begin, end in neighbours(*places, gap_bytes=GAP_BYTES, span_bytes=RANGE_BYTES):
            if end > begin:
                path = self._scan.volumes[int(places[0][run[0]])].path
                runs.append(run)
                ranges.append((path, begin, memoryview(bytearray(end - begin))))
        for run, (_, begin, data), outcome in zip(
            runs, ranges, engine.fetch_many(ranges), strict=True
        ):
            failure = outcome if isinstance(outcome, Failure) else None
            self._spans |= dict.fromkeys((first + run).tolist(), (begin, data, failure))

    def read(self, extent: int, sample: int, view: memoryview, start: int) -> None:
        """Fills `view` from byte `start` of an extent."""
        columns = self._scan.columns
        number, offset = int(columns.volume[extent]), int(columns.offset[extent]) + start
        volume = self._scan.volumes[number]
        if volume.kind == "object":
            self._read_object(extent, volume.path, view, offset)
            return
        path = self._path(extent, sample)
        with _translated(path):
            if volume.kind == "tree":
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    read_fully(fd, view, start)
                    mtime = None if columns.mtime is None else int(columns.mtime[extent])
                    check_unchanged(path, os.fstat(fd), int(columns.length[extent]), mtime)
                finally:
                    os.close(fd)
                return
            if number not in self._open:
                if (
                    len(self._open) == _OPEN_MAX
                ):  # the batch of a shuffled pack may lie in any number
                    eldest = next(iter(self._open))
                    self._check_unchanged(eldest, self._open[eldest])
                    os.close(self._open.pop(eldest))
                self._open[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if read_fully(self._open[number], view, offset) < len(view):
                self._check_unchanged(number, self._open[number])
                raise source_changed(path, "file", "shorter", "as long as listed")

    def checked(self, extent: int, sample: int, computed: int) -> int:
        """An extent's CRC, if the sample's own format does not say another."""
        columns = self._scan.columns
        if columns.crc is None or computed == int(columns.crc[extent]):
            return computed
        raise refused(
            self._path(extent, sample), f"the checksum of sample "
            f"{os.fsdecode(columns.name(sample))!r} is {computed:08x}, the file says "
            f"{int(columns.crc[extent]):08x} (offset {int(columns.offset[extent]):,}).",
            "The source is damaged: restore it, or pass on_error='skip'.",
            int(columns.offset[extent]),
        )  # fmt: skip

    def _read_object(self, extent: int, path: str, view: memoryview, offset: int) -> None:
        if not len(view):
            return
        if extent in self._spans:
            begin, data, failure = self._spans[extent]
            view[:] = data[offset - begin : offset - begin + len(view)]
        else:
            assert self._scan.objects is not None
            outcome = self._scan.objects.fetch_many([(path, offset, view)])[0]
            failure = outcome if isinstance(outcome, Failure) else None
        if failure is not None:  # as what packing and indexing can skip or raise
            error = failure.to_error()
            changed = failure.fault.kind in ("changed", "missing")
            raise (SourceChanged if changed else SourceError)(
                error.message, path=error.path, offset_bytes=error.offset_bytes,
                next_step=error.next_step,
            )  # fmt: skip

    def _path(self, extent: int, sample: int) -> str:
        """The file that holds an extent."""
        volume = self._scan.volumes[int(self._scan.columns.volume[extent])]
        if volume.kind != "tree":
            return volume.path
        return os.path.join(volume.path, os.fsdecode(self._scan.columns.name(sample)))

    def _check_unchanged(self, number: int, fd: int) -> None:
        volume = self._scan.volumes[number]
        check_unchanged(volume.path, os.fstat(fd), volume.bytes or 0, volume.mtime_ns)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        how = "Wait until nobody writes there, then pack or index again."
        text = f"{path}: vanished after it was listed."
        raise SourceChanged(text, path=path, next_step=how) from None
    except OSError as e:
        how = "Make it readable, or pass on_error='skip' to leave it out."
        raise unreadable(path, e, how) from e


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

    A gap up to `gap_bytes` is read too; no run is longer than `span_bytes`, unless one extent is. Yields the
    numbers of a run's extents, by offset, and where the run begins and ends.
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
