"""What if: how long a job's steps would take, and how long they would wait, on other machines: a formula.

A step takes as long as the slowest of what it needs: computing; each training process's reader; the link, the
servers and the processors that many share. torch's workers read and decode one sample after the other.
headrace's reader has many reads in flight over the batches ahead; the workers decode. Reads are drawn, from
recorded times or a storage's figures, so that tails count: a process evens them out over the batches that it is
ahead, and processes begin each step together: the slowest one's time is everybody's. Draws are by seed.

Decision 20 holds the formula against runs, and against the simulation of every step that stood here before.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import RecordError
from headrace.insight.record.rhythm import rhythm_of_traces
from headrace.io.simulation import PRESETS, Simulation
from headrace.machine.host import is_network
from headrace.trace.recorded import TrainingSteps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.trace import Run
    from headrace.trace.recorded import Recorded

Loader = Literal["torch", "headrace"]
_Floats = NDArray[np.float64]


# -- the job -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobFigures(TrainingSteps):
    """What is known of a job: of its steps' times and its samples' decoding one figure, or many.

    Raises ValueError if there is nothing to predict from.
    """

    sample_bytes: NDArray[np.int64]
    """int64 (reads,): of the samples in the order in which they are read."""
    opens: bool  # whether each sample's file is opened for it
    prefetch: int = 2  # batches that each worker is given ahead
    processors: int = 1  # of the node

    def __post_init__(self) -> None:
        if not len(self.sample_bytes):
            raise ValueError("the job has no samples")
        if not len(self.compute_s):
            raise ValueError("the job's computing time is not known: set train.computation_time")
        if self.batch < 1:
            raise ValueError("the job's batch is not known: set reader.batch_size")


def figures_of(recorded: Recorded) -> JobFigures:
    """The figures of a record; raises ValueError if its batch or its computing time is not known."""
    opens = bool((recorded.open_s > 0).mean() > 0.5) if len(recorded.open_s) else True
    return JobFigures(
        sample_bytes=recorded.sample_bytes[recorded.order], opens=opens,
        processors=recorded.processors, **recorded.step_figures,
    )  # fmt: skip


def figures_of_run(run: Run) -> tuple[JobFigures, Storage | None]:
    """The figures of a traced run (`trace=`, `HEADRACE_TRACE`), and its storage; None: no read was counted.

    Raises ValueError if the run has too few steps.
    """
    rhythm = rhythm_of_traces(run.ranks)
    if rhythm is None:
        raise ValueError(
            f"{run.path}: the run has no two steps to predict from: give one of several steps, traced with "
            "HEADRACE_TRACE=DIR or recorded with `headrace record`"
        )
    one = max(run.ranks, key=lambda trace: len(trace.steps))
    samples = np.maximum(one.steps["samples"].astype(np.int64), 1)
    nbytes = one.steps["bytes"].sum(axis=1).astype(np.int64)
    hosts = len({trace.host for trace in run.ranks if len(trace.steps) > 1})
    figures = JobFigures(
        sample_bytes=np.maximum(np.repeat(nbytes // samples, samples), 1), opens=False,
        processors=len(os.sched_getaffinity(0)),
        **rhythm.step_figures | {"ranks": max(1, rhythm.ranks // hosts)},
    )  # fmt: skip
    reads, read_s = one.steps["reads"], one.steps["read_s"]
    some = (reads > 0) & (read_s > 0)
    if not some.any():
        return figures, None
    # Each read as long as those of a step were on average.
    return figures, Storage(
        name="as recorded", figures=Simulation(name="recorded"),
        read_s=(read_s[some] / reads[some]).astype(np.float32),
        read_bytes=np.maximum(nbytes[some] // reads[some], 1).astype(np.int64),
    )  # fmt: skip


# -- the storage -------------------------------------------------------------------------------------

_DOCUMENT_BYTES_MAX: Final = 4 << 20
_P99_SIGMAS: Final = 2.326  # standard deviations above the median of a normal distribution
_TAIL_MAX: Final = 100.0
_OPEN_MIN_S: Final = 5e-6
_PARALLELISM_MAX: Final = 4096
Shared = Literal["all", "servers", "none"]
"""What nodes share: link and servers, the servers alone, or nothing. A local disk is one for each."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What opening a file and reading its bytes cost."""

    name: str
    figures: Simulation  # latencies, link, servers
    shared: Shared = "none"  # by nodes
    open_s: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32: recorded times to draw opens from, instead of the figures."""
    read_s: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32: recorded times of reads."""
    read_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64: how many bytes each of these had."""
    request_bytes: int = 1 << 20
    """The largest request; sequential reads come in such, thanks to read-ahead."""

    def slower(self, factor: float) -> Storage:
        """The same, busier: everything but its link takes `factor` times as long.

        Raises ValueError if the factor makes no sense.
        """
        if not 1e-6 <= factor <= 1e6:
            raise ValueError(f"latency is {factor} times as long, expected more than 0")
        names, times = ("open_s", "open_p99_s", "latency_s", "latency_p99_s"), np.float32(factor)
        changed = {name: getattr(self.figures, name) * factor for name in names}
        return replace(
            self, figures=replace(self.figures, **changed),
            open_s=self.open_s * times, read_s=self.read_s * times,
        )  # fmt: skip


STORAGES: Mapping[str, Storage] = {
    # The page cache: a copy at memory's speed; the open is a look-up.
    "memory": Storage(name="memory", figures=Simulation(
        name="memory", open_s=10e-6, latency_s=5e-6, stream_bytes_per_s=8e9,
    )),
    # A data-centre NVMe drive: 4 KiB at random take 90 us, a tail of half a millisecond; 3 GB/s. Its
    # inodes are cached or come with one such read.
    "ssd": Storage(name="ssd", figures=Simulation(
        name="ssd", latency_s=90e-6, latency_p99_s=500e-6, open_s=30e-6, open_p99_s=300e-6,
        bandwidth_bytes_per_s=3e9, parallelism=64,
    )),
    "hdd": Storage(name="hdd", figures=PRESETS["hdd"]),
    # One server for all nodes.
    "nfs": Storage(name="nfs", figures=PRESETS["nfs"], shared="all"),
    # Each client has its network port; metadata and object servers are everyone's.
    "lustre": Storage(name="lustre", figures=PRESETS["lustre"], shared="servers"),
    "s3": Storage(name="s3", figures=PRESETS["s3"], shared="servers"),
}  # fmt: skip
"""By name."""


def storage_of(given: str) -> Storage:
    """A storage by its name in `STORAGES`, or by a JSON file.

    The file is one that `headrace bench storage DIR --json` or `headrace doctor DATA --json` printed.

    Raises ValueError if there is no such name, and RecordError if the file cannot be read, or is no such
    document.
    """
    if given in STORAGES:
        return STORAGES[given]
    path = Path(given)
    if path.suffix != ".json" and not path.is_file():
        raise ValueError(
            f"storage is {given!r}, expected one of {', '.join(sorted(STORAGES))}, or a JSON file "
            "that `headrace bench storage DIR --json` or `headrace doctor DATA --json` printed"
        )
    try:
        with path.open("rb") as f:
            document = json.loads(f.read(_DOCUMENT_BYTES_MAX))
        if isinstance(document, dict) and "findings" in document:
            return _examined(path.stem, document["findings"])
        if isinstance(document, dict) and "latency_s" in document:
            return _measured(path.stem, document)
        wrong = "neither of the two commands below printed it"
    except OSError as e:
        raise RecordError(f"{path} cannot be read: {e.strerror}.", path=str(path)) from e
    except json.JSONDecodeError as e:
        wrong = f"it is no JSON ({e.msg} in line {e.lineno})"
    except KeyError as e:
        wrong = f"{e} is missing"
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        wrong = str(e)
    raise RecordError(
        f"{path} is no measured storage: {wrong}.", path=str(path),
        next_step="Measure one: headrace bench storage DIR --json > FILE.json, or without writing "
        "there: headrace doctor DATA --json > FILE.json",
    )  # fmt: skip


def _measured(name: str, document: Mapping[str, Any]) -> Storage:
    """From rates by depth and block, single reads' latencies, and files of 100 KiB at depth 16."""
    latency = document["latency_s"]
    cells = [(c["block_bytes"], c["depth"], c["bytes_per_s"]) for c in document["random"]]
    link = max([c[2] for c in cells] + list(document["sequential"]["read_bytes_per_s"].values()))
    # Little's law: what is served at a time is the rate times how long each takes.
    block, _, rate = max((c for c in cells if c[0] <= 4 << 10), key=lambda c: c[2])
    median_s = float(latency["p50"])
    servers = max(1, round(rate / block * median_s))
    batches = document["batches"]
    depth, sample = batches["reads_in_flight"], batches["sample_bytes"]
    per_file = min(depth, servers) / batches["files"]["per_s"]
    per_sample = min(depth, servers) / batches["packed"]["per_s"]
    # Of one request, from the largest blocks one at a time; 0: the link is the limit.
    largest, _, single = max((c for c in cells if c[1] == 1), key=lambda c: c[0])
    stream_s = largest / single - median_s
    stream = largest / stream_s if stream_s > 0 else 0.0
    mount = document.get("provenance", {}).get("mount", {})
    network = is_network(str(mount.get("type", "")), str(mount.get("source", "")))
    figures = Simulation(
        name=name, latency_s=median_s, latency_p99_s=float(latency["p99"]),
        open_s=max(_OPEN_MIN_S, per_file - per_sample), bandwidth_bytes_per_s=link,
        stream_bytes_per_s=stream, parallelism=min(servers, _PARALLELISM_MAX),
    )  # fmt: skip
    if not all(map(math.isfinite, (link, stream, per_file, sample))):
        raise ValueError("a rate is not finite")
    return Storage(name=name, figures=figures, shared="all" if network else "none")


