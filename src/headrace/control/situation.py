"""Situation: one call of the tuner: what is known, and the words in which it decides. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.control.evidence import Evidence
from headrace.control.memory import Memory
from headrace.control.model import BATCH_MARGIN, need, reads_per_sample

if TYPE_CHECKING:
    from headrace.control.history import History, Knobs
    from headrace.control.limits import Limits
    from headrace.control.model import Need

__all__ = ["BYTES", "DECODE", "GROWTH_MAX", "READS", "Decision", "Situation"]

GROWTH_MAX = 5.0
"""Largest factor of a single raise: the model may be wrong by more than the budget forgives."""

GROWTH_SURE = 2.0
"""The same where storage is fast already: a consumer that asks for all there is has a demand that no
storage meets, and what is held for it in vain is gigabytes, and time to fault them in."""

PLAUSIBLE_BYTES_PER_S = 2e9
"""Up to here a storage may well give several times as much as it does."""

TRANSITION_MAX_S = 8.0
"""So long at most the tuner waits for what was begun under the old setting."""

READS, BYTES, DECODE = "reads_in_flight", "buffer_bytes", "decode_threads"


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the knobs should stand, and why."""

    knobs: Knobs
    action: str
    """`hold`, `limit`, `raise`, `lower`, `correct`, `keep` or `roll back`."""
    reason: str
    evidence: str
    memory: Memory


class Situation:
    """What one call of `propose` knows, under short names.

    Attributes:
        knobs, memory, evidence, window: as far as the call has come.
        news: what has changed, as the beginning of the reason.
    """

    def __init__(self, history: History, knobs: Knobs, limits: Limits) -> None:
        self.history = history
        self.now_s = history.now_s
        self.knobs = knobs
        self.limits = limits
        self.memory = history.memory or Memory()
        self.news = ""
        self.look()

    def look(self) -> None:
        """Look at what was measured, as the memory says since when it counts."""
        self.evidence = Evidence(self.history, self.knobs, self.memory)
        self.window = self.evidence.window

    # -- what was measured ------------------------------------------------------------------------

    def learn(self) -> None:
        """Remember what the regime is like, as soon as enough was measured."""
        window, memory = self.window, self.memory
        if not memory.latency_s and window.reads >= 60:
            memory = self.knowing_latency(memory)
        if not memory.demand and window.batches >= 6 and window.demand:
            memory = replace(memory, demand=window.demand)
        self.memory = memory

    def knowing_latency(self, memory: Memory) -> Memory:
        """`memory`, with the latency under these knobs."""
        reads = max(1.0, self.window.in_flight)
        return replace(
            memory,
            latency_s=self.window.latency_s,
            latency_reads=reads,
            latency_knob=self.knobs.reads_in_flight,
        )

    def need(self) -> Need | None:
        """What the consumer needs, by the model; None: that is not known yet."""
        evidence = self.evidence
        return need(
            self.window,
            evidence.delivered,
            evidence.latency_us,
            self.knobs,
            demand_before=self.memory.demand,
            rate_max=self.rate_in_reach(),
        )

    def growth(self) -> float:
        """Largest factor of a raise, as much as the storage may plausibly still have in it."""
        batch = self.evidence.delivered
        per_read = batch.bytes / max(1.0, batch.samples * reads_per_sample(batch))
        now = self.window.read_rate * per_read
        return max(GROWTH_SURE, min(GROWTH_MAX, PLAUSIBLE_BYTES_PER_S / max(1.0, now)))

    def patient(self) -> bool:
        """Whether to look longer: a fast storage has little more to give, and a trial costs CPU."""
        return self.growth() < GROWTH_MAX and self.window.seconds < 1.0

    def rate_in_reach(self) -> float:
        """Samples per second that a single raise may aim at."""
        window = self.window
        read = window.read_rate / reads_per_sample(self.evidence.delivered)
        rate = max(window.rate, read)
        return self.growth() * rate if rate > 0.0 else math.inf

    def sure_rate(self) -> float:
        """Reads per second, less what may be luck: the best of several would be flattered."""
        return self.window.read_rate * (1.0 - min(0.1, self.window.rate_error))

    def short_of(self) -> tuple[str, ...]:
        """Which knobs hold the plane back, the likeliest first."""
        window, knobs = self.window, self.knobs
        known_s = window.decode_busy_s + window.decode_wait_s
        if knobs.decode_threads and window.decode_busy_s > 0.85 * known_s > 0:
            return (DECODE,)
        if window.batches and not window.reads:
            return ()  # copies from the page cache: no knob makes them faster
        pinned = window.in_flight / max(1, knobs.reads_in_flight)
        if pinned >= 0.95:
            return (READS,)
        return (READS, BYTES) if pinned >= 0.85 else (BYTES,)

    def batch_bytes(self) -> float:
        """What the buffer must count for a batch."""
        return self.evidence.delivered.batch_bytes * BATCH_MARGIN

    def above_floor(self, knob: str, value: int) -> int:
        """`value`, or the least above what is known to be too little."""
        floor = self.memory.floor(knob, self.now_s)
        if value > floor:
            return value
        return floor + max(1, int(0.9 * self.batch_bytes()) if knob == BYTES else floor // 15)

    # -- how a call ends --------------------------------------------------------------------------

    def hold(self, reason: str) -> Decision:
        """Stay at these knobs, with nothing decided."""
        return Decision(self.knobs, "hold", reason, self.facts(), self.memory)

    def keep(self, text: str, memory: Memory) -> Decision:
        """Stay at these knobs; the regime is known by what was measured under them."""
        if self.window.reads >= 60:
            memory = self.knowing_latency(memory)
        return Decision(self.knobs, "keep", text, self.facts(), memory)

    def change(self, knobs: Knobs, action: str, reason: str, memory: Memory) -> Decision:
        """Turn to `knobs`; what is measured until they show does not count."""
        evidence_s = self.now_s + self._transition_s(knobs)
        memory = replace(memory, evidence_s=evidence_s)
        return Decision(knobs, action, self.news + reason, self.facts(), memory)

    def _transition_s(self, knobs: Knobs) -> float:
        """How long the old setting goes on to show."""
        window, now = self.window, self.knobs
        settle_s = window.latency_percentile_s(0.9)
        if window.read_rate > 0 and knobs.reads_in_flight < now.reads_in_flight:
            # Reads that wait for each other in the storage are served first.
            settle_s = max(settle_s, window.in_flight / window.read_rate)
        less = now.buffer_bytes - knobs.buffer_bytes
        if less > 0 and window.demand and window.bytes:
            # What is ready beyond the new buffer is eaten first.
            byte_rate = window.demand * window.bytes / window.samples
            settle_s += min(less, window.ready_bytes) / byte_rate
        return min(TRANSITION_MAX_S, settle_s)

    def facts(self) -> str:
        """What was measured, for the log."""
        return self.evidence.facts()
