"""What a mount can do: bandwidth, metadata rates, batches of small samples, latency's tail; and advice.

All measurements run one after the other in a folder of their own, of which nothing is left, however they end.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.bench.content import Content
from headrace.bench.engines.native import extents_reader
from headrace.bench.metrics import percentiles
from headrace.bench.staging import evict, residency_of
from headrace.bench.storage_advice import Cell, advice_of
from headrace.bench.summary import provenance
from headrace.config import ReaderOptions
from headrace.errors import BenchError
from headrace.store.output_file import OutputFile, WriteBuffer, write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.io.batch_reader import PendingBatch


_REMOVE_S: Final = 30.0


@contextlib.contextmanager
def scratch(path: str) -> Iterator[str]:
    """A new folder in `path`, removed at the end, which Ctrl-C and SIGTERM also are.

    Raises:
        BenchError: `path` is no folder, or nothing can be written there.
    """
    if not os.path.isdir(path):
        raise BenchError(
            f"{path} is no folder.", path=path, next_step="Give a folder of the mount."
        )
    with _term_is_an_exit():
        try:
            folder = tempfile.mkdtemp(prefix=".headrace-storage-", dir=path)
        except OSError as e:
            raise BenchError(f"{path} cannot be written to: {e.strerror}.", path=path) from e
        try:
            yield folder
        except BaseException:
            _remove(folder)
            raise
        if not _remove(folder):
            raise BenchError(f"{folder} cannot be removed.", path=folder, next_step="Remove it.")


def _remove(folder: str) -> bool:
    """Whether it is gone. A thread that an interrupt left behind may write on for a moment: try again."""
    until = time.monotonic() + _REMOVE_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        gone = not os.path.exists(folder)
        if gone or time.monotonic() > until:
            return gone
        time.sleep(0.05)


@contextlib.contextmanager
def _term_is_an_exit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


PIECE_BYTES: Final = 4 << 20
"""Of one read: beyond it a disk's bandwidth does not grow."""


def can_read_direct(path: str) -> bool:
    """Whether a file can be read past the page cache."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        return False
    try:
        with mmap.mmap(-1, 4096) as buffer:
            os.preadv(fd, [buffer], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def write_bytes_per_s(paths: Sequence[str], nbytes: int) -> float:
    """Write `nbytes` to each path at the same time, until the disk has them.

    Raises:
        VolumeError: the disk is full, or the system refuses.
    """
    content = Content(len(paths))
    buffers = [WriteBuffer() for _ in paths]

    def write(number: int) -> None:
        with OutputFile(paths[number], buffers[number], sync=True) as out:
            for block in content.stream(number).blocks(nbytes):
                out.write(block)

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(paths), "storage-write") as pool:
        list(pool.map(write, range(len(paths))))
    return nbytes * len(paths) / (time.perf_counter() - begin)


def read_bytes_per_s(path: str, *, streams: int, direct: bool, seconds: float) -> float:
    """Read a file in pieces, `streams` at the same time, each its part from the beginning, for some time."""
    size = os.stat(path).st_size
    part = max(PIECE_BYTES, size // streams // PIECE_BYTES * PIECE_BYTES)
    until = time.perf_counter() + seconds

    def read(stream: int) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd, done = os.open(path, flags), 0
        try:
            with mmap.mmap(-1, PIECE_BYTES) as buffer:
                for at in range(stream * part, min(size, (stream + 1) * part), PIECE_BYTES):
                    done += os.preadv(fd, [buffer], at)
                    if time.perf_counter() > until:
                        break
        finally:
            os.close(fd)
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(streams, "storage-read") as pool:
        total = sum(pool.map(read, range(streams)))
    return total / (time.perf_counter() - begin)


def metadata_per_s(folder: str, files: int) -> dict[str, float]:
    """Operations per second, as this client sees them: what it has cached is quick."""
    paths = [os.path.join(folder, f"{number:06d}") for number in range(files)]

    def each(do: Callable[[str], object]) -> float:
        begin = time.perf_counter()
        for path in paths:
            do(path)
        return files / (time.perf_counter() - begin)

    rates = {"create": each(_create), "stat": each(os.stat), "open": each(_open)}
    begin = time.perf_counter()
    with os.scandir(folder) as entries:
        listed = sum(1 for _ in entries)
    rates["list"] = listed / (time.perf_counter() - begin)
    rates["rename"] = each(lambda path: os.rename(path, path + "r"))
    rates["unlink"] = each(lambda path: os.unlink(path + "r"))
    return rates


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def sync_s(folder: str, count: int, seconds: float) -> dict[str, float]:
    """Percentiles of writing 4 KiB and waiting for the disk, `count` times or for some time."""
    path, seconds_each = os.path.join(folder, "sync"), []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.perf_counter() + seconds
    try:
        for _ in range(count):
            begin = time.perf_counter()
            os.write(fd, bytes(4096))
            os.fsync(fd)
            seconds_each.append(time.perf_counter() - begin)
            if time.perf_counter() > until:
                break
    finally:
        os.close(fd)
        os.unlink(path)
    return percentiles(seconds_each)


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
    """A file's blocks of one size, read at random."""

    def __init__(self, path: str, block_bytes: int, *, direct: bool, seed: int = 0) -> None:
        count = os.stat(path).st_size // block_bytes
        options = ReaderOptions(
            direct="always" if direct else "auto", budget_bytes=_BUDGET_BYTES, verify=False,
            reads_in_flight=1, deadline_s=_DEADLINE_S,
        )  # fmt: skip
        numbers = np.arange(count)
        self._reader, _ = extents_reader(
            [path],
            np.zeros(count),
            numbers * block_bytes,
            np.full(count, block_bytes),
            options=options,
        )
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
    seconds_each: list[float] = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        with mmap.mmap(-1, 4096) as buffer:
            until = time.perf_counter() + seconds
            for offset in offsets:
                begin = time.perf_counter()
                os.preadv(fd, [buffer], offset)
                end = time.perf_counter()
                seconds_each.append(end - begin)
                if end > until:
                    break
    finally:
        os.close(fd)
    return percentiles(seconds_each) | {"reads": len(seconds_each)}


