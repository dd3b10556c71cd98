"""Pipeline: the simulation. Storage, readers, processors and training processes as queues, event by event.

Torch's loader: each worker has up to `prefetch` batches, reads and decodes one sample after the other, and
batches are taken in turn. headrace's reader: many reads in flight over the batches ahead, each of a file that
was looked at before; decoded by the workers.
Training processes begin each step together. No clock, no thread, no I/O; the same seed, the same result.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.insight.whatif.figures import JobFigures, Scenario
    from headrace.insight.whatif.storage import Storage

_P99_SIGMAS: Final = 2.326
_DRAWS: Final = 1 << 14
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


class _Draws:
    """Draws by the thousand: one at a time costs more than all the rest."""

    def __init__(self, make: Any) -> None:
        self._make, self._left = make, [0.0]
        self._left.clear()

    def next(self) -> float:
        if not self._left:
            self._left = self._make(_DRAWS).tolist()
        return self._left.pop()


def _lognormal(random: np.random.Generator, median_s: float, p99_s: float) -> _Draws:
    sigma = np.log(p99_s / median_s) / _P99_SIGMAS if p99_s > median_s > 0 else 0.0
    return _Draws(lambda n: median_s * np.exp(sigma * random.standard_normal(n)))


def _of(random: np.random.Generator, values: NDArray[Any]) -> _Draws:
    """One of some values."""
    if not len(values):
        return _Draws(np.zeros)
    return _Draws(lambda n: values[random.integers(0, len(values), n)].astype(float))


class _Device:
    """A storage in use: as SlowModel serves (native/io/slow_model.h), or times that were recorded."""

    def __init__(self, storage: Storage, random: np.random.Generator, nodes: int) -> None:
        f = storage.figures
        self._recorded = storage.is_recorded
        self._request_bytes = storage.request_bytes
        self._bandwidth, self._stream = f.bandwidth_bytes_per_s, f.stream_bytes_per_s
        self._open = _of(random, storage.open_s) if len(storage.open_s) else None
        if self._open is None and not self._recorded:
            self._open = _lognormal(random, f.open_s, f.open_p99_s)
        self._read = _lognormal(random, f.latency_s, f.latency_p99_s)
        if self._recorded:
            self._rate = _Rate(storage)
        links = nodes if storage.shared != "all" else 1
        groups = nodes if storage.shared == "none" else 1
        self._link_free = [0.0] * links
        self._servers = [[0.0] * f.parallelism for _ in range(groups)] if f.parallelism else []
        self._random = random
        self.link_s = self.server_s = 0.0
        self.links, self.servers = links, groups * max(1, f.parallelism)

    def open(self, now: float, node: int) -> float:
        return now if self._open is None else self._serve(now, node, self._open.next(), 0)

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
            return now + self._rate.seconds(nbytes)
        return self._serve(now, node, self._read.next() * together, nbytes)

    def _serve(self, now: float, node: int, latency_s: float, nbytes: int) -> float:
        start, heap = now, None
        if self._servers:
            heap = self._servers[node % len(self._servers)]
            start = max(now, heap[0])
        sent = start
        if self._bandwidth and nbytes:
            link = node % self.links
            seconds = nbytes / self._bandwidth
            sent = self._link_free[link] = max(start, self._link_free[link]) + seconds
            self.link_s += seconds
        if self._stream:
            sent = max(sent, start + nbytes / self._stream)
        due = sent + latency_s
        if heap is not None:
            heapq.heapreplace(heap, due)
            self.server_s += due - start
        return due


class _Rate:
    """Recorded times of reads: one of a read that was about as long."""

    def __init__(self, storage: Storage) -> None:
        order = np.argsort(storage.read_bytes, kind="stable")
        self._bytes = storage.read_bytes[order]
        self._seconds = storage.read_s[order].tolist()
        self._near = max(1, len(order) // 32)
        self._n = 0

    def seconds(self, nbytes: int) -> float:
        at = int(np.searchsorted(self._bytes, nbytes))
        # A walk over the neighbours: each of them as often as the others.
        self._n = (self._n + 1) % self._near
        near = min(len(self._seconds) - 1, max(0, at - self._near // 2 + self._n))
        known = max(1, int(self._bytes[near]))
        scale = nbytes / known if nbytes > 2 * known else 1.0
        return float(self._seconds[near]) * scale


class _Cores:
    """A node's processors: whoever decodes takes the first that is free."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count
        self.busy_s = 0.0

    def work(self, now: float, seconds: float) -> float:
        if seconds <= 0:
            return now
        start = max(now, self._free[0])
        heapq.heapreplace(self._free, start + seconds)
        self.busy_s += seconds
        return start + seconds


