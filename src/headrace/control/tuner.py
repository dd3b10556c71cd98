"""Tuner: from what was measured on a plane to where its knobs should stand. A pure function.

The goal is the fewest resources that keep the consumer from waiting; where the storage cannot do
that, the fewest that get out of it what it can give. Knobs follow the model (`headrace.control.model`)
first; every change is then a trial, judged by what was measured under it and taken back when it did
not help. What was in vain is tried again later and later, but never given up.

No clock, thread or I/O: `propose` is called with everything it may know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.control.evidence import STALL_BAD
from headrace.control.lowering import lower
from headrace.control.raising import foresee, raise_knobs
from headrace.control.situation import Decision, Situation
from headrace.control.verdict import judge

if TYPE_CHECKING:
    from headrace.control.history import History, Knobs
    from headrace.control.limits import Limits

__all__ = ["Decision", "propose"]


def propose(history: History, knobs: Knobs, limits: Limits) -> Decision:
    """Say where the knobs of a plane should stand now.

    Args:
        history: what was measured so far, and what the call before concluded (`History.remembering`).
        knobs: where they stand.
        limits: what they must never pass.

    Returns:
        The decision; its memory belongs into the next call's history.
    """
    situation = Situation(history, knobs, limits)
    allowed = limits.clamped(knobs)
    if allowed != knobs:
        memory = replace(situation.memory, trial=None)
        return situation.change(allowed, "limit", "a limit was passed", memory)
    news = situation.evidence.news()
    if news:
        return _begin_regime(situation, news)
    if situation.memory.trial is not None:
        return judge(situation, situation.memory.trial)
    situation.learn()
    return _act(situation)


def _begin_regime(situation: Situation, news: str) -> Decision:
    """Storage or consumer have changed: what was learned is no longer true."""
    trial = situation.memory.trial
    # A setting on trial for being smaller was found for the load that is gone.
    larger = trial.before if trial and not trial.up and situation.window.stall > STALL_BAD else None
    recent, before_s = situation.evidence.recent, situation.memory.latency_s
    situation.news = f"{news}; "
    # The consumer's own speed has nothing to do with the storage's.
    demand = situation.memory.demand if situation.evidence.latency_news() else 0.0
    # Slower or faster, a storage that was the limit does not serve more at once than before.
    ceilings = situation.memory.ceilings if demand else {}
    situation.memory = situation.memory.new_regime(
        situation.now_s - recent.seconds, demand, ceilings
    )
    situation.look()
    if larger is not None:
        situation.knobs = larger
    slower = recent.latency_s > before_s > 0.0
    decision = (foresee(situation) if slower else None) or _act(situation)
    if decision.action == "hold" and decision.knobs != situation.evidence.knobs:
        return situation.change(
            situation.knobs, "roll back", "that was for another load", situation.memory
        )
    # What was measured before is in part about another load: no trial can be judged by it.
    return replace(decision, memory=replace(decision.memory, trial=None))


def _act(situation: Situation) -> Decision:
    changed = None
    if situation.evidence.waits():
        changed = raise_knobs(situation) or lower(situation, bound=True)
    elif situation.evidence.served() and situation.evidence.flows():
        changed = lower(situation, bound=False)
    if changed is not None:
        return changed
    reason = "steady" if situation.evidence.enough(batches=4) else "too little evidence"
    return situation.hold(situation.news + reason)
