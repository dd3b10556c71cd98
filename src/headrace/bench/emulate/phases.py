"""Phases: what a run's time went to as a whole, until the solution, as MLPerf HPC splits it.

Staging is copying data to where they are read from; training, evaluation and checkpointing speak for
themselves; what remains (engines that start, ranks that wait for each other between blocks) is `other`. They
add up to all of it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PHASES", "Phase", "PhaseTimes"]

Phase = Literal["staging", "training", "evaluation", "checkpointing", "other"]

PHASES: Final[tuple[Phase, ...]] = (
    "staging", "training", "evaluation", "checkpointing", "other",
)  # fmt: skip


class PhaseTimes:
    """A stopwatch that always counts for one phase; for `other` to begin with.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since_s = now()
        self._phase: Phase = "other"
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Count for a phase, and then again for the one before."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def seconds(self) -> dict[Phase, float]:
        """So far, by phase."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, phase: Phase) -> Phase:
        now_s, before = self._now(), self._phase
        self._seconds[before] += now_s - self._since_s
        self._since_s, self._phase = now_s, phase
        return before
