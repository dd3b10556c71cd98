"""Sharing: who gets how much of a file system. Plain functions of arrays: no clock, no I/O, no names.

`fill` pours one amount over many, `decide` does that for file systems, users, jobs and planes,
`demand_after` estimates what each could use. docs/policies.md says what the result keeps to.

Each file system's capacity is shared out among users, each user's part among the user's jobs, and each
job's part among its planes, for bytes and both classes of operations at once:

1. Guarantees first, as far as they are wanted: a user's go to the user's jobs.
2. Then priorities from the top: in each, weighted max-min among users, and among the jobs of each,
   up to what each wants and its cap.
3. Nobody wants what is left then. It is handed out by weight to whoever's cap allows, so that a job
   that wakes need not ask first; it is gone from there as soon as somebody wants it.

Nothing depends on the order in which users, jobs or planes come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


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
    last_event = starts + np.maximum(reached, 1) - 1
    left = more[of[starts]] - poured[last_event]
    level = at[last_event] + np.where(
        slope[last_event] > 0, left / np.maximum(slope[last_event], 1e-300), 0.0
    )
    by_group = np.zeros(len(more))
    by_group[of[starts]] = level
    return np.clip(by_group[group] * weight, low, high)


HEADROOM = 1.05
HEADROOM_HELD = 2.0
HALF_LIFE_S = 0.25
WAIT_SHARE = 0.02  # a flow that was held back for less of the time did not want for anything


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
    demand = max(rate, kept)
    return demand if demand > 1.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingProblem:
    """Who wants what. `R` resources; a user counts once for each file system, and so does a job."""

    capacity: Floats  # [systems, R] infinite where there is no limit
    system: Integers  # [users] the file system of each
    user_weight: Floats  # [users] above 0
    user_cap: Floats  # [users, R] infinite where there is none
    user_guarantee: Floats  # [users, R] 0 where there is none
    user: Integers  # [jobs] the user of each
    job_weight: Floats  # [jobs] above 0
    job_cap: Floats  # [jobs, R]
    job_guarantee: Floats  # [jobs, R]
    priority: Integers  # [jobs] integers; the largest first
    job: Integers  # [flows] the job of each; a flow is what one plane reads for one job
    demand: Floats  # [flows, R] what it could use; infinite while it waits
    held: NDArray[np.bool_]  # [flows] its plane says nothing, but may still use `grant`
    grant: Floats  # [flows, R] what it has; counts where `held`


@dataclass(frozen=True, slots=True)
class SharingResult:
    """Who gets what."""

    flows: Floats  # [flows, R] each plane's part of each job
    jobs: Floats  # [jobs, R]
    wanted: Floats  # [jobs, R] the part of `jobs` that answers a demand; the rest is spare


def decide(problem: SharingProblem) -> SharingResult:
    """Share everything out. See the module's text."""
    p = problem
    held = p.held[:, None]
    grant = np.where(held & np.isfinite(p.grant), p.grant, 0.0)
    flow_high = np.where(held, grant, p.demand)
    jobs, users = len(p.user), len(p.system)
    reserved = _sums(p.job, grant, jobs)
    job_high = np.maximum(np.minimum(p.job_cap, _sums(p.job, flow_high, jobs)), reserved)
    job_low = _guaranteed(p, job_high, reserved)
    wanted = _by_priority(p, job_low, job_high)
    spare_high = np.maximum(p.job_cap, wanted)
    user_wanted = _sums(p.user, wanted, users)
    user_high = np.maximum(np.minimum(p.user_cap, _sums(p.user, spare_high, users)), user_wanted)
    user_all = _fill(p.system, p.user_weight, user_wanted, user_high, p.capacity)
    job_all = _fill(p.user, p.job_weight, wanted, spare_high, user_all)
    even = np.ones(len(p.job))
    flows = _fill(p.job, even, np.minimum(grant, flow_high), flow_high, wanted)
    most = np.where(held, grant, np.inf)
    flows = _fill(p.job, even, flows, np.maximum(most, flows), job_all)
    # A silent plane cannot be told of more, nor of less, even if it has more than there is.
    return SharingResult(np.where(held, grant, flows), job_all, wanted)


def _guaranteed(p: SharingProblem, high: Floats, reserved: Floats) -> Floats:
    """The least that each job gets: guarantees of its own and of its user, within caps and capacity."""
    users, systems = len(p.system), len(p.capacity)
    low = np.maximum(np.minimum(p.job_guarantee, high), reserved)
    promised = np.minimum(p.user_guarantee, _sums(p.user, high, users))
    promised = np.maximum(promised, _sums(p.user, low, users))
    most = np.maximum(p.user_cap, _sums(p.user, reserved, users))
    low = _fill(p.user, p.job_weight, low, high, np.minimum(promised, most))
    # More was promised than there is: each gets the same part of its own, beyond what is in use.
    open_ = _less(low, reserved)
    in_use = _sums(p.system, _sums(p.user, reserved, users), systems)
    asked = _sums(p.system, _sums(p.user, open_, users), systems)
    there = _less(p.capacity, in_use)
    part = np.ones(asked.shape)
    np.divide(there, asked, out=part, where=asked > there)
    guaranteed: Floats = np.minimum(reserved, low) + open_ * part[p.system][p.user]
    return guaranteed


def _by_priority(p: SharingProblem, low: Floats, high: Floats) -> Floats:
    """What each job gets of what it wants: one priority after the other."""
    users, systems = len(p.system), len(p.capacity)
    given = low.copy()
    for level in np.unique(p.priority)[::-1]:
        mine = (p.priority == level)[:, None]
        others = _sums(p.user, np.where(mine, 0.0, given), users)
        user_low = _sums(p.user, np.where(mine, low, 0.0), users)
        wanted = _sums(p.user, np.where(mine, high, 0.0), users)
        user_high = np.minimum(_less(p.user_cap, others), wanted)
        user_high = np.maximum(user_high, user_low)
        left = _less(p.capacity, _sums(p.system, others, systems))
        user_given = _fill(p.system, p.user_weight, user_low, user_high, left)
        poured = _fill(
            p.user, p.job_weight,
            np.where(mine, low, 0.0), np.where(mine, high, 0.0), user_given,
        )  # fmt: skip
        given = np.where(mine, poured, given)
    return given


def _less(amount: Floats, taken: Floats) -> Floats:
    """What is left of each; of an infinite amount, all."""
    finite = np.isfinite(amount)
    left = np.where(finite, amount, 0.0) - np.where(finite, taken, 0.0)
    return np.where(finite, np.maximum(left, 0.0), np.inf)


def _sums(group: Integers, values: Floats, groups: int) -> Floats:
    """Sum [n, R] over groups to [groups, R]."""
    columns = [np.bincount(group, values[:, r], groups) for r in range(values.shape[1])]
    return np.stack(columns, axis=1) if columns else np.zeros((groups, 0))


def _fill(group: Integers, weight: Floats, low: Floats, high: Floats, amount: Floats) -> Floats:
    """`fill` for [n, R] and [groups, R]."""
    pairs = zip(low.T, high.T, amount.T, strict=True)
    columns = [fill(group, weight, *each) for each in pairs]
    return np.stack(columns, axis=1) if columns else np.zeros(low.shape)
