"""Ledger: what is added up of jobs and of the node: totals for Prometheus, amounts by minute for the history.

Bounded: jobs that ended are forgotten after a while, and when the history cannot be written for long, the
oldest minutes that wait are added up in one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.base.job import JobIdentity

__all__ = ["BUCKET_S", "NODE", "PEAKS", "Entry", "JobFacts", "Ledger", "Page"]

BUCKET_S: Final = 60
"""The history tells amounts by the minute."""

NODE: Final = ""
"""The "job" that stands for the whole node."""

PEAKS: Final = frozenset({"memory_bytes", "gpu_memory_bytes", "gpus", "nodes"})
"""Figures of which the largest counts; of all others, the sum."""

WAITING_MAX: Final = 200_000
"""Entries that wait to be written: about 30 MB."""

Entry = tuple[int, str, str, str, str]
"""Start of the minute, job, figure, label, file system."""


@dataclass(slots=True)
class JobFacts:
    """What is known of a job on this node, beside its figures."""

    identity: JobIdentity
    user: str
    first_s: float
    last_s: float
    measured: bool = False
    """headrace told how it fared."""


@dataclass(slots=True)
class Page:
    """What waits to be written."""

    amounts: dict[Entry, float] = field(default_factory=dict)
    jobs: dict[str, JobFacts] = field(default_factory=dict)
    tellers: dict[str, tuple[str, float, dict[tuple[str, str, str], float]]] = field(
        default_factory=dict
    )
    """By instance: the job, when it told, what it told: the next message counts from there."""

    def __bool__(self) -> bool:
        return bool(self.amounts or self.jobs or self.tellers)


class Ledger:
    """Adds up. One thread at a time."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str, str], float] = {}
        self.gauges: dict[tuple[str, str], float] = {}
        """Of the node, as they are now."""
        self._page = Page()

    def add(  # noqa: PLR0917 - what, how much, when, of what: the same order everywhere
        self, job: str, name: str, amount: float, now_s: float, label: str = "", system: str = ""
    ) -> None:
        """Add to a figure.

        Args:
            job: its id, or `NODE`.
            name: of the figure.
            amount: 0 is nothing to tell.
            now_s: Unix seconds.
            label: a cause, a tier, a device.
            system: file system.
        """
        key = (job, name, label, system)
        if amount > 0.0:
            minute = int(now_s // BUCKET_S) * BUCKET_S
            entry, amounts = (minute, *key), self._page.amounts
            amounts[entry] = _joined(name, amounts.get(entry), amount)
        if amount > 0.0 or job == NODE:  # a device that does nothing is there
            self.totals[key] = _joined(name, self.totals.get(key), amount)

    def know(self, job: str, facts: JobFacts) -> None:
        """Remember what is known of a job."""
        self._page.jobs[job] = facts

    def remember(
        self, instance: str, job: str, now_s: float, figures: dict[tuple[str, str, str], float]
    ) -> None:
        """Remember what a process told, so that nothing is counted twice."""
        self._page.tellers[instance] = (job, now_s, figures)

    def forget(self, jobs: Iterable[str]) -> None:
        """These ended a while ago: their totals are told no more. The history keeps them."""
        gone = set(jobs)
        self.totals = {key: value for key, value in self.totals.items() if key[0] not in gone}

    def take(self) -> Page:
        """What waits to be written; waits no more."""
        page, self._page = self._page, Page()
        return page

    def give_back(self, page: Page) -> None:
        """It could not be written: it waits again, with what came meanwhile."""
        newer = self._page
        for entry, amount in newer.amounts.items():
            page.amounts[entry] = _joined(entry[2], page.amounts.get(entry), amount)
        page.jobs |= newer.jobs
        page.tellers |= newer.tellers
        if len(page.amounts) > WAITING_MAX:
            page.amounts = _coarser(page.amounts)
        self._page = page

    @property
    def waiting(self) -> int:
        """Entries that wait to be written."""
        return len(self._page.amounts)


def _joined(name: str, before: float | None, amount: float) -> float:
    if before is None:
        return amount
    return max(before, amount) if name in PEAKS else before + amount


def _coarser(amounts: dict[Entry, float]) -> dict[Entry, float]:
    """The older half of the minutes as one."""
    minutes = sorted({entry[0] for entry in amounts})
    until = minutes[len(minutes) // 2]
    found: dict[Entry, float] = {}
    for (minute, job, name, label, system), amount in amounts.items():
        entry = (max(minute, until), job, name, label, system)
        found[entry] = _joined(entry[2], found.get(entry), amount)
    return found
