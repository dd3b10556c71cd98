"""A plant for the tuner: storage, reader and consumer as a simulation of discrete events.

It models what the native reader does: batches are admitted in order while they fit into the buffer
(the oldest always does), their reads are issued in order while fewer than `reads_in_flight` are under
way, a batch is ready when its last read is. Time is simulated; nothing here sleeps.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from headrace.control.history import Knobs, PlaneInterval
from headrace.plane.stage import LATENCY_BUCKETS, latency_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What a simulated storage can do."""

    latency_s: float
    sigma: float = 0.4
    bytes_per_s: float = 1e12
    parallelism: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """What takes the batches."""

    samples_per_s: float
    batch: int = 32
    sample_bytes: int = 100_000
    jitter: float = 0.05


PRESETS = {
    "lustre": Storage(latency_s=0.004, sigma=0.7, bytes_per_s=1.5e9, parallelism=64),
    "nfs": Storage(latency_s=0.0015, sigma=0.5, bytes_per_s=0.3e9, parallelism=16),
    "s3": Storage(latency_s=0.040, sigma=0.5, bytes_per_s=1.0e9, parallelism=256),
    "hdd": Storage(latency_s=0.008, sigma=0.4, bytes_per_s=0.15e9, parallelism=2),
}


@dataclass(slots=True)
class _Batch:
    left: int  # reads that have not finished
    unissued: int
    nbytes: int


@dataclass(slots=True)
class Totals:
    """What has happened since the last `interval`."""

    waited_s: float = 0.0
    worked_s: float = 0.0
    batches: int = 0
    samples: int = 0
    reads: int = 0
    held_s: float = 0.0  # integral of reads in flight
    latency_us: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)


class Plant:
    """Storage, reader and consumer; `advance` runs them for some simulated time."""

    def __init__(self, storage: Storage, consumer: Consumer, knobs: Knobs, seed: int = 0) -> None:
        self.storage = storage
        self.consumer = consumer
        self.knobs = knobs
        self.now_s = 0.0
        self.latency_factor = 1.0
        self.held = 0  # bytes of admitted, undelivered batches
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, str, object]] = []
        self._number = 0
        self._admitted: deque[_Batch] = deque()
        self._issue: deque[_Batch] = deque()
        self._in_flight = 0
        self._servers_busy = 0
        self._waiting: deque[tuple[_Batch, float]] = deque()
        self._pipe_free_s = 0.0
        self._asked_at: float | None = 0.0
        self._worked_from = 0.0
        self._since = Totals()
        self._since_s = 0.0
        self._flow()

    def turn(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._flow()

    def advance(self, seconds: float) -> PlaneInterval:
        end = self.now_s + seconds
        while self._events and self._events[0][0] <= end:
            at, _, kind, subject = heapq.heappop(self._events)
            self._pass_time(at)
            if kind == "served":
                self._served(subject)
            elif kind == "arrived":
                self._arrived(subject)
            else:
                self._ask()
            self._flow()
        self._pass_time(end)
        return self._take_interval(seconds)

    def _pass_time(self, at: float) -> None:
        self._since.held_s += self._in_flight * (at - self.now_s)
        self.now_s = at

    def _at(self, time_s: float, kind: str, subject: object = None) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, kind, subject))

    def _flow(self) -> None:
        nbytes = self.consumer.batch * self.consumer.sample_bytes
        while not self._admitted or self.held + nbytes <= self.knobs.buffer_bytes:
            batch = _Batch(self.consumer.batch, self.consumer.batch, nbytes)
            self.held += nbytes
            self._admitted.append(batch)
            self._issue.append(batch)
        while self._issue and self._in_flight < self.knobs.reads_in_flight:
            batch = self._issue[0]
            batch.unissued -= 1
            if batch.unissued == 0:
                self._issue.popleft()
            self._in_flight += 1
            if self._servers_busy < self.storage.parallelism:
                self._serve(batch, self.now_s)
            else:
                self._waiting.append((batch, self.now_s))

    def _serve(self, batch: _Batch, issued_s: float) -> None:
        self._servers_busy += 1
        latency = self.storage.latency_s * self.latency_factor
        latency *= self._random.lognormvariate(0.0, self.storage.sigma)
        self._at(self.now_s + latency, "served", (batch, issued_s))

    def _served(self, subject) -> None:
        # After its latency a read's bytes pass through one pipe.
        self._pipe_free_s = max(self._pipe_free_s, self.now_s)
        self._pipe_free_s += self.consumer.sample_bytes / self.storage.bytes_per_s
        self._at(self._pipe_free_s, "arrived", subject)

    def _arrived(self, subject) -> None:
        batch, issued_s = subject
        self._servers_busy -= 1
        self._in_flight -= 1
        if self._waiting:
            self._serve(*self._waiting.popleft())
        self._since.reads += 1
        self._since.latency_us[latency_bucket(self.now_s - issued_s)] += 1
        batch.left -= 1
        if self._asked_at is not None:
            self._deliver()

    def _ask(self) -> None:
        self._since.worked_s += self.now_s - self._worked_from
        self._asked_at = self.now_s
        self._deliver()

    def _deliver(self) -> None:
        if not self._admitted or self._admitted[0].left:
            return
        batch = self._admitted.popleft()
        self.held -= batch.nbytes
        self._since.waited_s += self.now_s - max(self._asked_at, self._since_s)
        self._since.batches += 1
        self._since.samples += self.consumer.batch
        self._asked_at, self._worked_from = None, self.now_s
        work = self.consumer.batch / self.consumer.samples_per_s
        work *= max(0.0, self._random.gauss(1.0, self.consumer.jitter))
        self._at(self.now_s + work, "ask")

    def _take_interval(self, seconds: float) -> PlaneInterval:
        since = self._since
        if self._asked_at is not None:
            since.waited_s += self.now_s - max(self._asked_at, self._since_s)
        else:
            since.worked_s += self.now_s - self._worked_from
            self._worked_from = self.now_s
        self._since, self._since_s = Totals(), self.now_s
        ready = sum(batch.nbytes for batch in self._admitted if not batch.left)
        return PlaneInterval(
            seconds=seconds,
            waited_s=since.waited_s,
            worked_s=since.worked_s,
            batches=since.batches,
            samples=since.samples,
            bytes=since.samples * self.consumer.sample_bytes,
            reads=since.reads,
            in_flight=since.held_s / seconds,
            buffered_bytes=self.held,
            ready_bytes=ready,
            latency_us=tuple(since.latency_us),
            knobs=self.knobs,
        )


def steady_rate(storage: Storage, consumer: Consumer, knobs: Knobs, seconds: float = 8.0) -> float:
    """Samples/s at a fixed setting, after a second of running in."""
    plant = Plant(storage, consumer, knobs, seed=1)
    plant.advance(1.0)
    return plant.advance(seconds).samples / seconds