_STREAMS: Final = (1, 4)
_BLOCK_BYTES: Final = (4 << 10, 64 << 10, 1 << 20)
_DEPTHS: Final = (1, 4, 16, 64)
_BATCH: Final = 64
_SAMPLE_BYTES: Final = 100 << 10
_SAMPLE_DEPTH: Final = 16
_LATENCIES_MOST: Final = 20_000
_SYNCS_MOST: Final = 50
_CACHED_MOST: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How much is written and read.

    Attributes:
        size_bytes: of the large file; as much again is written in several streams.
        seconds: of each measurement of reading, at most about.
        files: small ones that are made, looked at, and removed.

    Raises:
        ValueError: a value is out of bounds.
    """

    size_bytes: int = 256 << 20
    seconds: float = 0.3
    files: int = 500

    def __post_init__(self) -> None:
        if self.size_bytes < 8 << 20:
            raise ValueError(f"size_bytes is {self.size_bytes:,}, expected at least 8 MiB")
        if not 0.001 <= self.seconds <= 3600:
            raise ValueError(f"seconds is {self.seconds}, expected 0.001 to 3600")
        if not 1 <= self.files <= 1_000_000:
            raise ValueError(f"files is {self.files}, expected 1 to 1,000,000")


def characterise(
    path: str,
    options: StorageOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure a mount. Nothing is left on it.

    Args:
        path: a folder of the mount.
        options: how much.
        progress: called with what is measured next.

    Returns:
        A document for JSON: rates in bytes or operations per second, times in seconds.

    Raises:
        BenchError: the folder cannot be written to.
        VolumeError: there is too little space, or the system refuses.
    """
    options = options or StorageOptions()
    begin = time.perf_counter()
    with scratch(path) as folder:
        small_bytes = options.files * _SAMPLE_BYTES
        check_free_space(Path(folder), 2 * options.size_bytes + small_bytes)
        try:
            document = _Measuring(folder, options, progress or (lambda _: None)).document()
        except OSError as e:
            raise write_error(e, e.filename or folder) from e
    return {
        "path": os.path.abspath(path),
        **document,
        "seconds": time.perf_counter() - begin,
        "provenance": provenance(path, ["headrace", "bench", "storage", path]),
    }


