"""Reads: how many samples a second come, with so many asked for at a time, by headrace's readers and Python's.

`FileReads` opens and reads whole files, as the drop-in loader reads ahead. `PieceReads` reads pieces of
files that stay open, as a store is read, past the page cache where the file system lets one: so the
device can be measured although the data lie in memory, and nothing has to be put out of it. `StoreReads`
reads an open store's samples by index, wherever they lie. `plain_reads` reads as torch's workers do.
"""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.config import ReaderOptions
from headrace.errors import VolumeError
from headrace.insight.doctor.findings import Cpu, OpenRates, PlainReads, Point
from headrace.insight.doctor.samples import Piece
from headrace.io.batch_reader import BatchReader, PendingBatch
from headrace.plane.stage import latency_percentile_s
from headrace.store.residency import resident_bytes
from headrace.store.segment import catalog_of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.insight.doctor.samples import SamplePool
    from headrace.testing import SlowVolume

_ASKED: Final = 1000
_COLD_SHARE: Final = 0.01


def resident_share(
    pool: SamplePool, seconds: float, stop: Callable[[], bool]
) -> tuple[float | None, tuple[Piece, ...]]:
    """Share of some samples' files that lies in the page cache, and the samples that do not."""
    until = time.monotonic() + seconds
    total = inside = 0
    cold: list[Piece] = []
    shares: dict[str, float | None] = {}
    for number, piece in enumerate(pool.pieces[:_ASKED]):
        if number and (time.monotonic() > until or stop()):
            break
        if piece.path not in shares:
            try:
                size = os.stat(piece.path).st_size
            except OSError:
                size = 0
            resident = resident_bytes(piece.path) if size else None
            shares[piece.path] = None if resident is None else resident / size
        share = shares[piece.path]
        if share is None:
            continue
        total += piece.length
        inside += int(share * piece.length)
        if share < _COLD_SHARE:
            cold.append(piece)
    return (inside / total if total else None), tuple(cold)


# -- opens -------------------------------------------------------------------------------------------

THREADS: Final = 16
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_COPY_BYTES: Final = 4 << 20
_COPIES: Final = 4


