"""Lowering: whether less would do as well. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.control.memory import Trial
from headrace.control.model import batches_held, batches_read
from headrace.control.situation import BYTES, DECODE, READS

if TYPE_CHECKING:
    from headrace.control.situation import Decision, Situation

__all__ = ["lower"]


def lower(situation: Situation, *, bound: bool) -> Decision | None:
    """Ask for less. `bound`: the storage is the limit, and more is known to be in vain."""
    window = situation.window
    if bound and not (window.reads and situation.evidence.rate_known()):
        return None
    if bound:
        best = max(situation.memory.best_read_rate, situation.sure_rate())
        situation.memory = replace(situation.memory, best_read_rate=best)
    changes = _leaner_when_bound(situation) if bound else _leaner_when_served(situation)
    lowered = situation.limits.clamped(situation.knobs.turned(changes))
    if not changes or lowered == situation.knobs:
        return None
    pinned = window.in_flight >= 0.95 * situation.knobs.reads_in_flight
    knob = next(iter(changes))
    trial = Trial(knob, False, situation.knobs, window.read_rate, window.stall, pinned)
    why = "the storage is the limit" if bound else "the consumer does not wait"
    memory = replace(situation.memory, trial=trial)
    return situation.change(lowered, "lower", f"{why}: as well with less?", memory)


def _leaner_when_served(situation: Situation) -> dict[str, int]:
    """Smaller settings that may serve the consumer as well."""
    wanted = situation.need()
    if wanted is None:
        return _fewer_decoders(situation)
    changes = dict[str, int]()
    reads = situation.above_floor(READS, wanted.reads_in_flight)
    if reads < 0.93 * situation.knobs.reads_in_flight:
        changes[READS] = reads
    return changes | _fewer_bytes(situation, wanted.buffer_bytes) | _fewer_decoders(situation)


def _leaner_when_bound(situation: Situation) -> dict[str, int]:
    """Smaller settings that may get as much out of the storage."""
    now = situation.knobs.reads_in_flight
    floor = situation.memory.floor(READS, situation.now_s)
    if floor:
        target = round(math.sqrt(floor * now))
    elif READS in situation.memory.floors:  # too little a while ago: only look whether it still is
        target = min(now - 1, int(0.9 * now))
    else:
        # What made no difference was far from making one: ever larger steps find the knee soon.
        target = int(0.4 ** (1 + situation.memory.lowered) * now)
    target = max(1, target)
    if floor < target < now and (target <= 0.93 * now or not floor):
        # Reads that wait for each other take the less time, the fewer there are.
        room = _room_when_bound(situation, target, target / now)
        return {READS: target, BYTES: min(room, situation.knobs.buffer_bytes)}
    return _fewer_bytes(situation, _room_when_bound(situation, now, 1.0))


def _room_when_bound(situation: Situation, reads: int, share: float) -> int:
    """Bytes for so many reads, when each takes `share` of the time that it takes now."""
    window, delivered = situation.window, situation.evidence.delivered
    held = batches_held(window, situation.evidence.latency_us, window.rate * share)
    return int(max(held, 1 + batches_read(delivered, reads)) * situation.batch_bytes())


def _fewer_bytes(situation: Situation, wanted: int) -> dict[str, int]:
    now, batch = situation.knobs.buffer_bytes, situation.batch_bytes()
    if batch <= 0:
        return {}
    lowered = max(situation.above_floor(BYTES, wanted), int(batch))
    # Less than a batch makes no difference; less than a tenth is not worth a trial.
    return {BYTES: lowered} if now - lowered > max(0.9 * batch, 0.08 * now) else {}


def _fewer_decoders(situation: Situation) -> dict[str, int]:
    window, threads = situation.window, situation.knobs.decode_threads
    if threads <= 1:
        return {}
    wanted = max(1, math.ceil(1.2 * window.decode_busy_s / window.seconds))
    wanted = situation.above_floor(DECODE, wanted)
    return {DECODE: wanted} if wanted < threads else {}
