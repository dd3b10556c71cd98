"""Decide: from what everybody could use to what everybody may have.

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

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.control.sharing.fill import fill

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

__all__ = ["Problem", "Shares", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Who wants what. `R` resources; a user counts once for each file system, and so does a job.

    Attributes:
        capacity: [systems, R] infinite where there is no limit.
        system: [users] the file system of each.
        user_weight: [users] above 0.
        user_cap: [users, R] infinite where there is none.
        user_guarantee: [users, R] 0 where there is none.
        user: [jobs] the user of each.
        job_weight: [jobs] above 0.
        job_cap: [jobs, R]
        job_guarantee: [jobs, R]
        priority: [jobs] integers; the largest first.
        job: [flows] the job of each; a flow is what one plane reads for one job.
        demand: [flows, R] what it could use; infinite while it waits.
        held: [flows] its plane says nothing, but may still use `grant`.
        grant: [flows, R] what it has; counts where `held`.
    """

    capacity: Floats
    system: Integers
    user_weight: Floats
    user_cap: Floats
    user_guarantee: Floats
    user: Integers
    job_weight: Floats
    job_cap: Floats
    job_guarantee: Floats
    priority: Integers
    job: Integers
    demand: Floats
    held: NDArray[np.bool_]
    grant: Floats


@dataclass(frozen=True, slots=True)
class Shares:
    """Who gets what.

    Attributes:
        flows: [flows, R] each plane's part of each job.
        jobs: [jobs, R]
        wanted: [jobs, R] the part of `jobs` that answers a demand; the rest is spare.
    """

    flows: Floats
    jobs: Floats
    wanted: Floats


def decide(problem: Problem) -> Shares:
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
    return Shares(np.where(held, grant, flows), job_all, wanted)


def _guaranteed(p: Problem, high: Floats, reserved: Floats) -> Floats:
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
    found: Floats = np.minimum(reserved, low) + open_ * part[p.system][p.user]
    return found


def _by_priority(p: Problem, low: Floats, high: Floats) -> Floats:
    """What each job gets of what it wants: one priority after the other."""
    users, systems = len(p.system), len(p.capacity)
    given = low.copy()
    for level in np.unique(p.priority)[::-1]:
        mine = (p.priority == level)[:, None]
        others = _sums(p.user, np.where(mine, 0.0, given), users)
        user_low = _sums(p.user, np.where(mine, low, 0.0), users)
        user_high = np.minimum(
            _less(p.user_cap, others),
            _sums(p.user, np.where(mine, high, 0.0), users),
        )
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
    columns = [
        fill(group, weight, low[:, r], high[:, r], amount[:, r]) for r in range(low.shape[1])
    ]
    return np.stack(columns, axis=1) if columns else np.zeros(low.shape)