def _examined(name: str, document: Mapping[str, Any]) -> Storage:
    """From the doctor's findings: whole samples at random with 1, 4, 16 and 64 asked for at a time.

    One at a time says how long it takes; opening, and the pieces of 4 KiB beside whole samples of open files,
    say which part of that is the open's, the answer's and the bytes'; the largest rate says how many are
    served at a time.
    """
    storage = document["storage"]
    if not isinstance(storage, dict) or not storage["points"]:
        raise ValueError("the doctor measured no storage: give it more --seconds")
    if storage["cold"] is not True:
        raise ValueError("the doctor read from memory only: what the storage takes is not known")
    points = sorted(storage["points"], key=lambda point: _real(point["depth"]))
    first = points[0]
    mean_bytes = _real(first["bytes_per_s"]) / _real(first["per_s"])
    whole_s = _real(first["depth"]) / _real(first["per_s"])
    opens, opened, small = document["opens"], storage["opened"], storage["small"]
    open_s = min(1.0 / _real(opens["one_per_s"]), 0.95 * whole_s) if opens else 0.0
    bytes_share = 0.0
    if opened and small:
        bytes_share = min(0.95, max(0.0, 1.0 - _real(opened["per_s"]) / _real(small["per_s"])))
    bytes_s = (whole_s - open_s) * bytes_share
    # The mean is what was measured; draws are around the median, which a long tail leaves below it.
    tail = min(_TAIL_MAX, max(1.0, _real(first["p99_s"]) / _real(first["p50_s"])))
    sigma = math.log(tail) / _P99_SIGMAS
    latency_s = (whole_s - open_s - bytes_s) / math.exp(sigma * sigma / 2)
    most = max(_real(point["per_s"]) for point in points)
    link = max(_real(point["bytes_per_s"]) for point in [*points, *([opened] if opened else [])])
    figures = Simulation(
        name=name, latency_s=latency_s, latency_p99_s=latency_s * tail,
        open_s=max(_OPEN_MIN_S, open_s), bandwidth_bytes_per_s=link,
        stream_bytes_per_s=mean_bytes / bytes_s if bytes_s > 0 else 0.0,
        parallelism=min(_PARALLELISM_MAX, max(1, round(most * whole_s))),
    )  # fmt: skip
    shared: Shared = "all" if document["place"]["network"] is True else "none"
    if document["data"]["kind"] == "object":
        shared = "servers"
    return Storage(name=name, figures=figures, shared=shared)


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} is not above 0")
    return float(value)


