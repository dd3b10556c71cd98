"""What a mount can do: bandwidth, metadata rates, batches of small samples, latency's tail; and advice.

All measurements run one after the other in a folder of their own, of which nothing is left, however they end.
"""

from __future__ import annotations

import contextlib
import math
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace import _native
from headrace.base.text import binary_text, counted, rate_text
from headrace.bench.content import Content
from headrace.bench.metrics import percentiles
from headrace.bench.staging import evict, residency_of
from headrace.bench.summary import OTHERS_MANY, provenance
from headrace.config import ReaderOptions
from headrace.errors import BenchError
from headrace.io.batch_reader import BatchReader
from headrace.machine.host import cpu_times
from headrace.store.output_file import OutputFile, WriteBuffer, write_error
from headrace.store.publish import check_free_space
from headrace.store.residency import can_read_direct
from headrace.store.segment import catalog_of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.io.batch_reader import PendingBatch


_STREAMS: Final = (1, 4)
_BLOCK_BYTES: Final = (4 << 10, 64 << 10, 1 << 20)
_DEPTHS: Final = (1, 4, 16, 64)
_BATCH: Final = 64
_SAMPLE_BYTES: Final = 100 << 10
_SAMPLE_DEPTH: Final = 16
_LATENCIES_MOST: Final = 20_000
_SYNCS_MOST: Final = 50
_CACHED_MOST: Final = 0.1

_AHEAD: Final = 4
"""Batches that are read at the same time."""

_BUDGET_BYTES: Final = 256 << 20
_BATCH_BYTES_MOST: Final = 16 << 20
_DEADLINE_S: Final = 60.0
_TICK_S: Final = 0.05
"""Files that changed within the clock's last tick are not read: nobody could see whether they change again."""

_REMOVE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How much is written and read; as much as the large file again is written in several streams.

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


def characterise(path: str, options: StorageOptions | None = None) -> dict[str, Any]:
    """Measure a mount. Nothing is left on it.

    Returns:
        A document for JSON: rates in bytes or operations per second, times in seconds.

    Raises:
        BenchError: the folder cannot be written to.
        VolumeError: there is too little space, or the system refuses.
    """
    options = options or StorageOptions()
    begun = cpu_times()
    with _scratch(path) as folder:
        check_free_space(Path(folder), 2 * options.size_bytes + options.files * _SAMPLE_BYTES)
        try:
            document = _measured(folder, options)
        except OSError as e:
            raise write_error(e, e.filename or folder) from e
    now = cpu_times()
    others, cpus = begun.until(now).others, os.cpu_count() or 1
    if others >= OTHERS_MANY * cpus:  # rates are of processors, too
        document["advice"] = []
    return {
        "path": os.path.abspath(path),
        **document,
        "seconds": now.at_s - begun.at_s,
        "cpus": cpus,
        "seconds_each": options.seconds,
        "other_cpus": None if math.isnan(others) else others,
        "provenance": provenance(path, ["headrace", "bench", "storage", path]),
    }


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    """A new folder in `path`, removed at the end, which Ctrl-C and SIGTERM also are."""
    if not os.path.isdir(path):
        raise BenchError(
            f"{path} is no folder.", path=path, next_step="Give a folder of the mount."
        )

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with contextlib.ExitStack() as closing:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, leave)
            closing.callback(signal.signal, signal.SIGTERM, before)
        try:
            folder = tempfile.mkdtemp(prefix=".headrace-storage-", dir=path)
        except OSError as e:
            raise BenchError(
                f"{path} cannot be written to: {e.strerror}.", path=path,
                next_step="Name a folder on the mount in which you may write.",
            ) from e  # fmt: skip
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


