"""Rig: a loader over simulated storage and a consumer that works at a given rate, in one process.

Deliveries and knobs are recorded as they happen. The consumer keeps to absolute deadlines, so that a
late batch costs it time and an early one does not.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

import headrace as hr
from headrace.io import PRESETS
from headrace.order import Order, Shuffled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SAMPLE_BYTES = 32_000
SAMPLES = 4_000
WATCH_S = 0.02


class Endless(Order):
    """A shuffled order, over and over in one epoch: the end of an epoch is another subject."""

    def __init__(self, samples: int) -> None:
        self._inner = Shuffled(samples, seed=1)
        self.samples = samples
        self.seed = 1

    @property
    def length(self) -> int:
        return self.samples * 1_000_000

    def describe(self) -> dict[str, Any]:
        return {"mode": "endless", "samples": self.samples}

    def randomness(self) -> Any:
        return self._inner.randomness()

    def _indices(self, epoch: int, start: int, stop: int) -> Any:
        positions = np.arange(start, stop) % self.samples
        whole = self._inner.indices(epoch, 0, self.samples)
        return whole[positions]


def ensure_store(folder: Path) -> Path:
    """The store that all rigs read: 128 MB of noise."""
    path = folder / "convergence.hr"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(1)
        hr.pack(((f"{i:05d}", noise.bytes(SAMPLE_BYTES), 0) for i in range(SAMPLES)), path)
    return path


class Slow:
    """A simulated storage whose latency can be changed; a loader takes it as `simulate`."""

    def __init__(self, preset: str) -> None:
        self.name = preset
        self.model = PRESETS[preset].model()


@dataclass(slots=True)
class Timeline:
    """Deliveries (time, samples) and knobs (time, reads in flight, buffer bytes)."""

    delivered: list[tuple[float, int]] = field(default_factory=list)
    knobs: list[tuple[float, int, int]] = field(default_factory=list)

    def rate(self, start: float, stop: float) -> float:
        """Samples per second between two times."""
        return sum(n for at, n in self.delivered if start <= at < stop) / (stop - start)

    def mean_knobs(self, start: float, stop: float) -> tuple[float, float]:
        """Mean reads in flight allowed, and buffer bytes."""
        part = [(reads, size) for at, reads, size in self.knobs if start <= at < stop]
        count = max(1, len(part))
        return sum(reads for reads, _ in part) / count, sum(size for _, size in part) / count

    def reaches(self, rate: float, start: float, stop: float, over_s: float) -> float | None:
        """Seconds from `start` until the first `over_s` seconds at this rate begin; None: never."""
        at = start
        while at + over_s <= stop:
            if self.rate(at, at + over_s) >= rate:
                return at - start
            at += 0.05
        return None


class Rig:
    """A loader, its storage and its consumer; use it as a context."""

    def __init__(
        self,
        store: Path,
        preset: str,
        rate: float,
        batch: int,
        *,
        tune: bool,
        knobs: Mapping[str, int] | None = None,
    ) -> None:
        self.storage = Slow(preset)
        self.timeline = Timeline()
        self.batch = batch
        self.rate = rate
        self._store = hr.open(store)
        self.loader = hr.loader(
            self._store,
            batch,
            order=Endless(SAMPLES),
            rank=0,
            world_size=1,
            tune=tune,
            simulate=self.storage,
            verify=False,
            ram_bytes=0,
        )
        self.stage = self.loader.stages_now()[0]
        if knobs:
            self.stage.turn(knobs)
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._consume, daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(30)
        self.loader.close()
        self._store.close()

    def drain(self) -> None:
        """Let the consumer eat what is ready, at once: a stock would hide that too little comes."""
        rate, self.rate = self.rate, 1e9
        self.stage.turn({"buffer_bytes": 1})
        deadline = time.perf_counter() + 5.0
        while self.stage.stats().ready_bytes > 0 and time.perf_counter() < deadline:
            time.sleep(0.005)
        self.rate = rate

    def _consume(self) -> None:
        due = time.perf_counter()
        for batch in self.loader:
            now, step_s = time.perf_counter(), self.batch / self.rate
            self.timeline.delivered.append((now, len(batch)))
            due = max(due, now) + step_s if now > due + step_s else due + step_s
            if self._ending.wait(max(0.0, due - time.perf_counter())):
                return

    def _watch(self) -> None:
        while not self._ending.wait(WATCH_S):
            knobs = self.stage.knobs()
            now = time.perf_counter()
            self.timeline.knobs.append((now, knobs["reads_in_flight"], knobs["buffer_bytes"]))