def recorded_storage(recorded: Recorded) -> Storage:
    """The storage of a record: each open and read takes as long as one that was recorded.

    Raises ValueError if the record has no times.
    """
    if not len(recorded.read_s):
        raise ValueError("the record has no times of reads: name a storage")
    opens = recorded.open_s[recorded.open_s > 0]
    return Storage(
        name="as recorded", figures=Simulation(name="recorded"), open_s=opens,
        read_s=recorded.read_s, read_bytes=recorded.sample_bytes[recorded.order],
    )  # fmt: skip


# -- scenarios and predictions -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the job would run on; raises ValueError if a value makes no sense."""

    storage: Storage
    nodes: int  # with as many training processes each as the job has
    batch: int  # of a training process; its computing time grows with it
    workers: int
    gpu_speed: float  # how much faster a step computes
    processors: int  # of a node
    loader: Loader = "torch"
    """What reads: torch's workers, one sample after the other, or headrace's reader."""
    reads_in_flight: int = 16  # of headrace's reader, for each training process
    ahead: int = 4  # batches that headrace reads ahead

    def __post_init__(self) -> None:
        for name in ("nodes", "batch", "workers", "processors", "reads_in_flight", "ahead"):
            value, least = getattr(self, name), int(name != "workers")
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if not 1e-6 <= self.gpu_speed <= 1e6:
            raise ValueError(f"gpu_speed is {self.gpu_speed}, expected more than 0")
        if self.loader not in {"torch", "headrace"}:
            raise ValueError(f"loader is {self.loader!r}, expected torch or headrace")