def open_rates(paths: Sequence[str], seconds: float, stop: Callable[[], bool]) -> OpenRates | None:
    """Open and close files, first one at a time, then by several threads; None if none can be opened."""
    half = max(1, len(paths) // 4)
    one = _opened(paths[:half], seconds / 2, 1, stop)
    many = _opened(paths[half:] or paths, seconds / 2, THREADS, stop)
    if not one or not many:
        return None
    return OpenRates(one_per_s=one, many_per_s=max(one, many), threads=THREADS)


def _opened(paths: Sequence[str], seconds: float, threads: int, stop: Callable[[], bool]) -> float:
    lock = threading.Lock()
    left = iter(paths)
    until = time.monotonic() + seconds

    def work(_: int) -> int:
        tried = done = 0
        # One at the least: on a busy machine the time may be over before the thread has had a turn.
        while not stop() and (not tried or time.monotonic() < until):
            with lock:
                path = next(left, None)
            if path is None:
                break
            tried += 1
            try:
                os.close(os.open(path, _FLAGS))
            except OSError:
                continue
            done += 1
        return done

    begun = time.monotonic()
    with ThreadPoolExecutor(threads, "doctor-open") as pool:
        total = sum(pool.map(work, range(threads)))
    return total / max(1e-9, time.monotonic() - begun)


def plain_reads(
    pieces: Sequence[Piece], seconds: float, stop: Callable[[], bool], *, whole_files: bool
) -> tuple[PlainReads | None, list[tuple[Piece, bytes]]]:
    """Read samples by Python's own `open` and `read`, twice: the times, and the bytes to decode."""

    def timed(pieces: Iterable[Piece]) -> tuple[list[tuple[Piece, bytes]], float, float]:
        """What was read, and what one took."""
        until, done = time.monotonic() + seconds / 2, list[tuple[Piece, bytes]]()
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        for piece in pieces:
            if done and (time.monotonic() > until or stop()):
                break
            data = _read(piece, whole_files=whole_files)
            if data is not None:
                done.append((piece, data))
        n = max(1, len(done))
        return done, (time.perf_counter() - begun_s) / n, (time.thread_time() - begun_cpu_s) / n

    samples, first_s, first_cpu_s = timed(pieces)
    if not samples:
        return None, []
    *_, again_cpu_s = timed([piece for piece, _ in samples])
    times = PlainReads(
        first_s=first_s, first_cpu_s=first_cpu_s, again_cpu_s=again_cpu_s, reads=len(samples)
    )
    return times, samples


def _read(piece: Piece, *, whole_files: bool) -> bytes | None:
    try:
        with open(piece.path, "rb") as file:
            if whole_files:
                return file.read()
            file.seek(piece.offset)
            return file.read(piece.length)
    except OSError:
        return None


def copy_speeds() -> Cpu:
    """How fast memory is filled: fresh, as a new tensor's, and used, as a recycled buffer's."""
    source = np.ones(_COPY_BYTES, np.uint8)
    fresh = used = 0.0
    for _ in range(_COPIES):
        # Not numpy's own: the allocator may hand out memory that was used before.
        target = np.frombuffer(mmap.mmap(-1, _COPY_BYTES), np.uint8)
        begun = time.thread_time()  # of the processor's own: others may want it, too
        target[:] = source
        between = time.thread_time()
        target[:] = source
        end = time.thread_time()
        fresh = max(fresh, _COPY_BYTES / (between - begun))
        used = max(used, _COPY_BYTES / (end - between))
    return Cpu(others=0.0, fresh_bytes_per_s=fresh, used_bytes_per_s=used)


# -- reads -------------------------------------------------------------------------------------------

_BUDGET_BYTES: Final = 256 << 20
_JOB_BYTES_MAX: Final = 8 << 20
_DEADLINE_S: Final = 60.0
_LATE: Final = 3.0
_LATE_LEAST_S: Final = 2.0
"""A measurement may take so many times the time it is given, where the storage is slower than that, and so
long at the least: on a busy machine the threads that read take their time to begin."""

_SMALL_BYTES: Final = 4096
_OPENED_AT_ONCE: Final = 64
_FILES_MIN: Final = 8
_FILES_MAX: Final = 256
_DESCRIPTORS_LEFT: Final = 64
_TICK_S: Final = 0.1
_AHEAD: Final = 4  # jobs under way at a time, beside what keeps the depth


class RandomReads:
    """Reads samples of about `mean_bytes` at random, so many at a time, until `stop` says True.

    The reader is closed with this.
    """

    def __init__(
        self, reader: _native.FileReader | BatchReader, mean_bytes: float, stop: Callable[[], bool]
    ) -> None:
        self._reader, self._mean_bytes, self._stop = reader, max(1.0, mean_bytes), stop
        self._job_max = _BUDGET_BYTES

    engine = "threads"  # what reads: io_uring, threads

    def _submit(self, count: int) -> Any:
        """Ask for so many samples; returns the job."""
        raise NotImplementedError

    def _take(self, job: Any, wait_s: float) -> tuple[int, int] | None:
        """How many samples and bytes a job brought; None: it is not done."""
        raise NotImplementedError

    def rate(self, depth: int, seconds: float, mean_bytes: float = 0.0) -> Point | None:
        """Read for so long; None where nothing came in several times as long, two seconds at the least.

        Keeps the depth, counts what came, and divides by the time until the last came.
        """
        self._reader.turn(reads_in_flight=depth)
        # Enough that a few jobs keep the depth, few enough that one ends soon.
        most = min(self._job_max, int(_JOB_BYTES_MAX / (mean_bytes or self._mean_bytes)))
        job_samples = max(1, min((depth + 1) // 2, most))
        jobs_ahead = max(2, -(-depth // job_samples)) + _AHEAD if depth > 1 else 2
        before, cpu_before = self._reader.stats(), time.process_time()
        begun = time.monotonic()
        last, count, nbytes = begun, 0, 0
        # A busy machine may give this thread no turn until the time is over: one job is asked for all the
        # same, and what came meanwhile is taken before it counts as late.
        pending = deque([self._submit(job_samples)])
        while True:
            now = time.monotonic()
            over = now > begun + seconds
            late = now > begun + max(_LATE * seconds, _LATE_LEAST_S)
            if over and (count or not pending):
                break
            while not over and len(pending) < jobs_ahead:
                pending.append(self._submit(job_samples))
            taken = self._take(pending[0], _TICK_S)
            if taken is not None:
                pending.popleft()
                last = time.monotonic()
                count, nbytes = count + taken[0], nbytes + taken[1]
            if late or self._stop():
                break
        cpu = time.process_time() - cpu_before
        after = self._reader.stats()
        # What is under way ends now, so that it does not disturb what is measured next.
        until = time.monotonic() + seconds
        while pending and time.monotonic() < until and not self._stop():
            if self._take(pending[0], _TICK_S) is not None:
                pending.popleft()
        if not count:
            return None
        grown = [b - a for a, b in zip(before["latency_us"], after["latency_us"], strict=True)]
        spent = max(1e-9, last - begun)
        return Point(
            depth=depth, per_s=count / spent, bytes_per_s=nbytes / spent,
            p50_s=latency_percentile_s(grown, 0.5), p99_s=latency_percentile_s(grown, 0.99),
            cpu_s=cpu / count, reads=count,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads."""
        self._reader.close()


class FileReads(RandomReads):
    """Whole files: looked up, opened, read past the page cache where they are not in it, closed."""

    _reader: _native.FileReader

    def __init__(
        self, paths: Sequence[str], mean_bytes: float,
        simulate: tuple[SlowVolume, str] | None = None, stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        model, roots = (simulate[0].model, [simulate[1]]) if simulate is not None else (None, [])
        reader = _native.FileReader(
            reads_in_flight=1, buffer_bytes=_BUDGET_BYTES, cold="direct", simulate=model,
            simulated_roots=list(map(os.path.realpath, roots)),
        )  # fmt: skip
        super().__init__(reader, mean_bytes, stop)
        self._paths = itertools.cycle([os.fsencode(path) for path in paths])

    def _submit(self, count: int) -> _native.FileJob:
        return self._reader.submit(list(itertools.islice(self._paths, count)))

    def _take(self, job: _native.FileJob, wait_s: float) -> tuple[int, int] | None:
        done = job.wait(wait_s)
        if done is None:
            return None
        good = done.errors == 0
        return int(good.sum()), int(done.lengths[good].sum())

    def close(self) -> None:
        """End the threads."""
        self._reader.close(1.0)


class StoreReads(RandomReads):
    """Parts of samples of an open store, drawn from the first `samples` of its catalog; it stays open.

    `direct` reads go past the page cache; what the file system refuses goes through it.
    """

    _reader: BatchReader

    def __init__(
        self, catalog: _native.Catalog, parts: Sequence[int], samples: int, mean_bytes: float, *,
        direct: bool = False, simulate: SlowVolume | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        options = ReaderOptions(
            direct="always" if direct else "auto", budget_bytes=_BUDGET_BYTES, verify=False,
            reads_in_flight=1, deadline_s=_DEADLINE_S, simulate=simulate,
        )  # fmt: skip
        super().__init__(BatchReader(catalog, parts, options), mean_bytes, stop)
        self._samples = self._job_max = samples
        self._first = 0
        self._dice = np.random.default_rng(7)

    @property
    def engine(self) -> str:  # type: ignore[override]  # known once it has read
        """What reads: io_uring, threads."""
        return self._reader.engine[0]

    @property
    def engine_why(self) -> str:
        """Why it is not io_uring, or empty."""
        return self._reader.engine[1]

    def _submit(self, count: int) -> PendingBatch:
        drawn = self._dice.choice(self._samples, count, replace=False)
        return self._reader.submit(drawn + self._first)

    def _take(self, job: PendingBatch, wait_s: float) -> tuple[int, int] | None:
        if not job.done:
            time.sleep(min(wait_s, 5e-4))
            if not job.done:
                return None
        batch = job.take()
        return batch.samples - int(batch.failed), int(batch.lengths.sum())


class PieceReads(StoreReads):
    """Pieces of files that stay open, in as many files as the process's limit allows, at most.

    Raises VolumeError if a file cannot be looked at.
    """

    def __init__(
        self, pieces: Sequence[Piece], *, direct: bool, simulate: SlowVolume | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        # Files are open twice each. A few at the least: where even those are too many, each read opens its own.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = 1 << 16 if soft == resource.RLIM_INFINITY else soft
        free -= len(os.listdir("/proc/self/fd")) + _DESCRIPTORS_LEFT
        most = max(_FILES_MIN, min(_FILES_MAX, free // 2))
        few = set(itertools.islice(dict.fromkeys(p.path for p in pieces), most))
        pieces = [piece for piece in pieces if piece.path in few]
        # Each piece stands there twice: as a whole, and with its first bytes.
        twice = [*pieces, *(Piece(p.path, p.offset, min(_SMALL_BYTES, p.length)) for p in pieces)]
        mean_bytes = sum(p.length for p in pieces) / max(1, len(pieces))
        super().__init__(
            _catalog_of(twice), [0], len(pieces), mean_bytes,
            direct=direct, simulate=simulate, stop=stop,
        )  # fmt: skip

    def open_all(self) -> None:
        """Open the files: they are opened when they are read first, and that is not what is measured."""
        self._reader.turn(reads_in_flight=_OPENED_AT_ONCE)
        small = np.arange(self._samples, 2 * self._samples, dtype=np.int64)
        for first in range(0, len(small), _OPENED_AT_ONCE):
            if self._stop():
                break
            self._reader.submit(small[first : first + _OPENED_AT_ONCE]).take()

    def small_rate(self, depth: int, seconds: float) -> Point | None:
        """Read the pieces' first 4 KiB for so long; None where nothing came."""
        self._first = self._samples
        try:
            return self.rate(depth, seconds, _SMALL_BYTES)
        finally:
            self._first = 0


def _catalog_of(pieces: Sequence[Piece]) -> _native.Catalog:
    numbers = {path: i for i, path in enumerate(dict.fromkeys(p.path for p in pieces))}
    each = [(numbers[p.path], p.offset, p.length) for p in pieces]
    file, offset, length = np.array(each, np.int64).reshape(-1, 3).T
    try:
        return catalog_of_files(numbers, file, offset, length, "what the doctor reads")
    except OSError as e:
        what = f"{e.filename} cannot be looked at: {e.strerror}."
        raise VolumeError(what, path=e.filename) from e
