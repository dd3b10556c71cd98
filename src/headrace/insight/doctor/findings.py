"""Findings: what an examination measured, as plain values. What could not be measured is None, or said.

Rates are per second, times in seconds, sizes in bytes. Shares are 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """What the data are."""

    path: str
    kind: str
    """`folder`, `shards`, `store`, `file` or `object`."""
    format: str
    """Of the samples: `jpeg`, `png`, `npz`, ... ; `mixed` or `bytes` where it is none in particular."""
    samples: int
    exact: bool
    """Whether `samples` were counted; else they are an estimate, or (`at_least`) the fewest there are."""
    at_least: bool = False
    files: int = 0
    folders: int = 0
    nbytes: float = 0.0
    """Of all samples; an estimate from some of them unless they are few."""
    size_p10: float = 0.0
    size_p50: float = 0.0
    size_p90: float = 0.0
    size_max: float = 0.0
    size_mean: float = 0.0
    classes: int = 0
    """0: no labels. A folder's are those of `ImageFolder`."""
    in_place: bool = True
    """Whether each sample can be read alone, where it lies."""
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
    simulated: str = ""
    """What the storage is made to look like; figures are then labelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Random reads with so many in flight."""

    depth: int
    per_s: float
    bytes_per_s: float
    p50_s: float
    p99_s: float
    cpu_s: float
    """Processor time of one read."""
    reads: int
    from_memory: float = 0.0
    """Share of the bytes that the page cache had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRates:
    """Opening and closing files whose names are known."""

    one_per_s: float
    many_per_s: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReads:
    """`open(path).read()` in Python, one after the other: what a worker of torch's does."""

    first_s: float
    """One sample, when it was read for the first time by this examination."""
    first_cpu_s: float
    again_s: float
    """The same sample once more, out of the page cache."""
    again_cpu_s: float
    reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRates:
    """How fast samples come, by how many are asked for at a time."""

    points: tuple[Point, ...]
    """Whole samples, opens included where each is a file; ascending by depth."""
    opened: Point | None = None
    """Whole samples from files that are open already, at the deepest."""
    small: Point | None = None
    """Pieces of 4 KiB from files that are open already, at the same depth."""
    cold: bool = True
    """Whether the device was read, and not the page cache."""
    direct: bool = False
    """Whether reads went past the page cache."""
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Turning bytes into arrays, by one core."""

    format: str
    decoder: str
    """Its name; empty: nothing is decoded, and `why` says why."""
    why: str = ""
    sample_s: float = 0.0
    """Processor time to decode a sample to RGB, and to scale it to `side`."""
    full_s: float = 0.0
    """Without scaling."""
    draft_s: float | None = None
    """With the decoder scaling down itself (JPEG), where it can."""
    native_s: float | None = None
    """By headrace's own decoders, a random crop of `side`; None: they do not decode this."""
    side: int = 0
    out_bytes: float = 0.0
    """Of a sample that is ready for a batch."""
    pixels: float = 0.0
    """Of an image as it is stored, on average."""
    got: float = 1.0
    """Share of its time in which the decoding thread had a processor: others have the rest."""
    samples: int = 0
    failed: int = 0
    first_failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """What the processors do beside decoding."""

    others: float
    """CPUs that other processes wanted meanwhile."""
    fresh_bytes_per_s: float
    """Copying into memory that was never touched."""
    used_bytes_per_s: float
    """Copying into memory that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the machine, its limits and its control group allow."""

    kernel: str = ""
    cpus: float = 1.0
    """Usable: by affinity and by quota."""
    cpus_machine: int = 1
    cpus_affinity: int = 1
    cpu_quota: float | None = None
    memory_bytes: int = 0
    """Of the machine."""
    memory_free_bytes: int = 0
    """What this process may still take, page cache counted as free."""
    memory_limit_bytes: int | None = None
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    nofile_soft: int = 0
    nofile_hard: int = 0
    memlock_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    engine: str = ""
    """`uring` or `threads`."""
    engine_why: str = ""
    pressure: dict[str, float] = field(default_factory=dict)
    """Share of the last ten seconds before the examination in which somebody waited: cpu, memory, io."""
    gpus: tuple[str, ...] = ()
    gpu_why: str = ""
    packages: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """All of it, as far as it came."""

    data: DataSet | None = None
    place: DataPlace | None = None
    resident: float | None = None
    """Share of the data in the page cache; None where nobody can tell."""
    opens: OpenRates | None = None
    storage: StorageRates | None = None
    plain: PlainReads | None = None
    decode: Decode | None = None
    cpu: Cpu | None = None
    environment: Environment | None = None
    seconds: float = 0.0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a loader is expected to deliver, and what holds it back."""

    loader: str
    when: str
    """Empty: as things are now."""
    workers: int
    per_s: float
    low_per_s: float
    high_per_s: float
    cause: str
    """Of `Cause`: what it would wait for, if it were asked for more."""
    stall: float | None = None
    """Share of the training's time that it would wait; None where the step's time is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to do."""

    key: str
    do: str
    because: str
    gain: str
    command: str
    """To be pasted: a shell's line, or lines of a training script."""
    python: bool = False
    """Whether `command` belongs into a script."""
    proof: str = ""
    """A shell's line that tries it, and says what it gained."""
    factor: float = 1.0
    """What the rate is expected to grow by."""
    blocking: bool = False
    """Whether training would fail otherwise."""


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
    advice: tuple[Advice, ...]
    """The first one first; never empty once something was found out."""
