"""Verdict: whether a change on trial is kept, corrected or taken back. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.control.evidence import PATIENCE_S, SAME_RATE, STALL_OK
from headrace.control.situation import BYTES, READS

if TYPE_CHECKING:
    from headrace.control.history import Knobs
    from headrace.control.memory import Trial
    from headrace.control.situation import Decision, Situation

__all__ = ["judge"]

PINNED = 0.9
"""Share of the allowed reads in flight from which on the number allowed is what bounds them."""

CORRECTIONS_MAX = 5


def judge(situation: Situation, trial: Trial) -> Decision:
    """Judge a change by what was measured since."""
    verdict = _judge_up(situation, trial) if trial.up else _judge_down(situation, trial)
    return verdict or situation.hold("measuring")


def _judge_up(situation: Situation, trial: Trial) -> Decision | None:
    window = situation.window
    gain = window.read_rate / trial.read_rate if trial.read_rate else math.inf
    text = f"{gain:.2f} x the reads, waiting {trial.stall:.1%} -> {window.stall:.1%}"
    memory = replace(situation.memory, trial=None)
    before = getattr(trial.before, trial.knob)
    if situation.evidence.served():
        return situation.keep(text, memory.with_floor(trial.knob, before, situation.now_s))
    if not situation.evidence.enough(batches=8) or situation.patient():
        return None
    grown = getattr(situation.knobs, trial.knob) / getattr(trial.before, trial.knob)
    gain_min = min(1.1, 1.01 + 0.15 * (grown - 1.0))
    error = 2.0 * window.rate_error
    if abs(gain - gain_min) < error and window.seconds < PATIENCE_S:
        return None
    knee = math.ceil(1.05 * gain * before) if trial.knob == READS and trial.read_rate else 0
    filled = window.in_flight >= PINNED * situation.knobs.reads_in_flight
    if trial.pinned and filled and gain > 1.04 and knee < 0.85 * situation.knobs.reads_in_flight:
        # Before, each read in flight counted; here most of the new ones wait for the others.
        memory = memory.with_ceiling(READS, knee, situation.now_s)
        best = max(memory.best_read_rate, situation.sure_rate())
        memory = replace(memory, best_read_rate=best)
        return situation.change(situation.knobs.turned({READS: knee}), "correct", text, memory)
    if gain >= gain_min or window.stall <= 0.5 * trial.stall:
        best = max(memory.best_read_rate, situation.sure_rate())
        memory = memory.with_floor(trial.knob, before, situation.now_s)
        return situation.keep(text, replace(memory, best_read_rate=best))
    memory = memory.with_ceiling(trial.knob, before, situation.now_s)
    return situation.change(trial.before, "roll back", text, memory)


def _judge_down(situation: Situation, trial: Trial) -> Decision | None:
    window, evidence = situation.window, situation.evidence
    text = f"waiting {trial.stall:.1%} -> {window.stall:.1%}"
    if trial.stall <= STALL_OK:  # the consumer was served, and must be
        if evidence.served() and window.seconds >= 1.0 and evidence.flows():
            return situation.keep(text, replace(situation.memory, trial=None))
        return _took_too_much(situation, trial) if evidence.waits() else None
    if not evidence.enough(batches=8):
        return None
    share = window.read_rate / max(1e-9, situation.memory.best_read_rate)
    error = 2.0 * window.rate_error
    if abs(share - SAME_RATE) < error and window.seconds < PATIENCE_S:
        return None
    text = f"{share:.3f} of the best rate"
    if share >= SAME_RATE - min(0.01, error):
        lowered = situation.memory.lowered + (trial.knob == READS)
        return situation.keep(text, replace(situation.memory, trial=None, lowered=lowered))
    return _took_too_much(situation, trial)


def _below_model(situation: Situation) -> bool:
    """Whether slow reads may hold up the consumer now and then: that takes longer to see."""
    wanted = situation.need()
    return wanted is None or situation.knobs.buffer_bytes < 0.98 * wanted.buffer_bytes


def _took_too_much(situation: Situation, trial: Trial) -> Decision:
    """Give back what a lower setting lacks, or all of it."""
    knob = next(iter(situation.short_of()), trial.knob)
    if getattr(trial.before, knob) == getattr(situation.knobs, knob):
        knob = trial.knob
    now = getattr(situation.knobs, knob)
    text = f"waiting {trial.stall:.1%} -> {situation.window.stall:.1%}, short of {knob} at {now:,}"
    memory = situation.memory.with_floor(knob, now, situation.now_s)
    between = _between(situation, trial, knob)
    if knob == BYTES and _below_model(situation):
        between = None
    if between is not None and trial.corrections < CORRECTIONS_MAX:
        trial = replace(trial, corrections=trial.corrections + 1)
        return situation.change(between, "correct", text, replace(memory, trial=trial))
    return situation.change(trial.before, "roll back", text, replace(memory, trial=None))


def _between(situation: Situation, trial: Trial, knob: str) -> Knobs | None:
    """A setting between the one that served and this one that does not."""
    window, now, before = (
        situation.window,
        getattr(situation.knobs, knob),
        getattr(trial.before, knob),
    )
    if knob == READS:
        # Below saturation the rate is proportional to the reads in flight.
        lack = 1.0 / max(0.2, 1.0 - window.stall)
        if trial.stall > STALL_OK:
            lack = situation.memory.best_read_rate / max(1.0, window.read_rate)
        target = max(now + 1, math.ceil(now * max(1.1, min(4.0, lack) * 1.02)))
    elif knob == BYTES:
        target = int(max(now + situation.batch_bytes(), math.sqrt(now * before)))
    else:
        target = now + 1
    return situation.knobs.turned({knob: target}) if target < 0.96 * before else None
