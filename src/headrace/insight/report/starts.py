"""Starts: a run that was started again: for how long no rank ran, and how many steps came again.

Whoever is started again is another process. What the start before had delivered behind the position at which
the next went on was lost with it, and came again (`headrace.insight.deliveries`); counted here from where an
epoch's steps lie, which are evenly apart, since no step of a long run is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from headrace.base.text import counted, duration_text, times_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.insight.report.figures import Curves, EpochSum


def pauses_between(curves: Sequence[Curves]) -> list[tuple[float, float]]:
    """Unix times between which no rank had a step, since others were to be started."""
    ordered = sorted(curves, key=lambda curve: float(curve.times[0]))
    last_of = {curve.process: at for at, curve in enumerate(ordered)}
    pauses: list[tuple[float, float]] = []
    until_s, last = math.inf, -1
    for at, curve in enumerate(ordered):
        begin_s, end_s = float(curve.times[0]), float(curve.times[-1])
        if last < at and begin_s > until_s:  # nobody from before is there any more
            pauses.append((until_s, begin_s))
        until_s = max(end_s, until_s) if math.isfinite(until_s) else end_s
        last = max(last, last_of[curve.process])
    return pauses


def start_of(curve: Curves, pauses: Sequence[tuple[float, float]]) -> int:
    """Which start of the run a trace belongs to, from 1 on."""
    return 1 + sum(end_s <= float(curve.times[0]) for _, end_s in pauses)


def begins_text(curves: Sequence[Curves], pauses: Sequence[tuple[float, float]]) -> str:
    """At which step of its ranks each start after the first begins, as they lie one behind the other."""
    texts = []
    for start in range(2, min(len(pauses), _BEGINS_MAX) + 2):
        steps = Counter[int]()
        for curve in curves:
            if start_of(curve, pauses) < start:
                steps[curve.rank] += int(curve.ordinals[-1])
        texts.append(f"start {start} at step {max(steps.values(), default=0):,}")
    return f" The run was started again: {', '.join(texts)}." if texts else ""


_BEGINS_MAX: Final = 8


def steps_again(curves: Sequence[Curves]) -> int:
    """Steps of one loader, of all ranks, that came again in a later start."""
    starts: list[list[Curves]] = []
    for curve in sorted(curves, key=lambda each: float(each.times[0])):
        before = starts[-1] if starts else []
        alike = all(each.world_size == curve.world_size for each in before)
        begun = any(e.rank == curve.rank and e.process != curve.process for e in before)
        if not before or begun or not alike:
            starts.append([])
        starts[-1].append(curve)
    again, went_on = 0, (math.inf, 0.0)
    for start in reversed(starts):
        epochs = [epoch for curve in start for epoch in curve.epochs]
        again += sum(_behind(epoch, *went_on) for epoch in epochs)
        went_on = min([went_on, *((float(one.epoch), one.first) for one in epochs)])
        if _anew(start):
            went_on = math.inf, 0.0  # what came before stands beside it
    return again


def _anew(curves: Sequence[Curves]) -> bool:
    """Whether they began at the beginning, and no state had been loaded."""
    epochs = [epoch.epoch for curve in curves for epoch in curve.epochs]
    return min(epochs, default=1) == 0 and all(curve.origin == "beginning" for curve in curves)


def _behind(one: EpochSum, epoch: float, position: float) -> int:
    """Steps of a rank's epoch from a position of an epoch on."""
    steps = round(one.of("steps"))
    if one.epoch != epoch:
        return steps if one.epoch > epoch else 0
    apart = (one.last - one.first) / max(1, steps - 1) or 1.0
    return steps - min(steps, max(0, math.ceil((position - one.first) / apart)))


def restart_text(
    pauses: Sequence[tuple[float, float]], again: int, first_s: float, *, ranks: int
) -> str:
    """What is to be said of it; "" if the run was started once."""
    texts = []
    if pauses:
        took = duration_text(sum(end_s - begin_s for begin_s, end_s in pauses))
        begin = f"from {duration_text(pauses[0][0] - first_s)} on"
        when = f" {times_text(len(pauses))}: no rank had a step for {took} in all, the first time {begin}."
        once = f": no rank had a step for {took}, {begin}."
        texts += ["The run was started again" + (when if len(pauses) > 1 else once)]
    if again:
        of = " of all ranks" if ranks > 1 else ""
        texts += [
            f"{counted(again, 'step')}{of} came again after that; both deliveries count here."
        ]
    return " ".join(texts)
