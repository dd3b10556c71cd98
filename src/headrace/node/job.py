"""Job: the clients that belong together, what they hold, and what they got."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.node.session import Session
    from headrace.node.tally import JobTotals, Tally

__all__ = ["Job"]


@dataclass(slots=True)
class Job:
    """The clients of one job, and what they hold together."""

    name: str
    window_bytes: int
    tally: Tally
    sessions: set[Session] = field(default_factory=set)
    held_bytes: int = 0
    reading: int = 0
    """Batches under way."""
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

    def end(self) -> None:
        """Its last client has gone."""
        if self._totals is not None:
            self.tally.end(self.name, time.monotonic())
