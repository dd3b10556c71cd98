"""Ranks: how long a rank waited for others that had no data, as they all go on together. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["slow_rank"]

_PATIENCE_S = 7 * 86400.0


def slow_rank(
    own: NDArray[np.void], others: Sequence[NDArray[np.void]]
) -> tuple[float, int | None]:
    """How long this rank waited for slower ones, and which one it waited for most.

    A rank that has its batch and must wait for another spends that time between its delivery and its next
    request, as a longer step. Both must be so: the other waited longer for its batch, and this one's
    step took longer than the shortest one. Only durations are compared: clocks of nodes differ.

    Args:
        own: steps of this rank, dtype `STEP`.
        others: those of the other ranks; they are matched by epoch and step.

    Returns:
        Seconds, and the number of the other rank among `others`; None: none was slower.
    """
    mine = _durations(own)
    theirs = [_durations(each) for each in others]
    total, by_rank = 0.0, np.zeros(len(others))
    for key, (waited_s, worked_s) in mine.items():
        found = [(at, rank[key]) for at, rank in enumerate(theirs) if key in rank]
        if not found or worked_s is None:
            continue
        at, (slowest_s, _) = max(found, key=lambda each: each[1][0])
        works = [worked for _, (_, worked) in found if worked is not None]
        shortest_s = min([worked_s, *works])
        lost_s = min(slowest_s - waited_s, worked_s - shortest_s)
        if works and lost_s > 0.0:
            total += lost_s
            by_rank[at] += lost_s
    return total, int(by_rank.argmax()) if total else None


def _durations(steps: NDArray[np.void]) -> dict[tuple[int, int], tuple[float, float | None]]:
    """By epoch and step: the wait, and the work until the next request; None: there was none."""
    if not len(steps) or not {"epoch", "step", "asked_s", "delivered_s"} <= set(
        steps.dtype.names or ()
    ):
        return {}
    asked = steps["asked_s"].astype(np.float64)
    worked = np.full(len(steps), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        waited = steps["delivered_s"].astype(np.float64) - asked
        worked[:-1] = asked[1:] - steps["delivered_s"][:-1]
    worked[:-1][steps["epoch"][1:] != steps["epoch"][:-1]] = np.nan
    found = {}
    for at in range(len(steps)):
        if not 0.0 <= waited[at] <= _PATIENCE_S:
            continue
        work = float(worked[at])
        key = int(steps["epoch"][at]), int(steps["step"][at])
        found[key] = float(waited[at]), work if 0.0 <= work <= _PATIENCE_S else None
    return found