class _Batch:
    __slots__ = ("left", "number", "samples")

    def __init__(self, number: int, samples: list[int]) -> None:
        self.number, self.samples, self.left = number, samples, len(samples)


class _Rank:
    """One training process and what reads for it."""

    def __init__(self, number: int, node: int, workers: int) -> None:
        self.number, self.node = number, node
        self.ready: dict[int, float] = {}
        self.queues: list[deque[_Batch]] = [deque() for _ in range(max(1, workers))]
        self.idle = [True] * max(1, workers)
        self.reading: deque[tuple[_Batch, int]] = deque()
        self.in_flight = 0
        self.sent = 0
        self.asked_s = 0.0
        self.waiting: int | None = 0
        self.wait_s = 0.0


class _Running:
    """One simulation while it runs."""

    def __init__(self, job: JobFigures, scenario: Scenario, steps: int, seed: int) -> None:
        self._job, self._scenario, self._steps = job, scenario, steps
        random = np.random.default_rng(seed)
        self.device = _Device(scenario.storage, random, scenario.nodes)
        self.cores = [_Cores(scenario.processors) for _ in range(scenario.nodes)]
        world = scenario.nodes * job.ranks
        self.ranks = [_Rank(i, i // job.ranks, scenario.workers) for i in range(world)]
        scale = scenario.batch / job.batch
        self._compute = _of(random, job.compute_s * scale / scenario.gpu_speed)
        self._decode = _of(random, job.decode_s)
        self._collate_s = job.collate_s * scale
        self._hand_s = job.hand_s if scenario.workers and scenario.loader == "torch" else 0.0
        self._sizes = job.sample_bytes.tolist()
        self._events: list[tuple[float, int, Any, Any]] = []
        self._count = 0
        self._at_gate = 0
        self._step_begin = 0.0
        self._longest = 0.0
        self.step_s: list[float] = []
        self.wait_s: list[float] = []
        self.compute_s: list[float] = []

    def run(self) -> None:
        ahead = self._ahead()
        for rank in self.ranks:
            for _ in range(ahead):
                self._send(rank, 0.0)
            self._ask(rank, 0.0)
        while self._events and len(self.step_s) < self._steps:
            now, _, call, argument = heapq.heappop(self._events)
            call(argument, now)

    def _ahead(self) -> int:
        if self._scenario.loader == "headrace":
            return self._scenario.ahead
        return self._scenario.workers * self._job.prefetch if self._scenario.workers else 0

    def _at(self, when: float, call: Any, argument: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, call, argument))

    # -- sending batches to those that read -------------------------------------------------------

    def _send(self, rank: _Rank, now: float) -> None:
        number, size = rank.sent, self._scenario.batch
        rank.sent += 1
        first = (number * len(self.ranks) + rank.number) * size
        count = len(self._sizes)
        batch = _Batch(number, [self._sizes[(first + i) % count] for i in range(size)])
        if self._scenario.loader == "headrace":
            rank.reading.extend((batch, nbytes) for nbytes in batch.samples)
            self._fill(rank, now)
            return
        worker = number % len(rank.queues)
        rank.queues[worker].append(batch)
        if rank.idle[worker]:
            rank.idle[worker] = False
            self._at(now, self._next_sample, (rank, worker))

    # -- torch: each worker reads one sample after the other --------------------------------------

    def _next_sample(self, who: tuple[_Rank, int], now: float) -> None:
        rank, worker = who
        queue = rank.queues[worker]
        if not queue:
            rank.idle[worker] = True
            return
        batch = queue[0]
        if batch.left == 0:
            queue.popleft()
            done = self.cores[rank.node].work(now, self._collate_s)
            self._at(done, self._batch_ready, (rank, batch.number))
            self._at(done, self._next_sample, who)
            return
        if self._job.opens:
            self._at(self.device.open(now, rank.node), self._read_sample, who)
        else:
            self._read_sample(who, now)

    def _read_sample(self, who: tuple[_Rank, int], now: float) -> None:
        rank, worker = who
        batch = rank.queues[worker][0]
        nbytes = batch.samples[len(batch.samples) - batch.left]
        batch.left -= 1
        self._read_all(rank.node, nbytes, (self._decode_sample, who), now)

    def _read_all(self, node: int, nbytes: int, then: tuple[Any, Any], now: float) -> None:
        count, together = self.device.requests(nbytes)
        self._read_on((node, nbytes, -(-nbytes // count), together, then), now)

    def _read_on(self, what: tuple[int, int, int, int, tuple[Any, Any]], now: float) -> None:
        """One request; the next is asked for when it is there: others come between."""
        node, left, part, together, then = what
        due = self.device.read(now, node, min(left, part), together)
        if left > part:
            self._at(due, self._read_on, (node, left - part, part, together, then))
        else:
            self._at(due, *then)

    def _decode_sample(self, who: tuple[_Rank, int], now: float) -> None:
        done = self.cores[who[0].node].work(now, self._decode.next())
        self._at(done, self._next_sample, who)

    # -- headrace: reads in flight over all batches ahead -----------------------------------------

    def _fill(self, rank: _Rank, now: float) -> None:
        while rank.reading and rank.in_flight < self._scenario.reads_in_flight:
            batch, nbytes = rank.reading.popleft()
            rank.in_flight += 1
            opened = self.device.open(now, rank.node) if self._job.opens else now
            self._at(opened, self._looked_at, (rank, batch, nbytes))

    def _looked_at(self, what: tuple[_Rank, _Batch, int], now: float) -> None:
        opened = self.device.open(now, what[0].node) if self._job.opens else now
        self._at(opened, self._read_bytes, what)

    def _read_bytes(self, what: tuple[_Rank, _Batch, int], now: float) -> None:
        rank, batch, nbytes = what
        self._read_all(rank.node, nbytes, (self._sample_read, (rank, batch)), now)

    def _sample_read(self, what: tuple[_Rank, _Batch], now: float) -> None:
        rank, batch = what
        rank.in_flight -= 1
        batch.left -= 1
        if batch.left == 0:
            self._decode_batch(rank, batch, now)
        self._fill(rank, now)

    def _decode_batch(self, rank: _Rank, batch: _Batch, now: float) -> None:
        """By as many threads as there are workers, in pieces."""
        total = self._collate_s + sum(self._decode.next() for _ in batch.samples)
        parts = max(1, self._scenario.workers)
        cores = self.cores[rank.node]
        done = max(cores.work(now, total / parts) for _ in range(parts))
        self._at(done, self._batch_ready, (rank, batch.number))

    # -- the training process ---------------------------------------------------------------------

    def _ask(self, rank: _Rank, now: float) -> None:
        rank.asked_s = now
        if rank.sent <= (rank.waiting or 0):  # it reads by itself
            self._send(rank, now)
        if (ready := rank.ready.pop(rank.waiting or 0, None)) is not None:
            self._take(rank, max(now, ready))

    def _batch_ready(self, what: tuple[_Rank, int], now: float) -> None:
        rank, number = what
        if number == rank.waiting and rank.asked_s <= now and rank.asked_s >= 0:
            self._take(rank, now)
        else:
            rank.ready[number] = now

    def _take(self, rank: _Rank, now: float) -> None:
        if self._ahead():
            self._send(rank, now)
        now += self._hand_s
        rank.wait_s = now - rank.asked_s
        rank.asked_s = -1.0
        seconds = self._compute.next()
        self._longest = max(self._longest, seconds)
        self._at(now + seconds, self._computed, rank)

    def _computed(self, _: _Rank, now: float) -> None:
        self._at_gate += 1
        if self._at_gate < len(self.ranks):
            return
        self.step_s.append(now - self._step_begin)
        self.wait_s.append(sum(r.wait_s for r in self.ranks) / len(self.ranks))
        self.compute_s.append(self._longest)
        self._step_begin, self._at_gate, self._longest = now, 0, 0.0
        for each in self.ranks:
            each.waiting = (each.waiting or 0) + 1
        for each in self.ranks:
            self._ask(each, now)


def simulate(job: JobFigures, scenario: Scenario, steps: int, seed: int) -> Simulated:
    """Run a job's steps.

    Args:
        job: what is read, decoded and computed.
        scenario: on what.
        steps: how many.
        seed: of the draws.
    """
    running = _Running(job, scenario, steps, seed)
    running.run()
    total = max(1e-9, sum(running.step_s))
    device = running.device
    cores = scenario.nodes * scenario.processors
    workers = scenario.nodes * job.ranks * max(1, scenario.workers)
    return Simulated(
        np.array(running.step_s), np.array(running.wait_s), np.array(running.compute_s),
        {
            "link": device.link_s / device.links / total,
            "servers": device.server_s / device.servers / total,
            "processors": sum(c.busy_s for c in running.cores) / cores / total,
            "workers": sum(c.busy_s for c in running.cores) / workers / total,
            "compute": sum(running.compute_s) / total,
        },
    )  # fmt: skip
