"""Fill: weighted max-min with bounds, exact, for many groups at once.

In each group everybody gets `level * weight`, but at least `low` and at most `high`; the level is the
one at which the group's amount is used up. Found by walking along the levels at which somebody
reaches a bound: the sum grows linearly between them. Exact, and as fast as sorting; whoever's part is
known without a level is not sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["fill"]


def fill(
    group: NDArray[np.int64], weight: Floats, low: Floats, high: Floats, amount: Floats
) -> Floats:
    """Share each group's amount out among its members.

    Args:
        group: [n] the group of each, 0 to len(amount) - 1.
        weight: [n] above 0.
        low: [n] the least each gets, infinite only where the amount is; if all these together are
            too much, they are scaled down.
        high: [n] the most each gets, at least `low`; may be infinite.
        amount: [groups] to be shared out; may be infinite.

    Returns:
        [n] what each gets. Sums to the group's amount, or to the sum of `high` if that is less.
    """
    groups = len(amount)
    lows = np.bincount(group, low, groups)
    highs = np.bincount(group, high, groups)
    enough, short = amount >= highs, lows > amount
    scale = np.ones(groups)
    np.divide(amount, lows, out=scale, where=short)
    given = np.where(enough[group], high, low)
    of_short = short[group]
    given[of_short] = low[of_short] * scale[group][of_short]
    # Who is left gets something between its bounds.
    between = np.flatnonzero(~(enough | short)[group] & (high > low))
    if not len(between):
        return given
    alone = np.bincount(group[between], minlength=groups)[group[between]] == 1
    ones, many = between[alone], between[~alone]
    rest = amount[group[ones]] - (lows[group[ones]] - low[ones])
    given[ones] = np.clip(rest, low[ones], high[ones])
    if len(many):
        more = np.where(enough, 0.0, amount) - np.where(enough, 0.0, lows)
        given[many] = _poured(group[many], weight[many], low[many], high[many], more)
    return given


def _poured(
    group: NDArray[np.int64], weight: Floats, low: Floats, high: Floats, more: Floats
) -> Floats:
    """What each gets where `more` is to be shared out beyond `low`, which is less than `high` is."""
    # Events: at low/weight somebody begins to get more, at high/weight no more.
    bounded = np.flatnonzero(np.isfinite(high))
    at = np.concatenate([low / weight, high[bounded] / weight[bounded]])
    of = np.concatenate([group, group[bounded]])
    turn = np.concatenate([weight, -weight[bounded]])
    order = np.lexsort((at, of))
    at, of, turn = at[order], of[order], turn[order]
    starts = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
    lengths = np.diff(np.append(starts, len(of)))
    slope = np.cumsum(turn)
    slope = np.maximum(slope - np.repeat(slope[starts] - turn[starts], lengths), 0.0)
    # How much was poured between an event and the one before of the same group.
    grown = np.zeros(len(at))
    grown[1:] = slope[:-1] * (at[1:] - at[:-1])
    grown[starts] = 0.0
    poured = np.cumsum(grown)
    poured -= np.repeat(poured[starts], lengths)
    # The last event of each group that is reached before all has been poured.
    reached = np.add.reduceat(poured <= more[of], starts, dtype=np.int64)
    found = starts + np.maximum(reached, 1) - 1
    left = more[of[starts]] - poured[found]
    level = at[found] + np.where(slope[found] > 0, left / np.maximum(slope[found], 1e-300), 0.0)
    by_group = np.zeros(len(more))
    by_group[of[starts]] = level
    return np.clip(by_group[group] * weight, low, high)
