"""Runs of the tuner on simulated plants, and what one wants to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from control.plant import Consumer, Plant, Storage, steady_rate
from headrace.control.history import Knobs, PlaneHistory, PlaneInterval
from headrace.control.knob_limits import Bounds, Limits
from headrace.control.tuner import KnobDecision, propose

if TYPE_CHECKING:
    from collections.abc import Iterable

PERIOD_S = 0.1

START = Knobs(reads_in_flight=64, buffer_bytes=64 << 20)

LIMITS = Limits(buffer_bytes=Bounds(1 << 20, 1 << 31))


@dataclass
class Run:
    """Every interval of a run, the knobs in force, and the decision that followed."""

    intervals: list[PlaneInterval] = field(default_factory=list)
    decisions: list[KnobDecision] = field(default_factory=list)

    def rate(self, start_s: float, stop_s: float) -> float:
        part = self.intervals[round(start_s / PERIOD_S) : round(stop_s / PERIOD_S)]
        return sum(each.samples for each in part) / sum(each.seconds for each in part)

    def mean(self, knob: str, start_s: float, stop_s: float) -> float:
        part = self.intervals[round(start_s / PERIOD_S) : round(stop_s / PERIOD_S)]
        return sum(getattr(each.knobs, knob) for each in part) / len(part)

    def reaches(self, rate: float, start_s: float, stop_s: float) -> float | None:
        """Seconds from `start_s` until a second begins in which `rate` samples/s are delivered."""
        at = start_s
        while at + 1.0 <= stop_s:
            if self.rate(at, at + 1.0) >= rate:
                return at - start_s
            at += PERIOD_S
        return None

    def turns(self, start_s: float, stop_s: float) -> int:
        """How often knobs were turned."""
        part = self.intervals[round(start_s / PERIOD_S) : round(stop_s / PERIOD_S)]
        return sum(a.knobs != b.knobs for a, b in pairwise(part))


def tuned(
    plant: Plant,
    seconds: float,
    *,
    limits: Limits = LIMITS,
    history: PlaneHistory | None = None,
    run: Run | None = None,
) -> tuple[PlaneHistory, Run]:
    """Tune a plant for some simulated time; goes on from a history and a run."""
    history, run = history or PlaneHistory(), run or Run()
    for _ in range(round(seconds / PERIOD_S)):
        interval = plant.advance(PERIOD_S)
        history = history.after(interval)
        decision = propose(history, plant.knobs, limits)
        history = history.remembering(decision.memory)
        run.intervals.append(interval)
        run.decisions.append(decision)
        if decision.knobs != plant.knobs:
            plant.turn(decision.knobs)
    return history, run


def smallest(storage: Storage, consumer: Consumer, values: Iterable[int]) -> tuple[float, int, int]:
    """The best steady rate of all fixed settings, and the least of each knob within 1.5 % of it."""
    grid = sorted(values)
    batch_bytes = consumer.batch * consumer.sample_bytes
    best = steady_rate(storage, consumer, Knobs(grid[-1], batch_bytes * 150))

    def least(setting) -> int:
        low, high = 0, len(grid) - 1
        while low < high:
            middle = (low + high) // 2
            if steady_rate(storage, consumer, setting(grid[middle])) >= 0.985 * best:
                high = middle
            else:
                low = middle + 1
        return grid[low]

    reads = least(lambda value: Knobs(value, batch_bytes * 150))
    return best, reads, least(lambda value: Knobs(reads, batch_bytes * value))
