"""Demand: what a flow could use, from what it used and whether it waited.

Nobody declares demand: programs do not know theirs. A flow that had to wait could use more, nobody
knows how much more: all it can get. One that did not wait uses what it uses, and a little more, so
that it can grow without waiting; what it used a moment ago still counts for half, so that bursts do
not make its share tremble.
"""

from __future__ import annotations

import math

__all__ = ["HALF_LIFE_S", "HEADROOM", "HEADROOM_HELD", "WAIT_SHARE", "demand_after"]

HEADROOM = 1.05
HEADROOM_HELD = 2.0
HALF_LIFE_S = 0.25
WAIT_SHARE = 0.02
"""A flow that was held back for less of the time did not want for anything."""


def demand_after(
    before: float, used: float, seconds: float, held_s: float, waiting: float, *, held: bool = False
) -> float:
    """Estimate the demand after an interval.

    Args:
        before: the estimate before it, per second; infinite or 0 where there is none.
        used: what was used in it.
        seconds: its length.
        held_s: how long at least one request was held back.
        waiting: what is held back now.
        held: another of its limits holds it back; when that is raised, it needs more of this too.

    Returns:
        Per second; infinite: all it can get.
    """
    if waiting > 0 or held_s > WAIT_SHARE * seconds:
        return math.inf
    rate = used / max(seconds, 1e-3) * (HEADROOM_HELD if held else HEADROOM)
    kept = before * 0.5 ** (seconds / HALF_LIFE_S) if math.isfinite(before) else 0.0
    found = max(rate, kept)
    return found if found > 1.0 else 0.0
