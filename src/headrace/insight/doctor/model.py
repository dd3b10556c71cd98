"""Model: the rate of a data loader, from what one read, one core and one copy take. Pure.

A loader's workers are customers of two servers. The storage answers `rate(q)` reads a second with q in
flight, as was measured; the processors share themselves among the workers. A worker of torch's does one
thing after the other: it waits for its sample, decodes it, and copies it into the batch. So with W workers
and R samples a second

    R x (processor time, stretched where there are fewer processors than workers)
        + R x (wait for what lies in memory) + (reads in flight that give R)  =  W

whose left side grows with R: one R solves it. headrace reads ahead: the storage works while the workers
do, at any depth, and the slower of the two is the rate.

What is left out: the variance of sizes and times, the training process's own load on the processors, and
what a batch's transfer to the device takes. `benchmarks/doctor.py` compares with loaders that run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MODEL_ERROR",
    "Curve",
    "Shares",
    "Work",
    "ahead_rate",
    "stall_of",
    "torch_rate",
    "torch_shares",
]

MODEL_ERROR: Final = 0.6
"""Either way, of nine in ten. On a quiet machine 38 predictions were off by a factor of 1.10 in the middle,
1.49 at the 90th percentile, 1.93 at most (`benchmarks/results/doctor-2026-11-22.json`)."""

_STEPS: Final = 100
_RATE_MAX: Final = 1e9


@dataclass(frozen=True, slots=True)
class Curve:
    """Reads a second by reads in flight: never falling, straight between what was measured, flat behind it."""

    depths: tuple[float, ...]
    rates: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """A curve through (depth, rate).

        Raises:
            ValueError: there is no point, or one is not positive.
        """
        if not points or any(
            not (d > 0 and r > 0 and math.isfinite(d) and math.isfinite(r)) for d, r in points
        ):
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

    def depth(self, rate: float) -> float:
        """The least depth that gives a rate; infinite beyond the most."""
        if rate > self.most:
            return math.inf
        depths, rates = (0.0, *self.depths), (0.0, *self.rates)
        for i in range(1, len(rates)):
            if rate <= rates[i]:
                if rates[i] <= rates[i - 1]:
                    return depths[i - 1]
                share = (rate - rates[i - 1]) / (rates[i] - rates[i - 1])
                return depths[i - 1] + share * (depths[i] - depths[i - 1])
        return depths[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a sample takes, and who does it.

    Attributes:
        curve: samples a second from the device.
        cold: share of samples that come from the device; the others lie in memory.
        wait_factor: how much longer a plain read waits than those of the curve.
        read_s: processor time of opening and reading a sample in Python, out of memory.
        cold_read_s: the same of one that comes from the device, through the page cache.
        ahead_s: processor time of headrace's reading a sample from the device.
        decode_s: processor time of decoding.
        collate_s: of copying a sample into a new batch.
        ahead_collate_s: into a recycled one.
        cpus: that may be used.
        others: CPUs that others use.
    """

    curve: Curve
    cold: float = 1.0
    wait_factor: float = 1.0
    read_s: float = 0.0
    cold_read_s: float = 0.0
    ahead_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    ahead_collate_s: float = 0.0
    cpus: float = 1.0
    others: float = 0.0

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

    def from_memory(self) -> Work:
        """The same with all samples in memory."""
        return replace(self, cold=0.0)

    def from_device(self) -> Work:
        """The same with none in memory."""
        return replace(self, cold=1.0)


@dataclass(frozen=True, slots=True)
class Shares:
    """What a worker of torch's does with its time; adds up to 1."""

    wait: float
    read: float
    decode: float
    collate: float


def torch_rate(work: Work, workers: int) -> float:
    """Samples a second of torch's DataLoader, if nobody waits with taking them.

    Args:
        work: of a sample.
        workers: processes; 0: the training process itself.
    """
    customers = max(1, workers)
    stretch = customers / work.share_of_cpus(customers)

    def busy(rate: float) -> float:
        """Workers that are busy at a rate."""
        reading = 0.0
        if work.cold > 0:
            reading = work.curve.depth(rate * work.cold) * work.wait_factor
        return rate * work.torch_cpu_s * stretch + reading

    low, high = 0.0, _RATE_MAX
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(middle) <= customers else (low, middle)
    return low


def torch_shares(work: Work, workers: int) -> Shares:
    """What the workers do at `torch_rate`."""
    customers = max(1, workers)
    stretch = customers / work.share_of_cpus(customers)
    rate = torch_rate(work, workers)
    read_s = work.torch_cpu_s - work.decode_s - work.collate_s
    parts = [rate * s * stretch / customers for s in (read_s, work.decode_s, work.collate_s)]
    return Shares(max(0.0, 1.0 - sum(parts)), *parts)


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


def stall_of(rate: float, wanted: float, *, in_turn: bool = False) -> float:
    """Share of the training's time that it waits.

    Args:
        rate: of the loader.
        wanted: samples a second that the model could take.
        in_turn: whether loading and training take turns (no workers, nothing read ahead).
    """
    if rate <= 0:
        return 1.0
    if in_turn:
        return wanted / (wanted + rate)
    return max(0.0, 1.0 - rate / wanted)