_FULL: Final = 0.9
_MOSTLY: Final = 0.5
_NO_STALL: Final = 0.02
_GROWS: Final = ("computing time is taken to grow with the batch",)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What would be."""

    scenario: Scenario
    step_s: float  # of a step, on average, once it runs
    step_spread_s: float  # half the range over several seeds
    wait_s: float  # of it for data
    stall: float
    samples_per_s: float
    bytes_per_s: float
    bound: str
    """Compute, link, servers, processors, workers or latency: what a faster one of would help most."""
    busy: dict[str, float]  # how much each resource works, 0 to 1
    notes: tuple[str, ...] = ()  # what was simplified

    def document(self) -> dict[str, Any]:
        """As JSON."""
        names = ("nodes", "batch", "workers", "gpu_speed", "processors", "loader")
        asked = {name: getattr(self.scenario, name) for name in names}
        figures = {name: value for name, value in vars(self).items() if name != "scenario"}
        return {"storage": self.scenario.storage.name, **asked, **figures}


@dataclass(frozen=True, slots=True)
class Check:
    """The model on the record itself: `error` is a share of the recorded time, `stall_points` are of 100."""

    predicted_s: float
    recorded_s: float
    error: float
    stall_points: float


def scenario_as_recorded(job: JobFigures, storage: Storage, loader: Loader = "torch") -> Scenario:
    """The job as it was, on a storage."""
    return Scenario(
        storage=storage, nodes=1, batch=job.batch, workers=job.workers, gpu_speed=1.0,
        processors=job.processors, loader=loader,
    )  # fmt: skip


def check_of(job: JobFigures, storage: Storage, loader: Loader = "torch") -> Check | None:
    """Predict the record from itself, on its `recorded_storage`; None: it has no recorded step times."""
    if job.step_s is None or job.stall is None:
        return None
    step = predict(job, scenario_as_recorded(job, storage, loader))
    error, points = step.step_s / job.step_s - 1, 100 * (step.stall - job.stall)
    return Check(step.step_s, job.step_s, error, points)


def predict(job: JobFigures, scenario: Scenario, seed: int = 0) -> Prediction:
    """Predict a scenario."""
    runs = [_steps(job, scenario, seed + i) for i in range(_SEEDS)]
    times = [run.step_s for run in runs]
    step_s, wait_s = float(np.mean(times)), float(np.mean([run.wait_s for run in runs]))
    busy = {key: float(np.mean([run.busy[key] for run in runs])) for key in runs[0].busy}
    samples_per_s = scenario.nodes * job.ranks * scenario.batch / step_s
    # What a worker does not decode, it waits for reads.
    bound = "workers" if busy["workers"] >= _MOSTLY else "latency"
    fullest = max(("link", "servers", "processors"), key=lambda name: busy[name])
    if wait_s / step_s < _NO_STALL:
        bound = "compute"
    elif busy[fullest] >= _FULL:
        bound = fullest
    return Prediction(
        scenario=scenario, step_s=step_s, step_spread_s=(max(times) - min(times)) / 2,
        wait_s=wait_s, stall=wait_s / step_s, samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * float(job.sample_bytes.mean()), bound=bound, busy=busy,
        notes=_GROWS if scenario.batch != job.batch else (),
    )  # fmt: skip


# -- the formula -------------------------------------------------------------------------------------

_DRAWS_MOST: Final = 400_000
_CELLS_MOST: Final = 4 << 20  # batches of processes at once, on however many nodes: 200 MB
_SEEDS: Final = 3
_STRETCHES: Final = 3
"""A process of torch's lags behind the others for about so many times as long as it is ahead."""


