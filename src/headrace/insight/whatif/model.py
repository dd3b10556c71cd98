"""Model: one scenario's steps and stall, how much the draws spread, and the error on the record itself.

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.insight.whatif.jobs import Scenario

if TYPE_CHECKING:
    from headrace.insight.whatif.jobs import JobFigures, Loader
    from headrace.insight.whatif.storage import Storage

_Floats = NDArray[np.float64]

_P99_SIGMAS: Final = 2.326


@dataclass(frozen=True)
class Simulated:
    """What a simulation gave.

    Attributes:
        step_s: float64 (steps,): of all training processes together.
        wait_s: float64 (steps,): of it for data, the mean over the processes.
        compute_s: float64 (steps,): the longest process's.
        busy: how much of the time each resource worked, 0 to 1.
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
    sigma = np.log(p99_s / median_s) / _P99_SIGMAS if p99_s > median_s > 0 else 0.0
    return median_s * np.exp(sigma * random.standard_normal(shape))


def _open_s(storage: Storage, random: np.random.Generator, shape: tuple[int, ...]) -> _Floats:
    """What each open takes."""
    if storage.is_recorded or len(storage.open_s):
        return _one_of(random, storage.open_s, shape)
    return _lognormal(random, storage.figures.open_s, storage.figures.open_p99_s, shape)


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
    slowest = min(
        (rate for rate in (f.bandwidth_bytes_per_s, f.stream_bytes_per_s) if rate), default=0.0
    )
    transfer_s = nbytes / slowest if slowest else np.zeros(nbytes.shape)
    return np.add.reduceat(latency_s, firsts).reshape(nbytes.shape) + transfer_s


class _Times(NamedTuple):
    """What is drawn: seconds by step, then by rank or node.

    `node_s` and `shared_s`: what a step takes of the busiest resource that each node has for itself, and of the
    busiest that all nodes share.
    """

    read_s: _Floats
    decode_s: _Floats
    compute_s: _Floats
    node_s: _Floats
    shared_s: _Floats


def simulate(job: JobFigures, scenario: Scenario, steps: int, seed: int) -> Simulated:
    """Simulate some steps; the first ones wait for all ranks' first batches."""
    random = np.random.default_rng(seed)
    storage, f, nodes = scenario.storage, scenario.storage.figures, scenario.nodes
    ranks, scale = nodes * job.ranks, scenario.batch / job.batch
    at = np.arange(steps * ranks * scenario.batch).reshape(steps, ranks, scenario.batch)
    nbytes = job.sample_bytes[at % len(job.sample_bytes)]
    read_s = _read_s(storage, random, nbytes)
    if job.opens:
        for _ in range(
            2 if scenario.loader == "headrace" else 1
        ):  # it looks at a file, then opens it
            read_s += _open_s(storage, random, nbytes.shape)
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
    times = _Times(read_s, decode_s, compute_s, np.max(own, axis=0), np.max(common, axis=0))
    gates, wait_s = _run(job, scenario, times)
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


def _run(job: JobFigures, scenario: Scenario, times: _Times) -> tuple[_Floats, _Floats]:
    """When steps begin, (steps + 1,), and how long each rank waited for data, (steps, ranks)."""
    read_s, decode_s, compute_s, node_s, shared_s = times
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
        s = self.scenario
        return {
            "storage": s.storage.name, "nodes": s.nodes, "batch": s.batch, "workers": s.workers,
            "gpu_speed": s.gpu_speed, "processors": s.processors, "loader": s.loader,
            "step_s": self.step_s, "step_spread_s": self.step_spread_s, "wait_s": self.wait_s,
            "stall": self.stall, "samples_per_s": self.samples_per_s,
            "bytes_per_s": self.bytes_per_s, "bound": self.bound, "busy": self.busy,
            "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """The model on the record itself.

    Attributes:
        error: predicted step time against the recorded, as a share of it.
        stall_points: predicted stall less the recorded, in points of a hundred.
    """

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
    if scenario.batch != job.batch:
        notes.append("computing time is taken to grow with the batch")
    return Prediction(
        scenario=scenario, step_s=step_s, step_spread_s=(max(means) - min(means)) / 2,
        wait_s=wait_s, stall=wait_s / step_s, samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * float(job.sample_bytes.mean()),
        bound=_bound(wait_s / step_s, busy), busy=busy, notes=tuple(notes),
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


def _bound(stall: float, busy: dict[str, float]) -> str:
    if stall < _NO_STALL:
        return "compute"
    shared = ("link", "servers", "processors")
    full = {key: busy[key] for key in shared if busy[key] >= _FULL}
    if full:
        return max(full, key=lambda key: full[key])
    # What a worker does not decode, it waits for reads.
    return "workers" if busy["workers"] >= _MOSTLY else "latency"


def check_of(job: JobFigures, storage: Storage, loader: Loader = "torch") -> Check | None:
    """Predict the record from itself, on its `recorded_storage`; None: it has no recorded step times."""
    if job.step_s is None or job.stall is None:
        return None
    step = predict(job, scenario_as_recorded(job, storage, loader))
    error, points = step.step_s / job.step_s - 1, 100 * (step.stall - job.stall)
    return Check(step.step_s, job.step_s, error, points)
