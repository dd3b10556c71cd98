"""Model: one scenario's steps and stall by simulation, how much the draws spread, and the error on the record.

Storage, readers, processors and training processes are queues. Torch's loader: each worker has up to `prefetch`
batches, reads and decodes one sample after the other, and batches are taken in turn. headrace's reader: many
reads in flight over the batches ahead, each of a file that was looked at before; decoded by the workers.
Training processes begin each step together. No clock, no thread, no I/O; the same seed, the same result.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.insight.whatif.jobs import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.insight.whatif.jobs import JobFigures, Loader
    from headrace.insight.whatif.storage import Storage

_Process = Generator[float | None, None, None]
"""Yields the time at which it goes on; None: somebody wakes it."""

_P99_SIGMAS: Final = 2.326
_DRAWS: Final = 1 << 14
"""At a time: one at a time costs more than all the rest."""

_REQUESTS_MOST: Final = 32
"""Of one sample, as events; a larger sample's are taken together."""


@dataclass(frozen=True)
class Simulated:
    """What a simulation gave.

    Attributes:
        step_s: float64 (steps,): of all training processes together.
        wait_s: float64 (steps,): of it for data, the mean over the processes.
        compute_s: float64 (steps,): the longest process's.
        busy: how much of the time each resource worked, 0 to 1.
    """

    step_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    busy: dict[str, float]


def _draws(draw: Callable[[int], NDArray[Any]]) -> Iterator[float]:
    while True:
        yield from draw(_DRAWS).tolist()


def _lognormal(random: np.random.Generator, median_s: float, p99_s: float) -> Iterator[float]:
    sigma = np.log(p99_s / median_s) / _P99_SIGMAS if p99_s > median_s > 0 else 0.0
    return _draws(lambda n: median_s * np.exp(sigma * random.standard_normal(n)))


def _one_of(random: np.random.Generator, values: NDArray[Any]) -> Iterator[float]:
    """One of some values; 0 where there are none."""
    if not len(values):
        return itertools.repeat(0.0)
    return _draws(lambda n: values[random.integers(0, len(values), n)].astype(float))


