"""Quota: how the memory for samples is shared out among data sets: a plain function.

Each data set that somebody uses gets the same, but never more than it needs, nor more than its jobs
may have; what one does not need goes to the others. Data sets that nobody uses keep what is left, the
one that was used last first: samples are kept rather than churned.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Want", "share_out"]


@dataclass(frozen=True, slots=True)
class Want:
    """What one data set could use."""

    needed_bytes: int
    """For all of its samples."""

    held_bytes: int
    """What it has now."""

    jobs: frozenset[str]
    """Who uses it; empty: nobody."""

    used_s: float
    """When it was last used; any clock."""


def share_out(
    total_bytes: int,
    job_bytes: int | None,
    wants: Sequence[Want],
    quotas_of_jobs: Mapping[str, int] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Return the quota of each data set, in bytes.

    Args:
        total_bytes: for all.
        job_bytes: for the data sets of one job together; a data set of several jobs counts for each
            of them by its share. None: no limit.
        wants: the data sets. The result does not depend on their order.
        quotas_of_jobs: what some jobs may have instead of `job_bytes`.
    """
    quotas = [0] * len(wants)
    active = [i for i, want in enumerate(wants) if want.jobs]
    caps = {i: wants[i].needed_bytes for i in active}
    if job_bytes is not None or quotas_of_jobs:
        shares = _job_shares(job_bytes, quotas_of_jobs, total_bytes, wants, active)
        caps = {i: min(caps[i], shares[i]) for i in active}
    left = total_bytes
    # The smallest first: what it leaves of its share is the others'.
    by_cap = sorted(active, key=lambda i: caps[i])
    for done, i in enumerate(by_cap):
        quotas[i] = min(caps[i], left // (len(by_cap) - done))
        left -= quotas[i]
    idle = [i for i, want in enumerate(wants) if not want.jobs]
    for i in sorted(idle, key=lambda i: (-wants[i].used_s, wants[i].held_bytes)):
        # Samples lie in large pieces: a part of what is held may be nothing.
        quotas[i] = min(wants[i].held_bytes, left)
        left -= quotas[i]
    return tuple(quotas)


def _job_shares(
    job_bytes: int | None,
    quotas_of_jobs: Mapping[str, int],
    total_bytes: int,
    wants: Sequence[Want],
    active: Sequence[int],
) -> dict[int, int]:
    """What each data set may take of its jobs' quotas: of each job the same for all its data sets."""
    used_by: dict[str, int] = {}
    for i in active:
        for job in wants[i].jobs:
            used_by[job] = used_by.get(job, 0) + 1
    others = total_bytes if job_bytes is None else job_bytes
    return {
        i: sum(quotas_of_jobs.get(job, others) // used_by[job] for job in wants[i].jobs)
        for i in active
    }
