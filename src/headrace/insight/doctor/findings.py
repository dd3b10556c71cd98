"""Findings: what an examination measured, as plain values, and the rate of a data loader that follows. Pure.

What could not be measured is None, or said. Rates are per second, times in seconds, sizes in bytes. Shares are
0 to 1.

A rate is predicted from what one read, one core and one copy take. A loader's workers are customers of two
servers. The storage answers `rate(q)` reads a second with q in flight, as was measured; the processors share
themselves among the workers. A worker of torch's does one thing after the other: it waits for its sample,
decodes it, and copies it into the batch. So with W workers and R samples a second

    R x (processor time, stretched where there are fewer processors than workers)
        + R x (wait for what lies in memory) + (reads in flight that give R)  =  W

whose left side grows with R, straight between measured depths: one R solves it. headrace reads ahead: the
storage works while the workers do, at any depth, and the slower of the two is the rate.

What is left out: the variance of sizes and times, the training process's own load on the processors, and
what a batch's transfer to the device takes. `benchmarks/doctor.py` compares with loaders that run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.base.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Huge:
    """A few samples that are far larger than the others, and weigh as much as many of these."""

    count: int
    of: int  # samples that were looked at
    least: float  # bytes or pixels of the smallest of them
    most: float
    share: float  # of all bytes or pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """What the data are."""

    path: str
    kind: str  # `folder`, `shards`, `store`, `file` or `object`
    format: str
    """Of the samples: `jpeg`, `png`, `npz`, ... ; `mixed` or `bytes` where it is none in particular."""
    samples: int
    exact: bool
    """Whether `samples` were counted; else they are an estimate, or (`at_least`) the fewest there are."""
    at_least: bool = False
    blocks: bool = False
    """Whether `samples` are blocks of bytes: nobody knows how many samples there are."""
    files: int = 0
    files_estimated: bool = False
    folders: int = 0
    nbytes: float = 0.0  # of all samples; an estimate from some of them unless they are few
    size_p10: float = 0.0
    size_p50: float = 0.0
    size_p90: float = 0.0
    size_max: float = 0.0
    size_mean: float = 0.0
    huge: Huge | None = None  # by bytes
    classes: int = 0  # 0: no labels. A folder's are those of `ImageFolder`
    in_place: bool = True  # whether each sample can be read alone, where it lies
    # Of a folder whose files are of several formats: each with its share, the most frequent first.
    formats: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """Where the data lie."""

    mount: str = ""
    file_system: str = ""
    source: str = ""
    options: tuple[str, ...] = ()
    network: bool = False
    rotational: bool | None = None
    device: str = ""
    simulated: str = ""  # what the storage is made to look like; figures are then labelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Random reads with so many in flight."""

    depth: int
    per_s: float
    bytes_per_s: float
    p50_s: float
    p99_s: float
    cpu_s: float  # processor time of one read
    reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRates:
    """Opening and closing files whose names are known."""

    one_per_s: float
    many_per_s: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReads:
    """`open(path).read()` in Python, one after the other: what a worker of torch's does."""

    first_s: float  # one sample, when it was read for the first time by this examination
    first_cpu_s: float
    again_cpu_s: float  # the same sample once more, out of the page cache
    reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRates:
    """How fast samples come, by how many are asked for at a time."""

    points: tuple[Point, ...]
    """Whole samples, opens included where each is a file; ascending by depth."""
    opened: Point | None = None  # whole samples from files that are open already, at the deepest
    small: Point | None = None
    """Pieces of 4 KiB from files that are open already, at the same depth."""
    cold: bool = True  # whether the device was read, and not the page cache
    direct: bool = False  # whether reads went past the page cache
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Turning bytes into arrays, by one core."""

    format: str
    decoder: str  # its name; empty: nothing is decoded, and `why` says why
    why: str = ""
    sample_s: float = 0.0  # mean processor time to decode one to RGB, and to scale it to `side`
    huge: Huge | None = None
    """By pixels: these are not tried, and count in the times of a sample as so many ordinary pixels."""
    native_s: float | None = None
    """By headrace's stage, a random crop of `side`, those that it leaves to Pillow included; None: it does not
    decode this."""
    native_samples: int = 0  # how many it was given
    refused: int = 0  # how many of these it leaves to Pillow
    first_refused: str = ""
    side: int = 0
    out_bytes: float = 0.0  # of a sample that is ready for a batch
    pixels: float = 0.0  # of an image as it is stored, on average
    got: float = 1.0
    """Share of its time in which the decoding thread had a processor: others have the rest."""
    samples: int = 0
    failed: int = 0
    first_failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """What the processors do beside decoding."""

    others: float  # CPUs that other processes wanted meanwhile
    fresh_bytes_per_s: float  # copying into memory that was never touched
    used_bytes_per_s: float  # copying into memory that was


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the machine, its limits and its control group allow."""

    kernel: str = ""
    cpus: float = 1.0  # usable: by affinity and by quota
    cpus_machine: int = 1
    cpus_affinity: int = 1
    cpu_quota: float | None = None
    memory_bytes: int = 0  # of the machine
    memory_free_bytes: int = 0  # what this process may still take, page cache counted as free
    memory_limit_bytes: int | None = None
    swap_used_bytes: int = 0
    nofile_soft: int = 0
    nofile_hard: int = 0
    shm_free_bytes: int | None = None
    engine: str = ""  # `uring` or `threads`; "": nothing was read in time
    engine_why: str = ""
    pressure: dict[str, float] = field(default_factory=dict)
    """Share of the last ten seconds before the examination in which somebody waited: cpu, memory, io."""
    gpus: tuple[str, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """All of it, as far as it came."""

    data: DataSet | None = None
    place: DataPlace | None = None
    resident: float | None = None  # share of the data in the page cache; None where nobody can tell
    opens: OpenRates | None = None
    storage: StorageRates | None = None
    plain: PlainReads | None = None
    decode: Decode | None = None
    cpu: Cpu | None = None
    environment: Environment | None = None
    seconds: float = 0.0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def huge(self) -> tuple[Huge, str] | None:
        """The huge samples, and what they are huge by: `pixels`, where these are known, or `bytes`."""
        if self.decode is not None and self.decode.huge is not None:
            return self.decode.huge, "pixels"
        by_bytes = self.data.huge if self.data is not None else None
        return None if by_bytes is None else (by_bytes, "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a loader is expected to deliver, and what holds it back."""

    loader: str
    when: str  # empty: as things are now
    workers: int
    per_s: float
    low_per_s: float
    high_per_s: float
    cause: str  # of `Cause`: what it would wait for, if it were asked for more
    stall: float | None = None
    """Share of the training's time that it would wait; None where the step's time is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do."""

    key: str
    do: str
    because: str
    gain: str
    command: str  # to be pasted: a shell's line, or lines of a training script
    python: bool = False  # whether `command` belongs into a script
    proof: str = ""  # a shell's line that tries it, and says what it gained
    factor: float = 1.0  # what the rate is expected to grow by
    blocking: bool = False  # whether training would fail otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Findings, what follows, and what to do."""

    findings: Findings
    batch: int
    step_s: float | None
    workers: int
    wanted_per_s: float | None
    expected: tuple[Expected, ...]
    verdict: str
    cause: str
    advice: tuple[Advice, ...]  # the first one first; never empty once something was found out


MODEL_ERROR: Final = 0.6
"""Either way, of nine in ten. On a quiet machine 38 predictions were off by a factor of 1.10 in the middle,
1.49 at the 90th percentile, 1.93 at most (`benchmarks/results/doctor-2026-11-22.json`)."""

_RATE_MAX: Final = 1e9
_NOTHING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Curve:
    """Reads a second by reads in flight: never falling, straight between what was measured, flat behind it."""

    depths: tuple[float, ...]
    rates: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """A curve through (depth, rate); raises ValueError if there is no point, or one is not positive."""
        if not points or not all(0 < value < math.inf for point in points for value in point):
            raise ValueError(f"points are {list(points)!r}, expected positive depths and rates")
        ordered = sorted(points)
        rates = np.maximum.accumulate([rate for _, rate in ordered])
        return cls(tuple(float(d) for d, _ in ordered), tuple(float(r) for r in rates))

    @property
    def most(self) -> float:
        """The rate at the deepest."""
        return self.rates[-1]

    def rate(self, depth: float) -> float:
        """With `depth` in flight; in proportion below the first point."""
        return float(np.interp(depth, (0.0, *self.depths), (0.0, *self.rates)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a sample takes, and who does it."""

    curve: Curve  # samples a second from the device
    cold: float = 1.0  # share of samples that come from the device; the others lie in memory
    wait_factor: float = 1.0  # how much longer a plain read waits than those of the curve
    read_s: float = 0.0  # processor time of opening and reading a sample in Python, out of memory
    cold_read_s: float = 0.0  # the same of one that comes from the device, through the page cache
    ahead_s: float = 0.0  # processor time of headrace's reading a sample from the device
    decode_s: float = 0.0
    collate_s: float = 0.0  # of copying a sample into a new batch
    ahead_collate_s: float = 0.0  # into a recycled one
    cpus: float = 1.0  # that may be used
    others: float = 0.0  # CPUs that others use

    @property
    def torch_cpu_s(self) -> float:
        """Processor time of a sample in a worker of torch's."""
        read_s = self.cold * max(self.cold_read_s, self.read_s) + (1 - self.cold) * self.read_s
        return read_s + self.decode_s + self.collate_s

    @property
    def worker_cpu_s(self) -> float:
        """Processor time of a sample in a worker whose files were read ahead."""
        return self.read_s + self.decode_s + self.ahead_collate_s

    def share_of_cpus(self, wanted: float) -> float:
        """CPUs that so many busy workers get, beside what others want."""
        if wanted <= 0:
            return 0.0
        return min(wanted, self.cpus * wanted / max(self.cpus, wanted + self.others))


def torch_rate(work: Work, workers: int) -> float:
    """Samples a second of torch's DataLoader, if nobody waits with taking them; 0: the training itself."""
    customers, cpu_s = max(1, workers), _stretched_s(work, workers)
    if work.cold < _NOTHING:
        return min(_RATE_MAX, customers / max(1e-9, cpu_s))
    rates = np.array((0.0, *work.curve.rates)) / work.cold
    busy = rates * cpu_s + np.array((0.0, *work.curve.depths)) * work.wait_factor
    return float(np.interp(customers, busy, rates))


def _stretched_s(work: Work, workers: int) -> float:
    """Processor time of a sample in one of torch's workers, stretched where there are fewer processors."""
    customers = max(1, workers)
    return work.torch_cpu_s * customers / work.share_of_cpus(customers)


def torch_shares(work: Work, workers: int) -> dict[Cause, float]:
    """What the workers do with their time at `torch_rate`; for the rest of it they wait for the storage."""
    part = torch_rate(work, workers) * _stretched_s(work, workers) / max(1, workers)
    read_s = work.torch_cpu_s - work.decode_s - work.collate_s
    parts = zip(_OF_WORKERS, (work.decode_s, work.collate_s, read_s), strict=True)
    return {cause: part * seconds / max(1e-12, work.torch_cpu_s) for cause, seconds in parts}


def ahead_rate(work: Work, workers: int) -> float:
    """Samples a second of headrace's DataLoader with the same workers, if nobody waits with taking them.

    The readers want processor time too: all of it together must fit into what there is.
    """
    customers = max(1, workers)
    by_workers = work.share_of_cpus(customers) / max(1e-9, work.worker_cpu_s)
    total_s = work.worker_cpu_s + work.cold * work.ahead_s
    threads = customers + (1.0 if work.cold > 0 else 0.0)
    by_cpus = work.share_of_cpus(max(threads, work.cpus)) / max(1e-9, total_s)
    by_storage = work.curve.most / work.cold if work.cold > 0 else _RATE_MAX
    return max(min(by_workers, by_cpus, by_storage), min(by_storage, torch_rate(work, workers)))


def native_work(work: Work, native_s: float) -> Work:
    """With threads that decode without the interpreter, into memory that is used again."""
    return replace(work, decode_s=native_s, read_s=0.0, ahead_collate_s=0.0)


def stall_of(rate: float, wanted: float, *, in_turn: bool = False) -> float:
    """Share of the training's time that it waits; `in_turn`: loading and training take turns."""
    if rate <= 0:
        return 1.0
    if in_turn:
        return wanted / (wanted + rate)
    return max(0.0, 1.0 - rate / wanted)


# -- predict -----------------------------------------------------------------------------------------

TORCH: Final = "torch DataLoader"
AHEAD: Final = "headrace.torch.DataLoader"
NATIVE: Final = 'the same, decode="native"'
LATER: Final = "later epochs"  # from memory, where the data will lie then
UNCACHED: Final = "uncached"  # from the device, though the data lie in memory now
_SAMPLE_S: Final = 8e-6
"""Processor time of torch's own code for a sample: the data set's `__getitem__`, lists, the fetcher."""

_FEW_READS: Final = 30
_FEW_ERROR: Final = 1.0
_MEMORY_SHARE: Final = 0.7
"""Of free memory: a data set that is larger pushes itself out of the page cache."""


def work_of(findings: Findings) -> Work | None:
    """What a sample takes; None where the storage was not measured."""
    storage, plain, decode, cpu = findings.storage, findings.plain, findings.decode, findings.cpu
    if storage is None or not storage.points:
        return None
    curve = Curve.through([(float(p.depth), p.per_s) for p in storage.points])
    first = storage.points[0]
    read_s = plain.again_cpu_s if plain is not None else 0.0
    cold_read_s = max(read_s, plain.first_cpu_s if plain is not None else 0.0)
    out_bytes = decode.out_bytes if decode is not None else 0.0
    environment = findings.environment
    return Work(
        curve=curve, cold=1.0 - (findings.resident or 0.0), wait_factor=_wait_factor(findings),
        read_s=read_s + _SAMPLE_S, cold_read_s=cold_read_s + _SAMPLE_S,
        ahead_s=min(storage.points[-1].cpu_s, first.cpu_s) if storage.cold else 0.0,
        decode_s=decode.sample_s if decode is not None else 0.0,
        collate_s=out_bytes / cpu.fresh_bytes_per_s if cpu is not None else 0.0,
        ahead_collate_s=out_bytes / cpu.used_bytes_per_s if cpu is not None else 0.0,
        cpus=environment.cpus if environment is not None else 1.0,
        others=cpu.others if cpu is not None else 0.0,
    )  # fmt: skip


def _wait_factor(findings: Findings) -> float:
    """Plain reads wait longer than direct ones where they go to the device in several requests."""
    plain, storage = findings.plain, findings.storage
    if plain is None or storage is None or not storage.cold or (findings.resident or 0.0) > 0.1:
        return 1.0
    point = storage.points[0]
    if point.depth != 1 or plain.reads < 8:
        return 1.0
    plain_wait_s = plain.first_s - plain.first_cpu_s
    wait_s = 1.0 / point.per_s
    return min(2.0, max(0.5, plain_wait_s / wait_s))


def expected_of(
    findings: Findings, workers: int, wanted_per_s: float | None
) -> tuple[Expected, ...]:
    """The loaders as things are now; from memory, if the data will lie there; from the device, if they do."""
    work = work_of(findings)
    if work is None:
        return ()
    scenes = {"": work}
    data, environment = findings.data, findings.environment
    free_bytes = environment.memory_free_bytes if environment is not None else 0
    fits = data is not None and 0 < data.nbytes < _MEMORY_SHARE * free_bytes
    if work.cold > 0.1 and fits:
        scenes[LATER] = replace(work, cold=0.0)
    if work.cold < 0.9 and findings.storage is not None and findings.storage.cold:
        scenes[UNCACHED] = replace(work, cold=1.0)
    assert findings.storage is not None
    few = min(point.reads for point in findings.storage.points) < _FEW_READS
    error = _FEW_ERROR if few else MODEL_ERROR
    native_s = findings.decode.native_s if findings.decode is not None else None
    counts = {TORCH: workers, AHEAD: workers}
    if native_s is not None:
        counts[NATIVE] = max(1, int(work.cpus))  # its threads, whatever the workers

    def of(loader: str, when: str, work: Work) -> Expected:
        if loader == NATIVE and native_s is not None:
            work = native_work(work, native_s)
        rate = (torch_rate if loader == TORCH else ahead_rate)(work, counts[loader])
        in_turn = workers == 0 and loader == TORCH
        stall = None if wanted_per_s is None else stall_of(rate, wanted_per_s, in_turn=in_turn)
        return Expected(
            loader=loader, when=when, workers=counts[loader], per_s=rate,
            low_per_s=rate / (1 + error), high_per_s=rate * (1 + error),
            cause=_cause(findings, work, loader, counts[loader], rate), stall=stall,
        )  # fmt: skip

    return tuple(of(loader, when, work) for when, work in scenes.items() for loader in counts)


_OF_WORKERS: Final = (Cause.DECODE, Cause.COLLATE, Cause.PYTHON)


def _cause(findings: Findings, work: Work, loader: str, workers: int, rate: float) -> str:
    if loader == TORCH:
        parts = torch_shares(work, workers)
        wait = 1.0 - sum(parts.values())
        if wait >= 0.5 or (work.cold > 0 and wait > max(parts.values())):
            return storage_cause(findings, wait * max(1, workers) / work.wait_factor)
    else:
        read_s = work.read_s + work.cold * work.ahead_s
        parts = dict(zip(_OF_WORKERS, (work.decode_s, work.ahead_collate_s, read_s), strict=True))
        if work.cold > 0 and rate >= 0.98 * work.curve.most / work.cold:
            return storage_cause(findings, work.curve.depths[-1])
    return max(parts, key=lambda cause: parts[cause]).value


def storage_cause(findings: Findings, depth: float) -> str:
    """Why the storage is slow, with so many reads in flight: opens, bytes, or each answer.

    OpenRates: what is left when files are open already. Bytes: what is left when only 4 KiB are read, of
    importance only where more reads in flight bring no more.
    """
    storage, data = findings.storage, findings.data
    assert storage is not None
    if data is not None and data.kind == "object":
        return Cause.NETWORK.value
    if metadata_share(findings) > 0.5:
        return Cause.METADATA.value
    curve = Curve.through([(float(p.depth), p.per_s) for p in storage.points])
    full = curve.rate(max(1.0, depth)) >= 0.7 * curve.most
    opened, small = storage.opened, storage.small
    if full and opened is not None and small is not None and opened.per_s < small.per_s / 2:
        return Cause.BANDWIDTH.value
    return Cause.LATENCY.value


def metadata_share(findings: Findings) -> float:
    """Share of a read's time that looking up and opening take.

    By how long an open takes, and by how much faster files are read that are open: a look-up may cost more
    than the open that follows it.
    """
    storage, opens = findings.storage, findings.opens
    if storage is None or opens is None or not storage.points:
        return 0.0
    first = storage.points[0]
    shares = [first.per_s / max(1, first.depth) / opens.one_per_s]
    if storage.opened is not None:
        same = [p.per_s for p in storage.points if p.depth == storage.opened.depth]
        shares += [1.0 - rate / storage.opened.per_s for rate in same]
    return min(1.0, max(0.0, *shares))
