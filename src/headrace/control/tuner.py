"""Tuner: from what was measured on a plane to where its knobs should stand. A pure function.

The goal is the fewest resources that keep the consumer from waiting; where the storage cannot do
that, the fewest that get out of it what it can give. Knobs follow the model (`headrace.control.history`)
first; every change is then a trial, judged by what was measured under it and taken back when it did
not help. What was in vain is tried again later and later, but never given up.

No clock, thread or I/O: `propose` is called with everything it may know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.control.history import (
    BATCH_MARGIN,
    PATIENCE_S,
    SAME_RATE,
    STALL_BAD,
    STALL_OK,
    WindowEvidence,
    batches_held,
    batches_read,
    reads_per_sample,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.control.history import Knobs, Need, PlaneHistory
    from headrace.control.knob_limits import Limits

BACKOFF_FIRST_S = 6.0
BACKOFF_LAST_S = 96.0
"""What gave nothing is tried again after 6 s, then after twice as long each time, up to a minute and a
half: storage and neighbours change, so it never stops for good."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that has not proved itself yet."""

    knob: str
    up: bool
    before: Knobs  # the last setting that is known to serve
    read_rate: float  # reads per second before
    stall: float  # share of the consumer's time that it waited before
    pinned: bool = False
    """Whether the reads in flight were as many as allowed before: each of them counted."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Something that was in vain, and until when it is put off."""

    value: int  # the knob's value that did not help, or did not do
    until_s: float
    times: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that one call of `propose` leaves to the next."""

    regime_s: float = 0.0
    """When this regime began: the same storage and consumer, as far as one can tell."""
    evidence_s: float = 0.0
    """Intervals that began before this time were under other knobs or in transition."""
    trial: Trial | None = None
    best_read_rate: float = 0.0  # reads per second when the storage was the limit: what it can do
    lowered: int = 0  # how often fewer reads got as much out of a storage that is the limit
    floors: Mapping[str, _Deferred] = field(default_factory=dict)
    """By knob: the largest value that was too small."""
    ceilings: Mapping[str, _Deferred] = field(default_factory=dict)
    """By knob: the value that it was no use to go beyond."""
    latency_s: float = 0.0
    """Mean latency in this regime, 0.0: not known yet; another one later means that it is over."""
    latency_reads: float = 1.0  # mean reads in flight when it was measured
    latency_knob: int = 0  # how many were allowed then
    demand: float = 0.0  # the consumer's demand likewise

    def floor(self, knob: str, now_s: float) -> int:
        """The value that this knob should stay above for now; 0: none."""
        put = self.floors.get(knob)
        return put.value if put and now_s < put.until_s else 0

    def capped(self, knob: str, now_s: float) -> bool:
        """Whether more of this knob is known to be in vain for now."""
        put = self.ceilings.get(knob)
        return bool(put and now_s < put.until_s)

    def with_floor(self, knob: str, value: int, now_s: float) -> Memory:
        """Knowing that `value` is too small."""
        value = max(value, self.floor(knob, now_s))
        return replace(self, floors=_deferred(self.floors, knob, value, now_s))

    def with_ceiling(self, knob: str, value: int, now_s: float) -> Memory:
        """Knowing that more than `value` gives nothing."""
        return replace(self, ceilings=_deferred(self.ceilings, knob, value, now_s))


def _deferred(
    puts: Mapping[str, _Deferred], knob: str, value: int, now_s: float
) -> dict[str, _Deferred]:
    times = puts[knob].times if knob in puts else 0
    wait_s = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2.0**times)
    return {**puts, knob: _Deferred(value, now_s + wait_s, times + 1)}


GROWTH_MAX = 5.0
"""Largest factor of a single raise: the model may be wrong by more than the budget forgives."""

GROWTH_SURE = 2.0
"""The same where storage is fast already: a consumer that asks for all there is has a demand that no
storage meets, and what is held for it in vain is gigabytes, and time to fault them in."""

PLAUSIBLE_BYTES_PER_S = 2e9  # up to here a storage may well give several times as much as it does
TRANSITION_MAX_S = 8.0  # so long at most the tuner waits for what was begun under the old setting
PINNED = 0.9
"""Share of the allowed reads in flight from which on the number allowed is what bounds them."""

READS, BYTES, DECODE = "reads_in_flight", "buffer_bytes", "decode_threads"


@dataclass(frozen=True, slots=True)
class KnobDecision:
    """Where the knobs should stand, and why."""

    knobs: Knobs
    action: str  # `hold`, `limit`, `raise`, `lower`, `correct`, `keep` or `roll back`
    reason: str
    evidence: str
    memory: Memory


class _Situation:
    """What one call of `propose` knows, and what follows from it."""

    def __init__(self, history: PlaneHistory, knobs: Knobs, limits: Limits) -> None:
        self.history = history
        self.now_s = history.now_s
        self.knobs = knobs
        self.limits = limits
        self.memory = history.memory or Memory()
        self.news = ""
        self.look()

    def look(self) -> None:
        """Look at what was measured, as the memory says since when it counts."""
        self.evidence = WindowEvidence(self.history, self.knobs, self.memory)
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
        return self.evidence.need(self.knobs, self.rate_in_reach())

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

    def hold(self, reason: str) -> KnobDecision:
        """Stay at these knobs, with nothing decided."""
        return KnobDecision(self.knobs, "hold", reason, self.evidence.facts(), self.memory)

    def keep(self, text: str, memory: Memory) -> KnobDecision:
        """Stay at these knobs; the regime is known by what was measured under them."""
        if self.window.reads >= 60:
            memory = self.knowing_latency(memory)
        return KnobDecision(self.knobs, "keep", text, self.evidence.facts(), memory)

    def change(self, knobs: Knobs, action: str, reason: str, memory: Memory) -> KnobDecision:
        """Turn to `knobs`; what is measured until they show does not count."""
        evidence_s = self.now_s + self._transition_s(knobs)
        memory = replace(memory, evidence_s=evidence_s)
        return KnobDecision(knobs, action, self.news + reason, self.evidence.facts(), memory)

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

    # -- what is done -------------------------------------------------------------------------------

    def decide(self) -> KnobDecision:
        """The decision of this call."""
        allowed = self.limits.clamped(self.knobs)
        if allowed != self.knobs:
            memory = replace(self.memory, trial=None)
            return self.change(allowed, "limit", "a limit was passed", memory)
        if news := self.evidence.news():
            return self._begin_regime(news)
        if (trial := self.memory.trial) is not None:
            decision = self._judge_up(trial) if trial.up else self._judge_down(trial)
            return decision or self.hold("measuring")
        self.learn()
        return self._act()

    def _foresee(self) -> KnobDecision | None:
        """What is in stock hides for a while that slower reads need more: do not wait for the end."""
        wanted = self.need()
        if wanted is None or self.evidence.waits():
            return None
        reads = min(wanted.reads_in_flight, int(self.growth() * self.knobs.reads_in_flight))
        size = min(wanted.buffer_bytes, int(self.growth() * self.knobs.buffer_bytes))
        more = {READS: max(reads, self.knobs.reads_in_flight),
                BYTES: max(size, self.knobs.buffer_bytes)}  # fmt: skip
        raised = self.limits.clamped(self.knobs.turned(more))
        if raised == self.knobs:
            return None
        return self.change(raised, "raise", "so much will be needed", self.memory)

    def _raise_knobs(self) -> KnobDecision | None:
        """Ask for more of what the plane is short of; None: nothing that may help is left."""
        if self.patient():
            return None
        for knob in self.short_of():
            if self.memory.capped(knob, self.now_s):
                continue
            raised = self.limits.clamped(self.knobs.turned(self._more_of(knob)))
            if raised != self.knobs:
                window = self.window
                pinned = window.in_flight >= 0.95 * self.knobs.reads_in_flight
                trial = Trial(knob, True, self.knobs, window.read_rate, window.stall, pinned)
                reason = f"the consumer waits {self.window.stall:.1%} of its time"
                memory = replace(self.memory, trial=trial)
                return self.change(raised, "raise", reason, memory)
        return None

    def _more_of(self, knob: str) -> dict[str, int]:
        window, knobs = self.window, self.knobs
        wanted = self.need()
        if knob == DECODE:
            return {DECODE: max(knobs.decode_threads + 1, knobs.decode_threads * 3 // 2)}
        if knob == BYTES:
            step = max(self.batch_bytes(), 0.2 * knobs.buffer_bytes)
            grown = max(knobs.buffer_bytes + step, wanted.buffer_bytes if wanted else 0)
            return {BYTES: int(min(grown, self.growth() * knobs.buffer_bytes))}
        now = knobs.reads_in_flight
        target = wanted.reads_in_flight if wanted else 2 * now
        if READS in self.memory.ceilings:  # more was in vain before: only look whether it still is
            target = math.ceil(1.25 * now)
        elif window.stall < 0.25:  # the model has had its turn; only a little is missing
            target = min(target, math.ceil(1.1 * now / (1.0 - window.stall)))
        # Where the model has no more to ask for, only a clear step gives a clear verdict.
        least = 1.5 if target <= now and READS not in self.memory.ceilings else 1.1
        reads = max(now + 1, math.ceil(least * now), min(target, int(self.growth() * now)))
        # More reads need room: for the batches that they belong to, and for what slow ones hold up.
        room = int(batches_read(self.evidence.delivered, reads) * self.batch_bytes())
        held = wanted.buffer_bytes if wanted and READS not in self.memory.ceilings else 0
        held = min(held, int(self.growth() * knobs.buffer_bytes))
        return {READS: reads, BYTES: max(knobs.buffer_bytes, room, held)}

    def _lower(self, *, bound: bool) -> KnobDecision | None:
        """Ask for less. `bound`: the storage is the limit, and more is known to be in vain."""
        window = self.window
        if bound and not (window.reads and self.evidence.rate_known()):
            return None
        if bound:
            best = max(self.memory.best_read_rate, self.sure_rate())
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
        return self.change(lowered, "lower", f"{why}: as well with less?", memory)

    def _leaner_when_served(self) -> dict[str, int]:
        """Smaller settings that may serve the consumer as well."""
        wanted = self.need()
        if wanted is None:
            return self._fewer_decoders()
        changes = dict[str, int]()
        reads = self.above_floor(READS, wanted.reads_in_flight)
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
            # What is kept decoded needs no bytes, and says nothing of how many others do.
            fewer = {BYTES: min(room, self.knobs.buffer_bytes)} if room else {}
            return {READS: target, **fewer}
        return self._fewer_bytes(self._room_when_bound(now, 1.0))

    def _room_when_bound(self, reads: int, share: float) -> int:
        """Bytes for so many reads, when each takes `share` of the time that it takes now."""
        window, delivered = self.window, self.evidence.delivered
        held = batches_held(window, self.evidence.latency_us, window.rate * share)
        return int(max(held, 1 + batches_read(delivered, reads)) * self.batch_bytes())

    def _fewer_bytes(self, wanted: int) -> dict[str, int]:
        now, batch = self.knobs.buffer_bytes, self.batch_bytes()
        if batch <= 0:
            return {}
        lowered = max(self.above_floor(BYTES, wanted), int(batch))
        # Less than a batch makes no difference; less than a tenth is not worth a trial.
        return {BYTES: lowered} if now - lowered > max(0.9 * batch, 0.08 * now) else {}

    def _fewer_decoders(self) -> dict[str, int]:
        window, threads = self.window, self.knobs.decode_threads
        if threads <= 1:
            return {}
        wanted = max(1, math.ceil(1.2 * window.decode_busy_s / window.seconds))
        wanted = self.above_floor(DECODE, wanted)
        return {DECODE: wanted} if wanted < threads else {}

    def _judge_up(self, trial: Trial) -> KnobDecision | None:
        window = self.window
        gain = window.read_rate / trial.read_rate if trial.read_rate else math.inf
        more = (
            f"{gain:.2f} x the reads a second of before" if trial.read_rate else "the first reads"
        )
        text = f"{more}, waiting {trial.stall:.1%} -> {window.stall:.1%} of the time"
        # A trial is judged by its reads. Why waiting grew beside more of them, these two windows do not say.
        kept = text if window.stall <= trial.stall else more
        memory = replace(self.memory, trial=None)
        before = getattr(trial.before, trial.knob)
        if self.evidence.served():
            return self.keep(kept, memory.with_floor(trial.knob, before, self.now_s))
        if not self.evidence.enough(batches=8) or self.patient():
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
            best = max(memory.best_read_rate, self.sure_rate())
            memory = replace(memory, best_read_rate=best)
            return self.change(self.knobs.turned({READS: knee}), "correct", text, memory)
        if gain >= gain_min or window.stall <= 0.5 * trial.stall:
            best = max(memory.best_read_rate, self.sure_rate())
            memory = memory.with_floor(trial.knob, before, self.now_s)
            return self.keep(kept, replace(memory, best_read_rate=best))
        memory = memory.with_ceiling(trial.knob, before, self.now_s)
        return self.change(trial.before, "roll back", text, memory)

    def _judge_down(self, trial: Trial) -> KnobDecision | None:
        window, evidence = self.window, self.evidence
        text = f"waiting {trial.stall:.1%} -> {window.stall:.1%}"
        if trial.stall <= STALL_OK:  # the consumer was served, and must be
            if evidence.served() and window.seconds >= 1.0 and evidence.flows():
                return self.keep(text, replace(self.memory, trial=None))
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
            return self.keep(text, replace(self.memory, trial=None, lowered=lowered))
        return self._took_too_much(trial)

    def _took_too_much(self, trial: Trial) -> KnobDecision:
        """Give back what was taken; what it lacked is known now."""
        knob = next(iter(self.short_of()), trial.knob)
        if getattr(trial.before, knob) == getattr(self.knobs, knob):
            knob = trial.knob
        now = getattr(self.knobs, knob)
        text = f"waiting {trial.stall:.1%} -> {self.window.stall:.1%}, short of {knob} at {now:,}"
        memory = self.memory.with_floor(knob, now, self.now_s)
        return self.change(trial.before, "roll back", text, replace(memory, trial=None))

    def _begin_regime(self, news: str) -> KnobDecision:
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
        began_s = self.now_s - recent.seconds
        self.memory = Memory(regime_s=began_s, evidence_s=began_s, demand=demand, ceilings=ceilings)
        self.look()
        if larger is not None:
            self.knobs = larger
        slower = recent.latency_s > before_s > 0.0
        decision = (self._foresee() if slower else None) or self._act()
        if decision.action == "hold" and decision.knobs != self.evidence.knobs:
            return self.change(self.knobs, "roll back", "that was for another load", self.memory)
        # What was measured before is in part about another load: no trial can be judged by it.
        return replace(decision, memory=replace(decision.memory, trial=None))

    def _act(self) -> KnobDecision:
        changed = None
        if self.evidence.waits():
            changed = self._raise_knobs() or self._lower(bound=True)
        elif self.evidence.served() and self.evidence.flows():
            changed = self._lower(bound=False)
        if changed is not None:
            return changed
        reason = "steady" if self.evidence.enough(batches=4) else "too little evidence"
        return self.hold(self.news + reason)


def propose(history: PlaneHistory, knobs: Knobs, limits: Limits) -> KnobDecision:
    """Say where the knobs of a plane should stand now.

    Args:
        history: what was measured so far, and what the call before concluded (`PlaneHistory.remembering`).
        knobs: where they stand.
        limits: what they must never pass.

    Returns:
        The decision; its memory belongs into the next call's history.
    """
    return _Situation(history, knobs, limits).decide()