class _Steps(NamedTuple):
    """Steps on average, in seconds: all of one, of it waited for data; and how much each resource works."""

    step_s: float
    wait_s: float
    busy: dict[str, float]


def _steps(job: JobFigures, scenario: Scenario, seed: int) -> _Steps:
    random = np.random.default_rng(seed)
    storage, f = scenario.storage, scenario.storage.figures
    by_headrace = scenario.loader == "headrace"
    ranks, scale = scenario.nodes * job.ranks, scenario.batch / job.batch
    # Batches that stand for all.
    parts = 3 + min(32, float(job.sample_bytes.mean()) / storage.request_bytes)
    count = int(np.clip(_DRAWS_MOST // _SEEDS // (scenario.batch * parts), 32, 4096))
    at = np.arange(count * scenario.batch).reshape(count, scenario.batch)
    nbytes = job.sample_bytes[at % len(job.sample_bytes)]
    # headrace's reader looks at a file, then opens it.
    read_s = _read_s(storage, random, nbytes, opens=job.opens * (2 if by_headrace else 1))
    decode_s = _one_of(random, job.decode_s, nbytes.shape).sum(axis=1) + job.collate_s * scale
    # What a step takes of resources that several processes share, each if it were alone.
    of_link = ranks if storage.shared == "all" else job.ranks
    of_servers = ranks if storage.shared != "none" else job.ranks
    per_step = {
        "link": of_link * float(nbytes.sum(axis=1).mean()) / (f.bandwidth_bytes_per_s or np.inf),
        "servers": of_servers * float(read_s.sum(axis=1).mean()) / (f.parallelism or np.inf),
        "processors": job.ranks * float(decode_s.mean()) / scenario.processors,
    }
    common_s = max(per_step.values())
    # Within a stretch of steps slow batches are made up for by quick ones: (stretches, steps, ranks).
    ahead = scenario.ahead if by_headrace else scenario.workers * job.prefetch
    stretch = max(1, ahead * (1 if by_headrace else _STRETCHES))
    # Of so many processes that they do not fit the slowest is hardly slower than of those that do.
    drawn_ranks = min(ranks, max(1, _CELLS_MOST // stretch))
    stretches = max(64, _DRAWS_MOST // 100 // stretch // ranks)
    shape = min(stretches, max(1, _CELLS_MOST // (stretch * drawn_ranks))), stretch, drawn_ranks
    compute_s = _one_of(random, job.compute_s * scale / scenario.gpu_speed, shape)
    drawn = random.integers(0, count, shape)
    if ahead:
        hand_s = 0.0 if by_headrace else job.hand_s
        own_s = _own_s(job, scenario, read_s, decode_s, drawn)
        slowest_s = own_s.max(axis=1)
        together_s = compute_s.max(axis=2).mean(axis=1) + hand_s
        step_s = np.maximum(np.maximum(together_s, slowest_s), common_s)
        # Who is not the slowest has its batches by the time that the slowest one's is there.
        needed_s = np.maximum(np.where(own_s == slowest_s[:, None], own_s, 0.0), common_s)
        wait_s = np.maximum(hand_s, needed_s - compute_s.mean(axis=1))
    else:  # reading and computing take turns
        wait_s = np.maximum((read_s.sum(axis=1) + decode_s)[drawn], common_s)
        step_s = (wait_s + compute_s).max(axis=2)
    mean_s = float(step_s.mean())
    busy = {name: min(1.0, seconds / mean_s) for name, seconds in per_step.items()}
    busy["workers"] = float(decode_s.mean()) / max(1, scenario.workers) / mean_s
    busy["compute"] = float(compute_s.max(axis=2).mean()) / mean_s
    return _Steps(mean_s, float(wait_s.mean()), busy)


def _own_s(
    job: JobFigures, scenario: Scenario, read_s: _Floats, decode_s: _Floats, drawn: Any
) -> Any:
    """What each process's own reader takes for a batch, on average over a stretch, shape (stretches, ranks)."""
    all_s, workers = read_s.sum(axis=1), scenario.workers
    if scenario.loader == "torch":
        made_s = (all_s + decode_s)[drawn] / workers
        # Batches come in order: half of what the slowest worker is behind the others by, all wait.
        by_worker = made_s.reshape(len(made_s), -1, job.prefetch, workers, made_s.shape[2])
        return (made_s.mean(axis=1) + by_worker.mean(axis=2).max(axis=2).mean(axis=1)) / 2
    flights, longest_s = scenario.reads_in_flight, read_s.max(axis=1)
    before_s = (all_s - longest_s) / flights * max(0.0, 1.0 - flights / scenario.batch)
    last_s = before_s + longest_s + decode_s / min(max(1, workers), scenario.processors)
    # A batch is asked for so many steps ahead: these steps take as long as the slowest of them.
    return np.maximum(
        all_s[drawn].mean(axis=1) / flights, last_s[drawn].max(axis=1) / scenario.ahead
    )


def _one_of(random: np.random.Generator, values: NDArray[Any], shape: tuple[int, ...]) -> _Floats:
    """One of some values each; 0 where there are none."""
    if not len(values):
        return np.zeros(shape)
    return values[random.integers(0, len(values), shape)].astype(float)


def _lognormal(
    random: np.random.Generator, median_s: float, p99_s: float, shape: tuple[int, ...]
) -> _Floats:
    sigma = np.log(p99_s / median_s) / _P99_SIGMAS if p99_s > median_s > 0 else 0.0
    return median_s * np.exp(sigma * random.standard_normal(shape))


def _read_s(
    storage: Storage, random: np.random.Generator, nbytes: NDArray[np.int64], *, opens: int
) -> _Floats:
    """What each sample takes if nobody else reads: opens, and requests one after the other."""
    f, read_s = storage.figures, np.zeros(nbytes.shape)
    if len(storage.read_s):  # as long as a recorded read of about as many bytes
        order = np.argsort(storage.read_bytes, kind="stable")
        known, seconds = storage.read_bytes[order], storage.read_s[order].astype(float)
        near = max(1, len(order) // 32)
        at = np.searchsorted(known, nbytes) - near // 2 + random.integers(0, near, nbytes.shape)
        at = np.clip(at, 0, len(order) - 1)
        scale = nbytes / np.maximum(1, known[at])
        read_s += seconds[at] * np.where(scale > 2, scale, 1.0)
    else:
        requests = np.maximum(1, -(-nbytes // storage.request_bytes)).ravel()
        latency_s = _lognormal(random, f.latency_s, f.latency_p99_s, (int(requests.sum()),))
        firsts = np.cumsum(requests) - requests
        slowest = min(f.bandwidth_bytes_per_s or np.inf, f.stream_bytes_per_s or np.inf)
        read_s += np.add.reduceat(latency_s, firsts).reshape(nbytes.shape) + nbytes / slowest
    for _ in range(opens):
        if len(storage.read_s) or len(storage.open_s):
            read_s += _one_of(random, storage.open_s, nbytes.shape)
        else:
            read_s += _lognormal(random, f.open_s, f.open_p99_s, nbytes.shape)
    return read_s
