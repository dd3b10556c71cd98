"""Model: a job, one scenario's steps and stall, how much the draws spread, and the error on the record itself.

Each worker of torch's has up to `prefetch` batches, reads and decodes one sample after the other, and batches
are taken in turn. headrace's reader has many reads in flight over the batches ahead, each of a file that was
looked at before; the workers decode. A batch is ready when whoever reads it has done so, and when link, servers
and processors have let the batches before it and itself pass: what many share is a rate, not a queue of single
requests. Training processes begin each step together. The same seed gives the same result.

Held against a simulation of every request in 288 cases: step times differ by 0.1 % in the middle and 7 % at
most, and 99 % have the same bound. Which rank waits where several share a full resource is less sure: the stall
differs by 16 points or more in one case of ten.
"""

from __future__ import annotations

import heapq
import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.insight.record.rhythm import rhythm_of_traces
from headrace.insight.whatif.storage import P99_SIGMAS, Storage
from headrace.io.simulation import Simulation

if TYPE_CHECKING:
    from headrace.trace import Run
    from headrace.trace.recorded import Recorded

Loader = Literal["torch", "headrace"]
_Floats = NDArray[np.float64]


def _none() -> _Floats:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """What is known of a job.

    Attributes:
        sample_bytes: int64 (reads,): of the samples in the order in which they are read.
        opens: whether each sample's file is opened for it.
        batch: samples of a step of a training process.
        workers: processes that read for each; 0: it reads by itself.
        prefetch: batches that each worker is given ahead.
        compute_s: float64: of a step with `batch` samples; one or many.
        decode_s: float64: of a sample; one or many; empty: none.
        collate_s: of a batch, besides its samples.
        hand_s: from a batch's arrival until training has its tensors; it counts as waiting.
        wait_s: float64 (steps,): recorded; empty: not known.

    Raises:
        ValueError: there is nothing to predict from.
    """

    sample_bytes: NDArray[np.int64]
    opens: bool
    batch: int
    workers: int
    prefetch: int = 2
    ranks: int = 1
    processors: int = 1
    compute_s: _Floats
    decode_s: _Floats = field(default_factory=_none)
    collate_s: float = 0.0
    hand_s: float = 0.0
    wait_s: _Floats = field(default_factory=_none)

    def __post_init__(self) -> None:
        if not len(self.sample_bytes):
            raise ValueError("the job has no samples")
        if not len(self.compute_s):
            raise ValueError("the job's computing time is not known: set train.computation_time")
        if self.batch < 1:
            raise ValueError("the job's batch is not known: set reader.batch_size")

    @property
    def step_s(self) -> float | None:
        """Of a step as it was recorded."""
        return float(self.compute_s.mean() + self.wait_s.mean()) if len(self.wait_s) else None

    @property
    def stall(self) -> float | None:
        """Share of time that was waited, as recorded."""
        return float(self.wait_s.mean()) / self.step_s if self.step_s else None


def figures_of(recorded: Recorded) -> JobFigures:
    """The figures of a record.

    Raises:
        ValueError: its batch or its computing time is not known.
    """
    opens = bool((recorded.open_s > 0).mean() > 0.5) if len(recorded.open_s) else True
    return JobFigures(
        sample_bytes=recorded.sample_bytes[recorded.order], opens=opens, batch=recorded.batch,
        workers=recorded.workers, ranks=recorded.ranks, processors=recorded.processors,
        compute_s=recorded.compute_s.astype(float), decode_s=recorded.decode_s.astype(float),
        collate_s=recorded.collate_s, hand_s=recorded.hand_s, wait_s=recorded.wait_s.astype(float),
    )  # fmt: skip


