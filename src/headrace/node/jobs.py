"""Jobs: the clients that belong together, what they hold, what they got and how they fared.

Figures are added up for as long as the daemon runs, and bounded: a job's are kept while it has clients and a
while after, and only so many jobs have a label of their own in metrics; all others are added up in one.
Figures never go down, whoever comes and goes, as Prometheus needs it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.control.prometheus import OTHER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.node.session import Session
    from headrace.node.wire import Note


@dataclass(slots=True)
class ClientJob:
    """The clients of one job, and what they hold together."""

    name: str
    window_bytes: int
    tally: JobTally
    sessions: set[Session] = field(default_factory=set)
    held_bytes: int = 0
    reading: int = 0  # batches under way
    _totals: JobTotals | None = None

    @property
    def totals(self) -> JobTotals:
        """Its figures, from when they are first needed."""
        if self._totals is None:
            self._totals = self.tally.begin(self.name, time.monotonic())
        return self._totals

    @property
    def counted(self) -> bool:
        """Whether it has figures: one that only asks for the daemon's state has none."""
        return self._totals is not None


CAUSES: Final = (
    Cause.STORAGE, Cause.PREFETCH, Cause.MEMORY, Cause.POLICY, Cause.WINDOW, Cause.DIRECT, Cause.DECODE,
)  # fmt: skip
"""Why a training step waits, as far as the daemon can know."""

LABELS_MAX: Final = 64

KEPT_S: Final = 900.0
"""Figures of a job whose clients have gone are shown so long: longer than anybody's scrape interval."""

_SERVED: Final = tuple(cause for cause in CAUSES if cause is not Cause.DIRECT)


@dataclass(slots=True)
class JobTotals:
    """What the clients of one job got from the daemon, and what they said of their consumers."""

    batches: int = 0  # delivered by the daemon
    samples: int = 0
    bytes: int = 0
    ram_bytes: int = 0  # of these, bytes that were in the daemon's memory
    busy: int = 0  # batches refused for want of room in a window
    failed: int = 0
    consumed_batches: int = 0  # delivered to consumers, however they were read; as clients say
    consumed_samples: int = 0
    consumed_bytes: int = 0
    direct_batches: int = 0  # of these, batches that clients read by themselves
    worked_s: float = 0.0
    stall_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    _served_s: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(_SERVED, 0.0))
    """Seconds that batches took since the note before, by what they waited for."""

    def served(self, samples: int, nbytes: int, ram_bytes: int, batches: int = 1) -> None:
        """Count what was delivered, or taken by a client out of the daemon's memory."""
        self.batches += batches
        self.samples += samples
        self.bytes += nbytes
        self.ram_bytes += ram_bytes

    def took(self, cause: Cause, seconds: float) -> None:
        """A batch spent so long on its way for this reason."""
        self._served_s[cause] += seconds

    def note(self, note: Note, under_way: Cause) -> None:
        """Count what a client says. Seconds that it waited for us get the causes that we saw lately.

        `under_way` is what its job waits for now; it counts where no batch has come since the note before.
        """
        self.consumed_batches += note.batches
        self.consumed_samples += note.samples
        self.consumed_bytes += note.nbytes
        self.direct_batches += note.direct_batches
        self.worked_s += note.worked_s
        self.stall_s[Cause.DIRECT] += note.direct_s
        self.stall_s[Cause.DECODE] += note.decode_s
        total = sum(self._served_s.values())
        for cause, seconds in self._served_s.items():
            if total > 0.0:
                self.stall_s[cause] += note.waited_s * seconds / total
            self._served_s[cause] = 0.0
        if total <= 0.0:
            self.stall_s[under_way] += note.waited_s

    def add(self, other: JobTotals) -> None:
        """Add another job's figures."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for cause, seconds in other.stall_s.items():
            self.stall_s[cause] += seconds

    def as_dict(self) -> dict[str, object]:
        """The figures as plain values."""
        stalls = {cause.value: round(s, 6) for cause, s in self.stall_s.items()}
        return {**{name: getattr(self, name) for name in _COUNTS}, "stall_s": stalls}


_COUNTS: Final = tuple(f.name for f in fields(JobTotals) if f.name not in ("stall_s", "_served_s"))


class JobTally:
    """The figures of all jobs. For the daemon's loop alone.

    `labels_max` jobs have a label of their own at a time; it is kept for `kept_s` when their clients have
    gone.
    """

    def __init__(self, labels_max: int = LABELS_MAX, kept_s: float = KEPT_S) -> None:
        self._labels_max = labels_max
        self._kept_s = kept_s
        self._working: dict[str, JobTotals] = {}
        self._labelled: set[str] = set()
        self._ended: dict[str, tuple[float, JobTotals]] = {}  # all of them labelled
        self._others = JobTotals()  # of those that ended without a label
        self._forgotten = JobTotals()  # of those whose label is free again

    def begin(self, name: str, now: float) -> JobTotals:
        """A job's first client has come."""
        self._forget(now)
        ended = self._ended.pop(name, None)
        totals = ended[1] if ended is not None else JobTotals()
        if ended is not None or (len(self._labelled) < self._labels_max and name != OTHER):
            self._labelled.add(name)
        self._working[name] = totals
        return totals

    def end(self, name: str, now: float) -> None:
        """A job's last client has gone."""
        totals = self._working.pop(name, None)
        if totals is None:
            return
        if name in self._labelled:
            self._ended[name] = (now, totals)
        else:
            self._others.add(totals)
        self._forget(now)

    def _forget(self, now: float) -> None:
        for name, (ended, _) in tuple(self._ended.items()):
            if now - ended > self._kept_s:
                self._forgotten.add(self._ended.pop(name)[1])
                self._labelled.discard(name)

    def total(self) -> JobTotals:
        """The figures of all jobs there ever were."""
        overall = JobTotals()
        ended = (totals for _, totals in self._ended.values())
        for totals in (self._forgotten, self._others, *ended, *self._working.values()):
            overall.add(totals)
        return overall

    def by_label(self, now: float) -> Mapping[str, JobTotals]:
        """The figures of each label; `OTHER` is all that have none, and comes when there are any."""
        self._forget(now)
        labelled = {name: totals for name, (_, totals) in self._ended.items()}
        others = JobTotals()
        others.add(self._others)
        for name, totals in self._working.items():
            if name in self._labelled:
                labelled[name] = totals
            else:
                others.add(totals)
                labelled[OTHER] = others
        if others != JobTotals():
            labelled[OTHER] = others
        return labelled
