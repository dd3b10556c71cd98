"""Tuner: from what was measured on a plane to where its knobs should stand. A pure function.

The goal is the fewest resources that keep the consumer from waiting; where the storage cannot do
that, the fewest that get out of it what it can give. Knobs follow the model (`headrace.control.model`)
first; every change is then a trial, judged by what was measured under it and taken back when it did
not help. What was in vain is tried again later and later, but never given up.

No clock, thread or I/O: `propose` is called with everything it may know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.control.evidence import PATIENCE_S, SAME_RATE, STALL_BAD, STALL_OK, Evidence
from headrace.control.memory import Memory, Trial
from headrace.control.model import (
    BATCH_MARGIN,
    batches_held,
    batches_read,
    need,
    reads_per_sample,
)

if TYPE_CHECKING:
    from headrace.control.history import History, Knobs
    from headrace.control.limits import Limits
    from headrace.control.model import Need

__all__ = ["Decision", "propose"]

GROWTH_MAX = 5.0
"""Largest factor of a single raise: the model may be wrong by more than the budget forgives."""

GROWTH_SURE = 2.0
"""The same where storage is fast already: a consumer that asks for all there is has a demand that no
storage meets, and what is held for it in vain is gigabytes, and time to fault them in."""

PLAUSIBLE_BYTES_PER_S = 2e9
"""Up to here a storage may well give several times as much as it does."""

PINNED = 0.9
"""Share of the allowed reads in flight from which on the number allowed is what bounds them."""

CORRECTIONS_MAX = 5

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


def propose(history: History, knobs: Knobs, limits: Limits) -> Decision:
    """Say where the knobs of a plane should stand now.

    Args:
        history: what was measured so far, and what the call before concluded (`History.remembering`).
        knobs: where they stand.
        limits: what they must never pass.

    Returns:
        The decision; its memory belongs into the next call's history.
    """
    return _Call(history, knobs, limits).decide()


class _Call:
    """One call of `propose`: what is known, under short names."""

    def __init__(self, history: History, knobs: Knobs, limits: Limits) -> None:
        self.history = history
        self.now_s = history.now_s
        self.knobs = knobs
        self.limits = limits
        self.memory = history.memory or Memory()
        self.evidence = Evidence(history, knobs, self.memory)
        self.window = self.evidence.window
        self.news = ""

    def decide(self) -> Decision:
        allowed = self.limits.clamped(self.knobs)
        if allowed != self.knobs:
            memory = replace(self.memory, trial=None)
            return self._change(allowed, "limit", "a limit was passed", memory)
        news = self.evidence.news()
        if news:
            return self._begin_regime(news)
        if self.memory.trial is not None:
            return self._judge(self.memory.trial)
        self._learn()
        return self._act()

    def _begin_regime(self, news: str) -> Decision:
        """Storage or consumer have changed: what was learned is no longer true."""
        trial = self.memory.trial
        # A setting on trial for being smaller was found for the load that is gone.
        larger = trial.before if trial and not trial.up and self.window.stall > STALL_BAD else None
        recent, before_s = self.evidence.recent, self.memory.latency_s
        self.news = f"{news}; "
        # The consumer's own speed has nothing to do with the storage's.
        demand = self.memory.demand if self.evidence.latency_news() else 0.0
        # Slower or faster, a storage that was the limit does not serve more at once than before.
        ceilings = self.memory.ceilings if demand else {}
        self.memory = self.memory.new_regime(self.now_s - recent.seconds, demand, ceilings)
        self.evidence = Evidence(self.history, self.knobs, self.memory)
        self.window = self.evidence.window
        if larger is not None:
            self.knobs = larger
        slower = recent.latency_s > before_s > 0.0
        decision = (self._foresee() if slower else None) or self._act()
        if decision.action == "hold" and decision.knobs != self.evidence.knobs:
            return self._change(self.knobs, "roll back", "that was for another load", self.memory)
        # What was measured before is in part about another load: no trial can be judged by it.
        return replace(decision, memory=replace(decision.memory, trial=None))

    def _foresee(self) -> Decision | None:
        """What is in stock hides for a while that slower reads need more: do not wait for the end."""
        wanted = self._need()
        if wanted is None or self.evidence.waits():
            return None
        reads = min(wanted.reads_in_flight, int(self._growth() * self.knobs.reads_in_flight))
        size = min(wanted.buffer_bytes, int(self._growth() * self.knobs.buffer_bytes))
        more = {READS: max(reads, self.knobs.reads_in_flight),
                BYTES: max(size, self.knobs.buffer_bytes)}  # fmt: skip
        raised = self.limits.clamped(self.knobs.turned(more))
        if raised == self.knobs:
            return None
        return self._change(raised, "raise", "so much will be needed", self.memory)

    def _act(self) -> Decision:
        changed = None
        if self.evidence.waits():
            changed = self._raise() or self._lower(bound=True)
        elif self.evidence.served() and self.evidence.flows():
            changed = self._lower(bound=False)
        if changed is not None:
            return changed
        reason = "steady" if self.evidence.enough(batches=4) else "too little evidence"
        return Decision(self.knobs, "hold", self.news + reason, self._facts(), self.memory)

    def _learn(self) -> None:
        window, memory = self.window, self.memory
        if not memory.latency_s and window.reads >= 60:
            memory = self._knowing_latency(memory)
        if not memory.demand and window.batches >= 6 and window.demand:
            memory = replace(memory, demand=window.demand)
        self.memory = memory

    def _knowing_latency(self, memory: Memory) -> Memory:
        reads = max(1.0, self.window.in_flight)
        return replace(
            memory,
            latency_s=self.window.latency_s,
            latency_reads=reads,
            latency_knob=self.knobs.reads_in_flight,
        )

    # -- up ----------------------------------------------------------------------------------------

    def _patient(self) -> bool:
        """Whether to look longer: a fast storage has little more to give, and a trial costs CPU."""
        return self._growth() < GROWTH_MAX and self.window.seconds < 1.0

    def _raise(self) -> Decision | None:
        if self._patient():
            return None
        for knob in self._short_of():
            if self.memory.capped(knob, self.now_s):
                continue
            raised = self.limits.clamped(self.knobs.turned(self._more_of(knob)))
            if raised != self.knobs:
                window = self.window
                pinned = window.in_flight >= 0.95 * self.knobs.reads_in_flight
                trial = Trial(knob, True, self.knobs, window.read_rate, window.stall, pinned)
                reason = f"the consumer waits {self.window.stall:.1%} of its time"
                memory = replace(self.memory, trial=trial)
                return self._change(raised, "raise", reason, memory)
        return None

    def _need(self) -> Need | None:
        evidence = self.evidence
        return need(
            self.window,
            evidence.delivered,
            evidence.latency_us,
            self.knobs,
            demand_before=self.memory.demand,
            rate_max=self._rate_in_reach(),
        )

    def _growth(self) -> float:
        """Largest factor of a raise, as much as the storage may plausibly still have in it."""
        batch = self.evidence.delivered
        per_read = batch.bytes / max(1.0, batch.samples * reads_per_sample(batch))
        now = self.window.read_rate * per_read
        return max(GROWTH_SURE, min(GROWTH_MAX, PLAUSIBLE_BYTES_PER_S / max(1.0, now)))

    def _rate_in_reach(self) -> float:
        """Samples per second that a single raise may aim at."""
        window = self.window
        read = window.read_rate / reads_per_sample(self.evidence.delivered)
        rate = max(window.rate, read)
        return self._growth() * rate if rate > 0.0 else math.inf

    def _sure_rate(self) -> float:
        """Reads per second, less what may be luck: the best of several would be flattered."""
        return self.window.read_rate * (1.0 - min(0.1, self.window.rate_error))

    def _short_of(self) -> tuple[str, ...]:
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

    def _more_of(self, knob: str) -> dict[str, int]:
        window, knobs = self.window, self.knobs
        wanted = self._need()
        if knob == DECODE:
            return {DECODE: max(knobs.decode_threads + 1, knobs.decode_threads * 3 // 2)}
        if knob == BYTES:
            step = max(self._batch_bytes(), 0.2 * knobs.buffer_bytes)
            grown = max(knobs.buffer_bytes + step, wanted.buffer_bytes if wanted else 0)
            return {BYTES: int(min(grown, self._growth() * knobs.buffer_bytes))}
        now = knobs.reads_in_flight
        target = wanted.reads_in_flight if wanted else 2 * now
        if READS in self.memory.ceilings:  # more was in vain before: only look whether it still is
            target = math.ceil(1.25 * now)
        elif window.stall < 0.25:  # the model has had its turn; only a little is missing
            target = min(target, math.ceil(1.1 * now / (1.0 - window.stall)))
        # Where the model has no more to ask for, only a clear step gives a clear verdict.
        least = 1.5 if target <= now and READS not in self.memory.ceilings else 1.1
        reads = max(now + 1, math.ceil(least * now), min(target, int(self._growth() * now)))
        # More reads need room: for the batches that they belong to, and for what slow ones hold up.
        room = int(batches_read(self.evidence.delivered, reads) * self._batch_bytes())
        held = wanted.buffer_bytes if wanted and READS not in self.memory.ceilings else 0
        held = min(held, int(self._growth() * knobs.buffer_bytes))
        return {READS: reads, BYTES: max(knobs.buffer_bytes, room, held)}

    def _batch_bytes(self) -> float:
        return self.evidence.delivered.batch_bytes * BATCH_MARGIN

    # -- down --------------------------------------------------------------------------------------

    def _lower(self, *, bound: bool) -> Decision | None:
        """Ask for less. `bound`: the storage is the limit, and more is known to be in vain."""
        window = self.window
        if bound and not (window.reads and self.evidence.rate_known()):
            return None
        if bound:
            best = max(self.memory.best_read_rate, self._sure_rate())
            self.memory = replace(self.memory, best_read_rate=best)
        changes = self._leaner_when_bound() if bound else self._leaner_when_served()
        lowered = self.limits.clamped(self.knobs.turned(changes))
        if not changes or lowered == self.knobs:
            return None
        pinned = window.in_flight >= 0.95 * self.knobs.reads_in_flight
        knob = next(iter(changes))
        trial = Trial(knob, False, self.knobs, window.read_rate, window.stall, pinned)
        why = "the storage is the limit" if bound else "the consumer does not wait"
        memory = replace(self.memory, trial=trial)
        return self._change(lowered, "lower", f"{why}: as well with less?", memory)

    def _leaner_when_served(self) -> dict[str, int]:
        """Smaller settings that may serve the consumer as well."""
        wanted = self._need()
        if wanted is None:
            return self._fewer_decoders()
        changes = dict[str, int]()
        reads = self._above_floor(READS, wanted.reads_in_flight)
        if reads < 0.93 * self.knobs.reads_in_flight:
            changes[READS] = reads
        return changes | self._fewer_bytes(wanted.buffer_bytes) | self._fewer_decoders()

    def _leaner_when_bound(self) -> dict[str, int]:
        """Smaller settings that may get as much out of the storage."""
        now = self.knobs.reads_in_flight
        floor = self.memory.floor(READS, self.now_s)
        if floor:
            target = round(math.sqrt(floor * now))
        elif READS in self.memory.floors:  # too little a while ago: only look whether it still is
            target = min(now - 1, int(0.9 * now))
        else:
            # What made no difference was far from making one: ever larger steps find the knee soon.
            target = int(0.4 ** (1 + self.memory.lowered) * now)
        target = max(1, target)
        if floor < target < now and (target <= 0.93 * now or not floor):
            # Reads that wait for each other take the less time, the fewer there are.
            room = self._room_when_bound(target, target / now)
            return {READS: target, BYTES: min(room, self.knobs.buffer_bytes)}
        return self._fewer_bytes(self._room_when_bound(now, 1.0))

    def _room_when_bound(self, reads: int, share: float) -> int:
        """Bytes for so many reads, when each takes `share` of the time that it takes now."""
        window, delivered = self.window, self.evidence.delivered
        held = batches_held(window, self.evidence.latency_us, window.rate * share)
        return int(max(held, 1 + batches_read(delivered, reads)) * self._batch_bytes())

    def _fewer_bytes(self, wanted: int) -> dict[str, int]:
        now, batch = self.knobs.buffer_bytes, self._batch_bytes()
        if batch <= 0:
            return {}
        lowered = max(self._above_floor(BYTES, wanted), int(batch))
        # Less than a batch makes no difference; less than a tenth is not worth a trial.
        return {BYTES: lowered} if now - lowered > max(0.9 * batch, 0.08 * now) else {}

    def _fewer_decoders(self) -> dict[str, int]:
        window, threads = self.window, self.knobs.decode_threads
        if threads <= 1:
            return {}
        wanted = max(1, math.ceil(1.2 * window.decode_busy_s / window.seconds))
        wanted = self._above_floor(DECODE, wanted)
        return {DECODE: wanted} if wanted < threads else {}

    def _above_floor(self, knob: str, value: int) -> int:
        floor = self.memory.floor(knob, self.now_s)
        if value > floor:
            return value
        return floor + max(1, int(0.9 * self._batch_bytes()) if knob == BYTES else floor // 15)

    # -- the verdict on a change -------------------------------------------------------------------

    def _judge(self, trial: Trial) -> Decision:
        verdict = self._judge_up(trial) if trial.up else self._judge_down(trial)
        return verdict or Decision(self.knobs, "hold", "measuring", self._facts(), self.memory)

    def _judge_up(self, trial: Trial) -> Decision | None:
        window = self.window
        gain = window.read_rate / trial.read_rate if trial.read_rate else math.inf
        text = f"{gain:.2f} x the reads, waiting {trial.stall:.1%} -> {window.stall:.1%}"
        memory = replace(self.memory, trial=None)
        before = getattr(trial.before, trial.knob)
        if self.evidence.served():
            return self._keep(text, memory.with_floor(trial.knob, before, self.now_s))
        if not self.evidence.enough(batches=8) or self._patient():
            return None
        grown = getattr(self.knobs, trial.knob) / getattr(trial.before, trial.knob)
        gain_min = min(1.1, 1.01 + 0.15 * (grown - 1.0))
        error = 2.0 * window.rate_error
        if abs(gain - gain_min) < error and window.seconds < PATIENCE_S:
            return None
        knee = math.ceil(1.05 * gain * before) if trial.knob == READS and trial.read_rate else 0
        filled = window.in_flight >= PINNED * self.knobs.reads_in_flight
        if trial.pinned and filled and gain > 1.04 and knee < 0.85 * self.knobs.reads_in_flight:
            # Before, each read in flight counted; here most of the new ones wait for the others.
            memory = memory.with_ceiling(READS, knee, self.now_s)
            best = max(memory.best_read_rate, self._sure_rate())
            memory = replace(memory, best_read_rate=best)
            return self._change(self.knobs.turned({READS: knee}), "correct", text, memory)
        if gain >= gain_min or window.stall <= 0.5 * trial.stall:
            best = max(memory.best_read_rate, self._sure_rate())
            memory = memory.with_floor(trial.knob, before, self.now_s)
            return self._keep(text, replace(memory, best_read_rate=best))
        memory = memory.with_ceiling(trial.knob, before, self.now_s)
        return self._change(trial.before, "roll back", text, memory)

    def _judge_down(self, trial: Trial) -> Decision | None:
        window, evidence = self.window, self.evidence
        text = f"waiting {trial.stall:.1%} -> {window.stall:.1%}"
        if trial.stall <= STALL_OK:  # the consumer was served, and must be
            if evidence.served() and window.seconds >= 1.0 and evidence.flows():
                return self._keep(text, replace(self.memory, trial=None))
            return self._took_too_much(trial) if evidence.waits() else None
        if not evidence.enough(batches=8):
            return None
        share = window.read_rate / max(1e-9, self.memory.best_read_rate)
        error = 2.0 * window.rate_error
        if abs(share - SAME_RATE) < error and window.seconds < PATIENCE_S:
            return None
        text = f"{share:.3f} of the best rate"
        if share >= SAME_RATE - min(0.01, error):
            lowered = self.memory.lowered + (trial.knob == READS)
            return self._keep(text, replace(self.memory, trial=None, lowered=lowered))
        return self._took_too_much(trial)

    def _below_model(self) -> bool:
        """Whether slow reads may hold up the consumer now and then: that takes longer to see."""
        wanted = self._need()
        return wanted is None or self.knobs.buffer_bytes < 0.98 * wanted.buffer_bytes

    def _took_too_much(self, trial: Trial) -> Decision:
        """Give back what a lower setting lacks, or all of it."""
        knob = next(iter(self._short_of()), trial.knob)
        if getattr(trial.before, knob) == getattr(self.knobs, knob):
            knob = trial.knob
        now = getattr(self.knobs, knob)
        text = f"waiting {trial.stall:.1%} -> {self.window.stall:.1%}, short of {knob} at {now:,}"
        memory = self.memory.with_floor(knob, now, self.now_s)
        between = self._between(trial, knob)
        if knob == BYTES and self._below_model():
            between = None
        if between is not None and trial.corrections < CORRECTIONS_MAX:
            trial = replace(trial, corrections=trial.corrections + 1)
            return self._change(between, "correct", text, replace(memory, trial=trial))
        return self._change(trial.before, "roll back", text, replace(memory, trial=None))

    def _between(self, trial: Trial, knob: str) -> Knobs | None:
        """A setting between the one that served and this one that does not."""
        window, now, before = self.window, getattr(self.knobs, knob), getattr(trial.before, knob)
        if knob == READS:
            # Below saturation the rate is proportional to the reads in flight.
            lack = 1.0 / max(0.2, 1.0 - window.stall)
            if trial.stall > STALL_OK:
                lack = self.memory.best_read_rate / max(1.0, window.read_rate)
            target = max(now + 1, math.ceil(now * max(1.1, min(4.0, lack) * 1.02)))
        elif knob == BYTES:
            target = int(max(now + self._batch_bytes(), math.sqrt(now * before)))
        else:
            target = now + 1
        return self.knobs.turned({knob: target}) if target < 0.96 * before else None

    # -- how a call ends ---------------------------------------------------------------------------

    def _keep(self, text: str, memory: Memory) -> Decision:
        """Stay at these knobs; the regime is known by what was measured under them."""
        if self.window.reads >= 60:
            memory = self._knowing_latency(memory)
        return Decision(self.knobs, "keep", text, self._facts(), memory)

    def _change(self, knobs: Knobs, action: str, reason: str, memory: Memory) -> Decision:
        evidence_s = self.now_s + self._transition_s(knobs)
        memory = replace(memory, evidence_s=evidence_s)
        return Decision(knobs, action, self.news + reason, self._facts(), memory)

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

    def _facts(self) -> str:
        return self.evidence.facts()