def _measured(folder: str, options: StorageOptions) -> dict[str, Any]:
    large, seconds = os.path.join(folder, "large"), options.seconds
    write: dict[str, float] = {}
    for streams in _STREAMS:
        paths = [f"{large}{n}" for n in range(streams)] if streams > 1 else [large]
        write[str(streams)] = _write_bytes_per_s(paths, options.size_bytes // streams)
        for path in paths if streams > 1 else ():
            os.unlink(path)
    direct = can_read_direct(large)
    evict([large])
    share, notes = residency_of([large]).share, []
    if share is not None and share > _CACHED_MOST:
        notes = [f"{share:.0%} of the large file stay in memory: reads are not those of a device"]
    elif not direct:
        notes = ["this file system has no reads past the page cache: what is read twice is quicker"]
    read: dict[str, float] = {}
    with contextlib.closing(_BlockReader(large, _BLOCK_BYTES[-1], direct=direct)) as blocks:
        for depth in _DEPTHS:
            evict([large])
            read[str(depth)] = blocks.rate(depth, seconds, in_order=True)["bytes_per_s"]
    cells, engine = [], ""
    for block_bytes in _BLOCK_BYTES:
        with contextlib.closing(_BlockReader(large, block_bytes, direct=direct)) as blocks:
            engine = blocks.engine
            for depth in _DEPTHS:
                rate = blocks.rate(depth, seconds)
                cells.append(Cell(block_bytes, depth, rate["bytes_per_s"]))
    with contextlib.closing(_BlockReader(large, _SAMPLE_BYTES, direct=direct)) as blocks:
        packed = blocks.rate(_SAMPLE_DEPTH, seconds)
    files = _file_rate(_small_files(folder, options.files))
    latency = _latencies_s(large, direct=direct, seconds=2 * seconds)
    empty = os.path.join(folder, "metadata")
    os.mkdir(empty)
    advice = advice_of(
        cells, sample_bytes=_SAMPLE_BYTES, packed_per_s=packed["per_s"], files_per_s=files["per_s"]
    )
    return {
        "direct": direct,
        "engine": engine,
        "sequential": {"write_bytes_per_s": write, "read_bytes_per_s": read},
        "random": [asdict(c) | {"per_s": c.bytes_per_s / c.block_bytes} for c in cells],
        "batches": {
            "sample_bytes": _SAMPLE_BYTES, "batch": _BATCH, "reads_in_flight": _SAMPLE_DEPTH,
            "packed": packed, "files": files,
        },
        "latency_s": latency,
        **_metadata_per_s(empty, options.files),
        "sync_s": _sync_s(folder, 2 * seconds),
        "advice": [each._asdict() for each in advice],
        "notes": notes,
    }  # fmt: skip


# -- one file ---------------------------------------------------------------------------------------


def _write_bytes_per_s(paths: Sequence[str], nbytes: int) -> float:
    """Write `nbytes` to each path at the same time, until the disk has them."""
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


@contextlib.contextmanager
def _opened(path: str, nbytes: int, *, direct: bool) -> Iterator[Callable[[int], int]]:
    """A function that reads so many bytes at an offset, into memory of its own."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        with mmap.mmap(-1, nbytes) as buffer:
            yield lambda at: os.preadv(fd, [buffer], at)
    finally:
        os.close(fd)


# -- one call after the other ---------------------------------------------------------------------


def _metadata_per_s(folder: str, files: int) -> dict[str, dict[str, float]]:
    """Operations per second; apart from them those that the client answers itself: it has made the files."""
    paths = [os.path.join(folder, f"{number:06d}") for number in range(files)]

    def opened(path: str, flags: int = os.O_RDONLY) -> None:
        os.close(os.open(path, flags | os.O_CLOEXEC, 0o600))

    each: dict[str, Callable[[str], object]] = {
        "create": lambda path: opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL),
        "stat": os.stat,
        "open": opened,
        "list": lambda _: os.listdir(folder),
        "rename": lambda path: os.rename(path, path + "r"),
        "unlink": lambda path: os.unlink(path + "r"),
    }
    rates, cached_names = {}, ("stat", "open", "list")
    for name, do in each.items():
        # Whoever comes first after `create` brings the files' records into the processor's own caches.
        for _ in range(2 if name in cached_names else 1):
            begin = time.perf_counter()
            for path in paths[:1] if name == "list" else paths:
                do(path)
            rates[name] = files / (time.perf_counter() - begin)
    cached = {name: rates.pop(name) for name in cached_names}
    return {"metadata_per_s": rates, "cached_metadata_per_s": cached}


def _timed(do: Callable[[int], object], most: int, seconds: float) -> list[float]:
    """How long each call takes, of so many at most or for some time."""
    seconds_each: list[float] = []
    until = time.perf_counter() + seconds
    for number in range(most):
        begin = time.perf_counter()
        do(number)
        end = time.perf_counter()
        seconds_each.append(end - begin)
        if end > until:
            break
    return seconds_each


def _sync_s(folder: str, seconds: float) -> dict[str, float]:
    """Percentiles of writing 4 KiB and waiting for the disk."""
    path = os.path.join(folder, "sync")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(_: int) -> None:
        os.write(fd, bytes(4096))
        os.fsync(fd)

    try:
        return percentiles(_timed(write, _SYNCS_MOST, seconds))
    finally:
        os.close(fd)
        os.unlink(path)


def _latencies_s(path: str, *, direct: bool, seconds: float) -> dict[str, float]:
    """Percentiles of single reads of 4 KiB at random, one after the other."""
    blocks = os.stat(path).st_size // 4096
    offsets = (np.random.default_rng(1).integers(0, blocks, _LATENCIES_MOST) * 4096).tolist()
    with _opened(path, 4096, direct=direct) as read_at:
        each = _timed(lambda n: read_at(offsets[n]), _LATENCIES_MOST, seconds)
    return percentiles(each) | {"reads": len(each)}


# -- batches --------------------------------------------------------------------------------------


def _batches(
    batches: Iterator[Any], submit: Callable[[Any], Any], take: Callable[[Any], int]
) -> dict[str, Any]:
    """Rates of reading batches, some of them at a time, and how long each took; `take` returns its bytes."""
    pending: deque[tuple[float, Any]] = deque()
    waits, samples, nbytes = list[float](), 0, 0
    begin, batch = time.perf_counter(), next(batches, None)
    while pending or batch is not None:
        if batch is not None and len(pending) < _AHEAD:
            pending.append((time.perf_counter(), submit(batch)))
            samples, batch = samples + len(batch), next(batches, None)
            continue
        asked_s, job = pending.popleft()
        nbytes += take(job)
        waits.append(time.perf_counter() - asked_s)
    seconds = time.perf_counter() - begin
    return {
        "per_s": samples / seconds, "bytes_per_s": nbytes / seconds, "batch_s": percentiles(waits),
        "batches": len(waits),
    }  # fmt: skip


class _BlockReader:
    """Reads batches of a file's blocks, at random or in order: only that tells the two apart."""

    def __init__(self, path: str, block_bytes: int, *, direct: bool) -> None:
        self._block_bytes, self._count = block_bytes, os.stat(path).st_size // block_bytes
        self._direct = direct
        self._batch = max(1, min(_BATCH, self._count, _BATCH_BYTES_MOST // block_bytes))
        options = ReaderOptions(
            direct="always" if direct else "auto", budget_bytes=_BUDGET_BYTES, verify=False,
            reads_in_flight=1, deadline_s=_DEADLINE_S,
        )  # fmt: skip
        catalog = catalog_of_files(
            [path], np.zeros(self._count), np.arange(self._count) * block_bytes,
            np.full(self._count, block_bytes), "the blocks of a file",
        )  # fmt: skip
        self._reader = BatchReader(catalog, [0], options)
        self._random = np.random.default_rng(0)
        self.engine, self.close = self._reader.engine[0], self._reader.close

    def rate(self, depth: int, seconds: float, *, in_order: bool = False) -> dict[str, Any]:
        self._reader.turn(reads_in_flight=depth)
        blocks = (self._in_order if in_order else self._drawn)(time.perf_counter() + seconds)
        return _batches(blocks, self._reader.submit, self._take)

    def _in_order(self, until: float) -> Iterator[NDArray[np.int64]]:
        """From the beginning, again and again where that is read from the device each time."""
        at = 0
        while time.perf_counter() < until:
            yield np.arange(at, at + self._batch)
            at += self._batch
            if at + self._batch > self._count:
                at = 0
                if not self._direct:
                    return

    def _drawn(self, until: float) -> Iterator[NDArray[np.int64]]:
        while time.perf_counter() < until:
            yield np.sort(self._random.choice(self._count, self._batch, replace=False))

    def _take(self, job: PendingBatch) -> int:
        if job.take().failed:
            raise BenchError("a block of the test's own file cannot be read.")
        return self._batch * self._block_bytes


def _small_files(folder: str, count: int) -> list[str]:
    """The samples again, each a file."""
    samples = os.path.join(folder, "samples")
    os.mkdir(samples)
    buffer, data = WriteBuffer(), os.urandom(_SAMPLE_BYTES)
    paths = [os.path.join(samples, f"{n:06d}") for n in range(count)]
    for path in paths:
        with OutputFile(path, buffer) as out:
            out.write(data)
    evict(paths)
    return paths


def _file_rate(paths: Sequence[str]) -> dict[str, Any]:
    """Read whole files once, in random order and in batches, past the page cache where possible."""
    time.sleep(_TICK_S)
    order = [os.fsencode(paths[i]) for i in np.random.default_rng(0).permutation(len(paths))]
    reader = _native.FileReader(
        reads_in_flight=_SAMPLE_DEPTH, buffer_bytes=_BUDGET_BYTES, cold="direct"
    )

    def take(job: _native.FileJob) -> int:
        done = job.wait(_DEADLINE_S)
        if done is None or done.errors.any():
            raise BenchError("a file of the test's own cannot be read.")
        return int(done.lengths.sum())

    with contextlib.closing(reader):
        batches = (order[at : at + _BATCH] for at in range(0, len(order), _BATCH))
        return _batches(batches, reader.submit, take)


# -- advice ---------------------------------------------------------------------------------------

_ENOUGH: Final = 0.9
"""Of the best rate: more depth or larger blocks than it takes for this are not worth their memory."""

_PACKING_PAYS: Final = 1.3


@dataclass(frozen=True, slots=True)
class Cell:
    """Random reads of blocks of one size at one depth."""

    block_bytes: int
    depth: int
    bytes_per_s: float


class StorageAdvice(NamedTuple):
    """One piece of it."""

    about: str
    value: bool | int
    why: str


def advice_of(
    cells: Sequence[Cell], *, sample_bytes: int, packed_per_s: float, files_per_s: float
) -> list[StorageAdvice]:
    """What follows from the figures.

    Args:
        cells: random reads.
        sample_bytes: of the samples that the two rates are of.
        packed_per_s: samples at random from one large file.
        files_per_s: the same samples, each a file.
    """
    ratio = round(packed_per_s / files_per_s, 1)  # as it is told
    pays = ratio >= _PACKING_PAYS
    begin = "Pack small samples (headrace pack)" if pays else "Packing changes little in speed here"
    if ratio * _PACKING_PAYS < 1:
        begin = "Packed samples are slower to read here"
    packing = (
        f"{begin}: samples of {sample_bytes:,} bytes: {packed_per_s:,.0f}/s from one packed file, "
        f"{files_per_s:,.0f}/s from a file each ({ratio:.1f} x)."
    )
    best: dict[int, float] = {}
    enough: dict[int, int] = {}
    for block in sorted({cell.block_bytes for cell in cells}):
        row = [cell for cell in cells if cell.block_bytes == block]
        best[block] = max(cell.bytes_per_s for cell in row)
        enough[block] = min(c.depth for c in row if c.bytes_per_s >= _ENOUGH * best[block])
    depth = max(enough.values())
    depths = ", ".join(f"{each} for {binary_text(block)}" for block, each in enough.items())
    more = "; more were not tried" if depth == max(cell.depth for cell in cells) else ""
    deep = f"Keep {depth} reads in flight: {_ENOUGH:.0%} of the best rate takes {depths}{more}. "
    deep += (
        f"headrace finds how many by itself; reads_in_flight={depth} of hr.loader sets it by hand."
    )
    block = min(size for size, rate in best.items() if rate >= _ENOUGH * max(best.values()))
    rates = ", ".join(f"{binary_text(size)} {rate_text(rate)}" for size, rate in best.items())
    return [
        StorageAdvice("packing", pays, packing),
        StorageAdvice("depth", depth, deep),
        StorageAdvice(
            "block size", block,
            f"Read at random in pieces of {binary_text(block)} or more: {rates}.",
        ),
    ]  # fmt: skip


# -- text ----------------------------------------------------------------------------------------


def storage_lines(document: dict[str, Any]) -> Iterator[str]:
    """What `characterise` found, for people."""
    mount = document["provenance"]["mount"]
    past = "past the page cache" if document["direct"] else "through the page cache"
    yield f"{document['path']}: {mount.get('type', '?')} on {mount.get('source', '?')}, {past}"
    yield (
        f"one run: each line was measured once, for about {document['seconds_each']:g} s; the next run, or a "
        "greater --seconds, tells how far figures vary"
    )
    sequential, by_block = document["sequential"], dict[int, list[str]]()
    written = [f"{rate_text(r)} by {n}" for n, r in sequential["write_bytes_per_s"].items()]
    yield f"sequential write   {', '.join(written)} at a time"
    read = [f"{rate_text(r)} x{n}" for n, r in sequential["read_bytes_per_s"].items()]
    yield f"sequential 1 MiB   {', '.join(read)} reads in flight"
    for cell in document["random"]:
        rate = f"{rate_text(cell['bytes_per_s'])} x{cell['depth']}"
        by_block.setdefault(cell["block_bytes"], []).append(rate)
    for block, rates in by_block.items():
        yield f"{'random ' + binary_text(block):<18} {', '.join(rates)} reads in flight"
    batches = document["batches"]
    for name in ("packed", "files"):
        samples = batches[name]
        count = counted(samples["batches"], "batch", "batches")
        yield (
            f"{'samples, ' + name:<18} {samples['per_s']:,.0f}/s of {binary_text(batches['sample_bytes'])}, "
            f"{batches['reads_in_flight']} reads in flight; {count} of {batches['batch']}: "
            f"{_ms(samples['batch_s'])}"
        )
    yield f"{'latency, 4 KiB':<18} {_ms(document['latency_s'])}"
    yield f"{'write and sync':<18} {_ms(document['sync_s'])}"
    slow = "; ext4: `create` is far slower for minutes after files were removed"
    for title, key, what in (
        ("metadata", "metadata_per_s", f"by one thread{slow * (mount.get('type') == 'ext4')}"),
        (
            "metadata, cached",
            "cached_metadata_per_s",
            "of this client's memory, not of the storage",
        ),
    ):
        rates = [f"{name} {rate:,.0f}/s" for name, rate in document[key].items()]
        yield f"{title:<18} {', '.join(rates)} ({what})"
    if (others := document["other_cpus"]) is not None:
        many = others >= OTHERS_MANY * document["cpus"]
        but = ": figures may be too low: measure again, for advice, too" * many
        yield f"{'other programs':<18} had {others:.1f} of {document['cpus']} processors meanwhile{but}"
    for advice in document["advice"]:
        yield f"{'advice: ' + advice['about']:<18} {advice['why']}"


def _ms(times: dict[str, float]) -> str:
    names = ("p50", "p99", "p99.9", "max")
    return ", ".join(f"{name} {times[name] * 1e3:.2f} ms" for name in names)