class _Device:
    """A storage in use: as SlowModel serves (native/io/slow_model.h), or times that were recorded."""

    def __init__(self, storage: Storage, random: np.random.Generator, nodes: int) -> None:
        f = storage.figures
        self._recorded = storage.is_recorded
        self._request_bytes = storage.request_bytes
        self._bandwidth, self._stream = f.bandwidth_bytes_per_s, f.stream_bytes_per_s
        self._opens: Iterator[float] | None = None
        if len(storage.open_s):
            self._opens = _one_of(random, storage.open_s)
        elif not self._recorded:
            self._opens = _lognormal(random, f.open_s, f.open_p99_s)
        self._reads = _lognormal(random, f.latency_s, f.latency_p99_s)
        by_bytes = np.argsort(storage.read_bytes, kind="stable")
        self._recorded_bytes = storage.read_bytes[by_bytes]
        self._recorded_s = storage.read_s[by_bytes].tolist()
        self._neighbours = itertools.cycle(range(max(1, len(by_bytes) // 32)))
        self._reach = max(1, len(by_bytes) // 32) // 2
        links = nodes if storage.shared != "all" else 1
        groups = nodes if storage.shared == "none" else 1
        self._link_free = [0.0] * links
        self._servers = [[0.0] * f.parallelism for _ in range(groups)] if f.parallelism else []
        self.link_s = self.server_s = 0.0
        self.links, self.servers = links, groups * max(1, f.parallelism)

    def open(self, now: float, node: int) -> float:
        """When a file is open."""
        return now if self._opens is None else self._serve(now, node, next(self._opens), 0)

    def requests(self, nbytes: int) -> tuple[int, int]:
        """How a sample is read: so many requests one after the other, each of so many real ones."""
        if self._recorded:
            return 1, 1
        real = max(1, -(-nbytes // self._request_bytes))
        together = -(-real // _REQUESTS_MOST)
        return -(-real // together), together

    def read(self, now: float, node: int, nbytes: int, together: int) -> float:
        """When a request's bytes are there."""
        if self._recorded:
            return now + self._as_recorded(nbytes)
        return self._serve(now, node, next(self._reads) * together, nbytes)

    def _as_recorded(self, nbytes: int) -> float:
        """The time of a recorded read that was about as long: each of its neighbours as often as the others."""
        at = int(np.searchsorted(self._recorded_bytes, nbytes)) - self._reach
        at = min(len(self._recorded_s) - 1, max(0, at + next(self._neighbours)))
        known = max(1, int(self._recorded_bytes[at]))
        return float(self._recorded_s[at]) * (nbytes / known if nbytes > 2 * known else 1.0)

    def _serve(self, now: float, node: int, latency_s: float, nbytes: int) -> float:
        servers = self._servers[node % len(self._servers)] if self._servers else None
        start = now if servers is None else max(now, servers[0])
        sent = start
        if self._bandwidth and nbytes:
            link = node % self.links
            seconds = nbytes / self._bandwidth
            sent = self._link_free[link] = max(start, self._link_free[link]) + seconds
            self.link_s += seconds
        if self._stream:
            sent = max(sent, start + nbytes / self._stream)
        due = sent + latency_s
        if servers is not None:
            heapq.heapreplace(servers, due)
            self.server_s += due - start
        return due


class _Cores:
    """A node's processors: whoever decodes takes the first that is free."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count
        self.busy_s = 0.0

    def work(self, now: float, seconds: float) -> float:
        """When so much work that comes now is done."""
        if seconds <= 0:
            return now
        start = max(now, self._free[0])
        heapq.heapreplace(self._free, start + seconds)
        self.busy_s += seconds
        return start + seconds


class _Batch:
    def __init__(self, number: int, samples: list[int]) -> None:
        self.number, self.samples, self.left = number, samples, len(samples)


class _Rank:
    """One training process and what reads for it."""

    def __init__(self, number: int, node: int, workers: int) -> None:
        self.number, self.node = number, node
        self.queues: list[deque[_Batch]] = [deque() for _ in range(max(1, workers))]
        self.unread: deque[tuple[_Batch, int]] = deque()
        self.in_flight = 0
        self.sent = 0
        self.ready: set[int] = set()
        self.waits_for = -1
        self.wait_s = 0.0


class _Simulation:
    """One simulation while it runs: processes that yield the time at which they go on."""

    def __init__(self, job: JobFigures, scenario: Scenario, steps: int, seed: int) -> None:
        self._job, self._scenario, self._steps = job, scenario, steps
        random = np.random.default_rng(seed)
        self.device = _Device(scenario.storage, random, scenario.nodes)
        self.cores = [_Cores(scenario.processors) for _ in range(scenario.nodes)]
        ranks = range(scenario.nodes * job.ranks)
        self._ranks = [_Rank(i, i // job.ranks, scenario.workers) for i in ranks]
        self._training = [self._train(rank) for rank in self._ranks]
        scale = scenario.batch / job.batch
        self._compute = _one_of(random, job.compute_s * scale / scenario.gpu_speed)
        self._decode = _one_of(random, job.decode_s)
        self._collate_s = job.collate_s * scale
        self._by_headrace = scenario.loader == "headrace"
        self._hand_s = job.hand_s if scenario.workers and not self._by_headrace else 0.0
        self._ahead = scenario.ahead if self._by_headrace else scenario.workers * job.prefetch
        self._sizes = job.sample_bytes.tolist()
        self._now = 0.0
        self._events: list[tuple[float, int, _Process]] = []
        self._order = itertools.count()
        self._at_gate: list[float] = []
        self._step_begin = 0.0
        self.step_s: list[float] = []
        self.wait_s: list[float] = []
        self.compute_s: list[float] = []

    def run(self) -> None:
        """All steps."""
        for rank, process in zip(self._ranks, self._training, strict=True):
            for _ in range(self._ahead):
                self._send(rank)
            self._wake(process)
        while self._events and len(self.step_s) < self._steps:
            self._now, _, process = heapq.heappop(self._events)
            when = next(process, None)
            if when is not None:
                heapq.heappush(self._events, (when, next(self._order), process))

    def _wake(self, process: _Process) -> None:
        heapq.heappush(self._events, (self._now, next(self._order), process))

    def _send(self, rank: _Rank) -> None:
        """Give the next batch to those that read."""
        size = self._scenario.batch
        first = (rank.sent * len(self._ranks) + rank.number) * size
        count = len(self._sizes)
        batch = _Batch(rank.sent, [self._sizes[(first + i) % count] for i in range(size)])
        rank.sent += 1
        if self._by_headrace:
            rank.unread.extend((batch, nbytes) for nbytes in batch.samples)
            for _ in range(min(size, self._scenario.reads_in_flight - rank.in_flight)):
                rank.in_flight += 1
                self._wake(self._read_ahead(rank))
            return
        queue = rank.queues[batch.number % len(rank.queues)]
        queue.append(batch)
        if len(queue) == 1:
            self._wake(self._work(rank, queue))

    def _work(self, rank: _Rank, queue: deque[_Batch]) -> _Process:
        """A worker of torch's: one sample after the other, as long as there are batches."""
        cores = self.cores[rank.node]
        while queue:
            for nbytes in queue[0].samples:
                if self._job.opens:
                    yield self.device.open(self._now, rank.node)
                yield from self._read(rank.node, nbytes)
                yield cores.work(self._now, next(self._decode))
            yield cores.work(self._now, self._collate_s)
            self._batch_is_ready(rank, queue.popleft())

    def _read_ahead(self, rank: _Rank) -> _Process:
        """One of headrace's reads in flight, over all batches ahead."""
        while rank.unread:
            batch, nbytes = rank.unread.popleft()
            if self._job.opens:  # it is looked at, then opened
                yield self.device.open(self._now, rank.node)
                yield self.device.open(self._now, rank.node)
            yield from self._read(rank.node, nbytes)
            batch.left -= 1
            if not batch.left:
                self._wake(self._decode_batch(rank, batch))
        rank.in_flight -= 1

    def _read(self, node: int, nbytes: int) -> _Process:
        """One request, and the next when it is there: others come between."""
        count, together = self.device.requests(nbytes)
        part = max(1, -(-nbytes // count))
        for begin in range(0, max(1, nbytes), part):
            yield self.device.read(self._now, node, min(part, nbytes - begin), together)

    def _decode_batch(self, rank: _Rank, batch: _Batch) -> _Process:
        """By as many threads as there are workers, in pieces."""
        total = self._collate_s + sum(next(self._decode) for _ in batch.samples)
        parts, cores = max(1, self._scenario.workers), self.cores[rank.node]
        yield max(cores.work(self._now, total / parts) for _ in range(parts))
        self._batch_is_ready(rank, batch)

    def _batch_is_ready(self, rank: _Rank, batch: _Batch) -> None:
        rank.ready.add(batch.number)
        if rank.waits_for == batch.number:
            self._wake(self._training[rank.number])

    def _train(self, rank: _Rank) -> _Process:
        for number in itertools.count():
            asked = self._now
            if not self._ahead:  # it reads by itself
                self._send(rank)
            if number not in rank.ready:
                rank.waits_for = number
                yield None
            rank.waits_for = -1
            rank.ready.remove(number)
            if self._ahead:
                self._send(rank)
            rank.wait_s = self._now + self._hand_s - asked
            compute_s = next(self._compute)
            yield self._now + self._hand_s + compute_s
            self._at_gate.append(compute_s)
            if len(self._at_gate) == len(self._ranks):
                self._end_step()
            yield None

    def _end_step(self) -> None:
        self.step_s.append(self._now - self._step_begin)
        self.wait_s.append(sum(rank.wait_s for rank in self._ranks) / len(self._ranks))
        self.compute_s.append(max(self._at_gate))
        self._step_begin = self._now
        self._at_gate.clear()
        for process in self._training:
            self._wake(process)


def simulate(job: JobFigures, scenario: Scenario, steps: int, seed: int) -> Simulated:
    """Simulate some steps; the first ones wait for all ranks' first batches."""
    simulation = _Simulation(job, scenario, steps, seed)
    simulation.run()
    total = max(1e-9, sum(simulation.step_s))
    device = simulation.device
    decoding_s = sum(cores.busy_s for cores in simulation.cores)
    workers = scenario.nodes * job.ranks * max(1, scenario.workers)
    return Simulated(
        np.array(simulation.step_s), np.array(simulation.wait_s), np.array(simulation.compute_s),
        {
            "link": device.link_s / device.links / total,
            "servers": device.server_s / device.servers / total,
            "processors": decoding_s / (scenario.nodes * scenario.processors) / total,
            "workers": decoding_s / workers / total,
            "compute": sum(simulation.compute_s) / total,
        },
    )  # fmt: skip


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
        stall: share of the time that is waited.
        samples_per_s: of all training processes.
        bytes_per_s: that they read.
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
