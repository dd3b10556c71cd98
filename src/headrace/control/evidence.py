"""Evidence: what a history says about the setting in force, and whether it says enough. Pure.

Verdicts come with their noise: the spread of the intervals gives a standard error, and a verdict
within it waits for more, up to a second and a half; then the mean decides.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from headrace.control.history import Window
from headrace.control.model import reads_per_sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.control.history import History, Interval, Knobs
    from headrace.control.memory import Memory

__all__ = ["PATIENCE_S", "SAME_RATE", "STALL_BAD", "STALL_OK", "Evidence", "last"]

STALL_OK = 0.01
"""Share of time that a consumer may wait without anything being done about it."""

STALL_BAD = 0.02
"""Above this it waits. Between the two nothing is changed, so that noise turns no knobs."""

SAME_RATE = 0.975
"""A smaller setting is as good when it reads at least this share of the best rate."""

LATENCY_STEP = 2.0
DEMAND_STEP = 1.6
"""Latency or demand that changes by such a factor is another regime, not noise."""

PATIENCE_S = 1.5
"""A verdict that is within its noise waits for more evidence, but not longer."""

WINDOW_S = 3.0
WINDOW_BATCHES = 40
"""What happened longer ago than both counts no more."""


class Evidence:
    """What the history says about `knobs`.

    Args:
        history: everything that was measured.
        knobs: in force.
        memory: since when they are, and what the regime was like.
    """

    def __init__(self, history: History, knobs: Knobs, memory: Memory) -> None:
        self.history = history
        self.knobs = knobs
        self.memory = memory
        intervals = history.since(memory.evidence_s)
        if memory.evidence_s == 0.0:  # the first batch has to be waited for, whatever is done
            first = next((at for at, each in enumerate(intervals) if each.batches), None)
            intervals = intervals[first + 1 :] if first is not None else intervals
        self.intervals = intervals

    @cached_property
    def window(self) -> Window:
        """The setting in force, as far back as it is of interest."""
        return Window.over(last(self.intervals, batches=WINDOW_BATCHES, seconds=WINDOW_S))

    @cached_property
    def recent(self) -> Window:
        """The shortest past that shows the storage's present latency."""
        return Window.over(last(self.intervals, reads=30, batches=1, seconds=0.2))

    @cached_property
    def latency_us(self) -> Sequence[int]:
        """Histogram of many reads: the tail takes more of them than a window has."""
        own = Window.over(last(self.intervals, reads=5000))
        if own.reads >= 500:
            return own.latency_us
        regime = self.history.since(self.memory.regime_s)
        return Window.over(last(regime, reads=5000)).latency_us

    @cached_property
    def delivered(self) -> Window:
        """The last deliveries, however long ago: they say what batches are like."""
        return Window.over(last(self.history.intervals, batches=64), histogram=False)

    def enough(self, batches: int) -> bool:
        """Whether the window is long enough to be looked at."""
        window = self.window
        if window.seconds < 0.25:
            return False
        if window.batches >= batches:
            return True
        # The storage is the limit: its reads are many more than the batches.
        reads = max(100, 4 * self.knobs.reads_in_flight)
        return window.stall > 0.5 and window.reads >= reads

    def served(self) -> bool:
        """Whether the consumer does not wait, beyond doubt."""
        window = self.window
        if not self.enough(batches=6) or window.batches < 6 or window.stall > STALL_OK:
            return False
        doubt = 0.0 if window.seconds >= PATIENCE_S else window.stall_error
        return window.stall + doubt <= STALL_BAD

    def flows(self) -> bool:
        """Whether as much is read as is delivered: a stock that is eaten up proves nothing."""
        window = self.window
        return window.reads >= 0.7 * window.samples * reads_per_sample(self.delivered)

    def waits(self) -> bool:
        """Whether the consumer waits, beyond doubt."""
        window = self.window
        if window.batches == 0:
            return window.waited_s >= max(0.15, 0.9 * window.seconds)
        if window.seconds < 0.25:
            return False
        if window.seconds >= PATIENCE_S and window.batches >= 12:
            return window.stall > STALL_BAD
        return window.stall - 2.0 * window.stall_error > STALL_BAD

    def news(self) -> str:
        """What has changed beyond noise since this regime was learned, in words; or ''."""
        return self.latency_news() or self._demand_news()

    def rate_known(self) -> bool:
        """Whether the storage's rate is known to within a few percent."""
        window = self.window
        if not self.enough(batches=8):
            return False
        return window.rate_error < 0.03 or window.seconds >= PATIENCE_S

    def latency_news(self) -> str:
        """What has changed about the storage's latency, in words; or ''."""
        memory = self.memory
        if not memory.latency_s:
            return ""
        recent = self.recent
        if recent.reads < 24:
            return ""
        # Reads that wait for each other take longer when more are in flight: that is no news.
        more = max(1.0, recent.in_flight) / memory.latency_reads
        fewer = self.knobs.reads_in_flight / max(1, memory.latency_knob)
        ratio = recent.latency_s / memory.latency_s
        if ratio > 1.0 and recent.in_flight < 0.5 * memory.latency_reads:
            return ""  # of a reader that waits for room only the slow reads are left
        if min(1.0, fewer) / LATENCY_STEP < ratio < LATENCY_STEP * max(1.0, more):
            return ""
        return f"reads take {recent.latency_s * 1e3:.3g} ms, no longer {memory.latency_s * 1e3:.3g}"

    def _demand_news(self) -> str:
        demand = self.memory.demand
        if not demand or self.window.stall > 0.9:  # it takes whatever comes
            return ""
        newest = last(self.intervals, batches=12)
        half = len(newest) // 2
        halves = [Window.over(part, histogram=False) for part in (newest[:half], newest[half:])]
        if min(each.batches for each in halves) < 3:
            return ""
        ratios = [(each.demand or demand) / demand for each in halves]
        if max(ratios) > 1.0 / DEMAND_STEP and min(ratios) < DEMAND_STEP:
            return ""
        return f"the consumer takes {ratios[1] * demand:,.0f} samples/s, no longer {demand:,.0f}"

    def facts(self) -> str:
        """The window in a line."""
        window = self.window
        parts = [
            f"{window.seconds:.2f} s",
            f"{window.rate:,.0f} samples/s",
            f"{window.reads:,} reads of {window.latency_s * 1e3:.3g} ms",
            f"{window.in_flight:.0f} in flight",
            f"waited {window.stall:.1%} +- {window.stall_error:.1%}",
        ]
        if window.demand:
            parts.append(f"demand {window.demand:,.0f}/s")
        return ", ".join(parts)


def last(
    intervals: Sequence[Interval],
    *,
    batches: int = 0,
    reads: int = 0,
    seconds: float = 0.0,
) -> Sequence[Interval]:
    """The fewest of the newest intervals that hold as much; all when they do not."""
    found_batches = found_reads = 0
    found_s = 0.0
    for at in range(len(intervals) - 1, -1, -1):
        found_batches += intervals[at].batches
        found_reads += intervals[at].reads
        found_s += intervals[at].seconds
        if found_batches >= batches and found_reads >= reads and found_s >= seconds - 1e-9:
            return intervals[at:]
    return intervals
