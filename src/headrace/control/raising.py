"""Raising: more of the knob that holds the plane back, as the model says how much. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.control.memory import Trial
from headrace.control.model import batches_read
from headrace.control.situation import BYTES, DECODE, READS

if TYPE_CHECKING:
    from headrace.control.situation import Decision, Situation

__all__ = ["foresee", "raise_knobs"]


def foresee(situation: Situation) -> Decision | None:
    """What is in stock hides for a while that slower reads need more: do not wait for the end."""
    wanted = situation.need()
    if wanted is None or situation.evidence.waits():
        return None
    reads = min(wanted.reads_in_flight, int(situation.growth() * situation.knobs.reads_in_flight))
    size = min(wanted.buffer_bytes, int(situation.growth() * situation.knobs.buffer_bytes))
    more = {READS: max(reads, situation.knobs.reads_in_flight),
            BYTES: max(size, situation.knobs.buffer_bytes)}  # fmt: skip
    raised = situation.limits.clamped(situation.knobs.turned(more))
    if raised == situation.knobs:
        return None
    return situation.change(raised, "raise", "so much will be needed", situation.memory)


def raise_knobs(situation: Situation) -> Decision | None:
    """Ask for more of what the plane is short of; None: nothing that may help is left."""
    if situation.patient():
        return None
    for knob in situation.short_of():
        if situation.memory.capped(knob, situation.now_s):
            continue
        raised = situation.limits.clamped(situation.knobs.turned(_more_of(situation, knob)))
        if raised != situation.knobs:
            window = situation.window
            pinned = window.in_flight >= 0.95 * situation.knobs.reads_in_flight
            trial = Trial(knob, True, situation.knobs, window.read_rate, window.stall, pinned)
            reason = f"the consumer waits {situation.window.stall:.1%} of its time"
            memory = replace(situation.memory, trial=trial)
            return situation.change(raised, "raise", reason, memory)
    return None


def _more_of(situation: Situation, knob: str) -> dict[str, int]:
    window, knobs = situation.window, situation.knobs
    wanted = situation.need()
    if knob == DECODE:
        return {DECODE: max(knobs.decode_threads + 1, knobs.decode_threads * 3 // 2)}
    if knob == BYTES:
        step = max(situation.batch_bytes(), 0.2 * knobs.buffer_bytes)
        grown = max(knobs.buffer_bytes + step, wanted.buffer_bytes if wanted else 0)
        return {BYTES: int(min(grown, situation.growth() * knobs.buffer_bytes))}
    now = knobs.reads_in_flight
    target = wanted.reads_in_flight if wanted else 2 * now
    if READS in situation.memory.ceilings:  # more was in vain before: only look whether it still is
        target = math.ceil(1.25 * now)
    elif window.stall < 0.25:  # the model has had its turn; only a little is missing
        target = min(target, math.ceil(1.1 * now / (1.0 - window.stall)))
    # Where the model has no more to ask for, only a clear step gives a clear verdict.
    least = 1.5 if target <= now and READS not in situation.memory.ceilings else 1.1
    reads = max(now + 1, math.ceil(least * now), min(target, int(situation.growth() * now)))
    # More reads need room: for the batches that they belong to, and for what slow ones hold up.
    room = int(batches_read(situation.evidence.delivered, reads) * situation.batch_bytes())
    held = wanted.buffer_bytes if wanted and READS not in situation.memory.ceilings else 0
    held = min(held, int(situation.growth() * knobs.buffer_bytes))
    return {READS: reads, BYTES: max(knobs.buffer_bytes, room, held)}