def figures_of_run(run: Run) -> tuple[JobFigures, Storage | None]:
    """The figures of a traced run (`trace=`, `HEADRACE_TRACE`), and its storage: files are not known.

    Returns:
        The storage is None where no read was counted.

    Raises:
        ValueError: the run has too few steps.
    """
    rhythm = rhythm_of_traces(run.ranks)
    if rhythm is None:
        raise ValueError(f"{run.path}: the run has no two steps: there is nothing to predict from")
    one = max(run.ranks, key=lambda trace: len(trace.steps))
    samples = np.maximum(one.steps["samples"].astype(np.int64), 1)
    nbytes = one.steps["bytes"].sum(axis=1).astype(np.int64)
    hosts = len({trace.host for trace in run.ranks if len(trace.steps) > 1})
    figures = JobFigures(
        sample_bytes=np.maximum(np.repeat(nbytes // samples, samples), 1), opens=False,
        batch=rhythm.batch, workers=0, ranks=max(1, rhythm.ranks // hosts),
        processors=len(os.sched_getaffinity(0)), compute_s=rhythm.compute_s, wait_s=rhythm.wait_s,
        decode_s=rhythm.decode_s,
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


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the job would run on.

    Attributes:
        nodes: with as many training processes each as the job has.
        batch: of a training process; its computing time grows with it.
        gpu_speed: how much faster a step computes.
        processors: of a node.
        loader: what reads: torch's workers, one sample after the other, or headrace's reader.
        reads_in_flight: of headrace's reader, for each training process.
        ahead: batches that headrace reads ahead.

    Raises:
        ValueError: a value makes no sense.
    """

    storage: Storage
    nodes: int
    batch: int
    workers: int
    gpu_speed: float
    processors: int
    loader: Loader = "torch"
    reads_in_flight: int = 16
    ahead: int = 4

    def __post_init__(self) -> None:
        for name in ("nodes", "batch", "workers", "processors", "reads_in_flight", "ahead"):
            value, least = getattr(self, name), int(name != "workers")
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if not 1e-6 <= self.gpu_speed <= 1e6:
            raise ValueError(f"gpu_speed is {self.gpu_speed}, expected more than 0")
        if self.loader not in {"torch", "headrace"}:
            raise ValueError(f"loader is {self.loader!r}, expected torch or headrace")


# -- simulation --------------------------------------------------------------------------------------


class Simulated(NamedTuple):
    """What a simulation gave: seconds of steps, (steps,), and how much each resource worked, 0 to 1.

    Attributes:
        step_s: of all training processes together.
        wait_s: of it for data, the mean over the processes.
        compute_s: the longest process's.
    """

    step_s: _Floats
    wait_s: _Floats
    compute_s: _Floats
    busy: dict[str, float]


def _one_of(random: np.random.Generator, values: NDArray[Any], shape: tuple[int, ...]) -> _Floats:
    """One of some values each; 0 where there are none."""
    if not len(values):
        return np.zeros(shape)
    return values[random.integers(0, len(values), shape)].astype(float)


def _lognormal(
    random: np.random.Generator, median_s: float, p99_s: float, shape: tuple[int, ...]
) -> _Floats:
    sigma = np.log(p99_s / median_s) / P99_SIGMAS if p99_s > median_s > 0 else 0.0
    return median_s * np.exp(sigma * random.standard_normal(shape))


def _read_s(storage: Storage, random: np.random.Generator, nbytes: NDArray[np.int64]) -> _Floats:
    """What each sample's bytes take if nobody else reads, in requests one after the other."""
    if storage.is_recorded:  # as long as a recorded read of about as many bytes
        order = np.argsort(storage.read_bytes, kind="stable")
        known, seconds = storage.read_bytes[order], storage.read_s[order].astype(float)
        near = max(1, len(order) // 32)
        at = np.searchsorted(known, nbytes) - near // 2 + random.integers(0, near, nbytes.shape)
        at = np.clip(at, 0, len(order) - 1)
        scale = nbytes / np.maximum(1, known[at])
        taken_s: _Floats = seconds[at] * np.where(scale > 2, scale, 1.0)
        return taken_s
    f = storage.figures
    requests = np.maximum(1, -(-nbytes // storage.request_bytes)).ravel()
    latency_s = _lognormal(random, f.latency_s, f.latency_p99_s, (int(requests.sum()),))
    firsts = np.cumsum(requests) - requests
    slowest = min(f.bandwidth_bytes_per_s or np.inf, f.stream_bytes_per_s or np.inf)
    return np.add.reduceat(latency_s, firsts).reshape(nbytes.shape) + nbytes / slowest


def simulate(job: JobFigures, scenario: Scenario, steps: int, seed: int) -> Simulated:
    """Simulate some steps; the first ones wait for all ranks' first batches."""
    random = np.random.default_rng(seed)
    storage, f, nodes = scenario.storage, scenario.storage.figures, scenario.nodes
    ranks, scale = nodes * job.ranks, scenario.batch / job.batch
    at = np.arange(steps * ranks * scenario.batch).reshape(steps, ranks, scenario.batch)
    nbytes = job.sample_bytes[at % len(job.sample_bytes)]
    read_s = _read_s(storage, random, nbytes)
    # headrace's reader looks at a file, then opens it.
    for _ in range(job.opens * (2 if scenario.loader == "headrace" else 1)):
        if storage.is_recorded or len(storage.open_s):
            read_s += _one_of(random, storage.open_s, nbytes.shape)
        else:
            read_s += _lognormal(random, f.open_s, f.open_p99_s, nbytes.shape)
    decode_s = _one_of(random, job.decode_s, nbytes.shape).sum(axis=2) + job.collate_s * scale
    compute_s = _one_of(random, job.compute_s * scale / scenario.gpu_speed, (steps, ranks))

    def by_node(amounts: NDArray[Any], rate: float) -> _Floats:
        """Added up, shape (steps, nodes), and divided by a rate; 0: there is no limit."""
        together: _Floats = amounts.reshape(steps, nodes, -1).sum(axis=2) / (rate or np.inf)
        return together

    link_s = by_node(nbytes, f.bandwidth_bytes_per_s)
    server_s = by_node(read_s, f.parallelism)
    core_s = by_node(decode_s, scenario.processors)
    own, common = [core_s], [np.zeros(steps)]
    links, servers = storage.shared == "all", storage.shared != "none"
    for amounts, shared in ((link_s, links), (server_s, servers)):
        (common if shared else own).append(amounts.sum(axis=1) if shared else amounts)
    busiest = np.max(own, axis=0), np.max(common, axis=0)
    gates, wait_s = _run(job, scenario, read_s, decode_s, compute_s, *busiest)
    busy = {
        "link": link_s.sum() / (1 if links else nodes), "processors": core_s.sum() / nodes,
        "servers": server_s.sum() / (1 if servers else nodes),
        "workers": decode_s.sum() / (ranks * max(1, scenario.workers)),
        "compute": compute_s.max(axis=1).sum(),
    }  # fmt: skip
    return Simulated(
        np.diff(gates), wait_s.mean(axis=1), compute_s.max(axis=1),
        {resource: float(seconds / max(1e-9, gates[-1])) for resource, seconds in busy.items()},
    )  # fmt: skip


def _run(  # noqa: PLR0917 - all that is drawn
    job: JobFigures, scenario: Scenario, read_s: _Floats, decode_s: _Floats, compute_s: _Floats,
    node_s: _Floats, shared_s: _Floats,
) -> tuple[_Floats, _Floats]:  # fmt: skip
    """When steps begin, (steps + 1,), and how long each rank waited for data, (steps, ranks).

    Times are by step, then by rank; `node_s`, by node, and `shared_s` are what a step takes of the busiest
    resource that each node has for itself, and of the busiest that all nodes share.
    """
    steps, ranks = compute_s.shape
    by_headrace, lanes = scenario.loader == "headrace", max(1, scenario.workers)
    ahead = scenario.ahead if by_headrace else scenario.workers * job.prefetch
    hand_s = job.hand_s if scenario.workers and not by_headrace else 0.0
    batch_s, decoded_s = read_s.sum(axis=2) + decode_s, decode_s / min(lanes, scenario.processors)
    in_flight = [[0.0] * scenario.reads_in_flight for _ in range(ranks)]
    done, taken, wait_s = (np.zeros((steps, ranks)) for _ in range(3))
    gates = np.zeros(steps + 1)
    node_free, shared_free = np.zeros(scenario.nodes), 0.0
    node_turn = np.arange(1, job.ranks + 1) / job.ranks
    shared_turn = np.arange(1, ranks + 1) / ranks
    for step in range(steps):
        asked = gates[step]
        sent = np.full(ranks, 0.0 if ahead else asked)  # else it reads by itself
        if 0 < ahead <= step:
            sent = taken[step - ahead]
        if by_headrace:
            last = [_read_all(*each) for each in zip(in_flight, sent, read_s[step], strict=True)]
            done[step] = last + decoded_s[step]
        else:
            free = done[step - lanes] if step >= lanes else 0.0
            done[step] = np.maximum(sent, free) + batch_s[step]
        # What several share lets one rank's batch pass after the other's.
        node_begun = np.maximum(node_free, sent.reshape(scenario.nodes, -1).max(axis=1))
        shared_begun = max(shared_free, float(sent.max()))
        passed = (node_begun[:, None] + node_turn * node_s[step][:, None]).ravel()
        passed = np.maximum(passed, shared_begun + shared_turn * shared_s[step])
        node_free, shared_free = node_begun + node_s[step], shared_begun + float(shared_s[step])
        taken[step] = np.maximum(asked, np.maximum(done[step], passed))
        wait_s[step] = taken[step] + hand_s - asked
        gates[step + 1] = (taken[step] + hand_s + compute_s[step]).max()
    return gates, wait_s


def _read_all(in_flight: list[float], sent: float, seconds: _Floats) -> float:
    """When the last of a batch's reads is done: each begins when one of those in flight has ended."""
    last = 0.0
    for each in seconds.tolist():
        end = max(sent, in_flight[0]) + each
        heapq.heapreplace(in_flight, end)
        last = max(last, end)
    return last


# -- predictions -------------------------------------------------------------------------------------

_EVENTS_MOST: Final = 400_000
_STEPS: Final = 24, 400
_SEEDS: Final = 3
_NODES_MOST: Final = 8
_FULL: Final = 0.9
_MOSTLY: Final = 0.5
_NO_STALL: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What would be.

    Attributes:
        step_s: of a step, on average, once it runs.
        step_spread_s: half the range over several seeds.
        wait_s: of it for data.
        bound: compute, link, servers, processors, workers or latency: what a faster one of would help most.
        notes: what was simplified.
    """

    scenario: Scenario
    step_s: float
    step_spread_s: float
    wait_s: float
    stall: float
    samples_per_s: float
    bytes_per_s: float
    bound: str
    busy: dict[str, float]
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        names = ("nodes", "batch", "workers", "gpu_speed", "processors", "loader")
        asked = {name: getattr(self.scenario, name) for name in names}
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "scenario"}
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


def predict(job: JobFigures, scenario: Scenario, seed: int = 0) -> Prediction:
    """Predict a scenario."""
    notes: list[str] = []
    run = _fitting(scenario, notes)
    parts = 3 + min(32, float(job.sample_bytes.mean()) / scenario.storage.request_bytes)
    per_step = run.nodes * job.ranks * run.batch * parts
    steps = int(np.clip(_EVENTS_MOST // _SEEDS // per_step, *_STEPS))
    runs = [simulate(job, run, steps + 2, seed + i) for i in range(_SEEDS)]
    means = [float(one.step_s[2:].mean()) for one in runs]
    step_s = float(np.mean(means))
    wait_s = float(np.mean([one.wait_s[2:].mean() for one in runs]))
    busy = {key: float(np.mean([one.busy[key] for one in runs])) for key in runs[0].busy}
    samples_per_s = scenario.nodes * job.ranks * scenario.batch / step_s
    # What a worker does not decode, it waits for reads.
    bound = "workers" if busy["workers"] >= _MOSTLY else "latency"
    fullest = max(("link", "servers", "processors"), key=lambda name: busy[name])
    if wait_s / step_s < _NO_STALL:
        bound = "compute"
    elif busy[fullest] >= _FULL:
        bound = fullest
    if scenario.batch != job.batch:
        notes.append("computing time is taken to grow with the batch")
    return Prediction(
        scenario=scenario, step_s=step_s, step_spread_s=(max(means) - min(means)) / 2,
        wait_s=wait_s, stall=wait_s / step_s, samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * float(job.sample_bytes.mean()),
        bound=bound, busy=busy, notes=tuple(notes),
    )  # fmt: skip


def _fitting(scenario: Scenario, notes: list[str]) -> Scenario:
    """Fewer nodes with their share of what all share, where there are too many to simulate each."""
    if scenario.nodes <= _NODES_MOST:
        return scenario
    share = _NODES_MOST / scenario.nodes
    storage, figures = scenario.storage, scenario.storage.figures
    if storage.shared != "none" and figures.parallelism:
        figures = replace(figures, parallelism=max(1, round(figures.parallelism * share)))
    if storage.shared == "all":
        figures = replace(figures, bandwidth_bytes_per_s=figures.bandwidth_bytes_per_s * share)
    notes.append(f"{_NODES_MOST} of {scenario.nodes} nodes are simulated, with their share of it")
    return replace(scenario, nodes=_NODES_MOST, storage=replace(storage, figures=figures))


def check_of(job: JobFigures, storage: Storage, loader: Loader = "torch") -> Check | None:
    """Predict the record from itself, on its `recorded_storage`; None: it has no recorded step times."""
    if job.step_s is None or job.stall is None:
        return None
    step = predict(job, scenario_as_recorded(job, storage, loader))
    error, points = step.step_s / job.step_s - 1, 100 * (step.stall - job.stall)
    return Check(step.step_s, job.step_s, error, points)