class _Measuring:
    def __init__(self, folder: str, options: StorageOptions, tell: Callable[[str], None]) -> None:
        self._folder, self._options, self._tell = folder, options, tell
        self._large = os.path.join(folder, "large")
        self._notes: list[str] = []

    def document(self) -> dict[str, Any]:
        write = self._write()
        self._direct = can_read_direct(self._large)
        evict([self._large])
        self._look_at_cache()
        read = {}
        for streams in _STREAMS:
            self._tell(f"sequential reads, {streams} at a time")
            read[str(streams)] = read_bytes_per_s(
                self._large, streams=streams, direct=self._direct, seconds=self._options.seconds
            )
        cells, engine = self._cells()
        batches = self._batches()
        self._tell("latency")
        latency = latencies_s(
            self._large, direct=self._direct, seconds=2 * self._options.seconds,
            most=_LATENCIES_MOST,
        )  # fmt: skip
        self._tell("metadata")
        empty = os.path.join(self._folder, "metadata")
        os.mkdir(empty)
        advice = advice_of(
            cells, sample_bytes=_SAMPLE_BYTES, packed_per_s=batches["packed"]["per_s"],
            files_per_s=batches["files"]["per_s"],
        )  # fmt: skip
        return {
            "direct": self._direct,
            "engine": engine,
            "sequential": {"write_bytes_per_s": write, "read_bytes_per_s": read},
            "random": [asdict(c) | {"per_s": c.bytes_per_s / c.block_bytes} for c in cells],
            "batches": batches,
            "latency_s": latency,
            "metadata_per_s": metadata_per_s(empty, self._options.files),
            "sync_s": sync_s(self._folder, _SYNCS_MOST, 2 * self._options.seconds),
            "advice": [asdict(each) for each in advice],
            "notes": self._notes,
        }

    def _write(self) -> dict[str, float]:
        rates = {}
        for streams in _STREAMS:
            self._tell(f"sequential writes, {streams} at a time")
            paths = [f"{self._large}{n}" for n in range(streams)] if streams > 1 else [self._large]
            rates[str(streams)] = write_bytes_per_s(paths, self._options.size_bytes // streams)
            if streams > 1:
                for path in paths:
                    os.unlink(path)
        return rates

    def _look_at_cache(self) -> None:
        """Say where reads are not the storage's."""
        share = residency_of([self._large]).share
        if share is not None and share > _CACHED_MOST:
            self._notes.append(
                f"{share:.0%} of the large file stay in memory: reads are not those of a device"
            )
        elif not self._direct:
            self._notes.append(
                "this file system has no reads past the page cache: what is read twice is quicker"
            )

    def _cells(self) -> tuple[list[Cell], str]:
        cells, engine = [], ""
        for block_bytes in _BLOCK_BYTES:
            with contextlib.closing(
                Blocks(self._large, block_bytes, direct=self._direct)
            ) as blocks:
                for depth in _DEPTHS:
                    self._tell(f"random reads of {block_bytes >> 10} KiB, {depth} in flight")
                    rate = blocks.rate(depth, _BATCH, self._options.seconds)
                    cells.append(Cell(block_bytes, depth, rate.bytes_per_s))
                engine = blocks.engine
        return cells, engine

    def _batches(self) -> dict[str, Any]:
        """The same small samples, from a packed file and from a file each."""
        self._tell("batches of small samples")
        with contextlib.closing(
            Blocks(self._large, _SAMPLE_BYTES, direct=self._direct, seed=1)
        ) as blocks:
            packed = blocks.rate(_SAMPLE_DEPTH, _BATCH, self._options.seconds)
        folder = os.path.join(self._folder, "samples")
        os.mkdir(folder)
        buffer, data = WriteBuffer(), os.urandom(_SAMPLE_BYTES)
        paths = [os.path.join(folder, f"{n:06d}") for n in range(self._options.files)]
        for path in paths:
            with OutputFile(path, buffer) as out:
                out.write(data)
        evict(paths)
        files = file_rate(paths, _SAMPLE_DEPTH, _BATCH)
        return {
            "sample_bytes": _SAMPLE_BYTES, "batch": _BATCH, "reads_in_flight": _SAMPLE_DEPTH,
            "packed": asdict(packed), "files": asdict(files),
        }  # fmt: skip
