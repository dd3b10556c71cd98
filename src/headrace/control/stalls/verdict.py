"""Verdict: the cause of every second that training waited for data. Pure.

The wait of each step comes cut into what its batch was doing meanwhile (`plane.way`). Here that becomes
causes that add up to all that was waited, how sure that is, what shows it, one thing to do about the
largest of them, and what that would gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.control.stalls.actions import action_for
from headrace.control.stalls.case import Case
from headrace.control.stalls.evidence import Evidence
from headrace.control.stalls.lock import lost_share, others_share, taken
from headrace.control.stalls.phases import sensible, waits_of
from headrace.control.stalls.ranks import slow_rank
from headrace.control.stalls.reading import reading_of
from headrace.control.stalls.words import evidence_words, verdict_text
from headrace.plane.step import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.control.stalls.phases import Waits
    from headrace.control.stalls.reading import Reading

__all__ = ["NEGLIGIBLE", "Verdict", "causes_by_step", "verdict_of"]

NEGLIGIBLE: Final = 0.02
"""A stall of less than this share of the time needs no action."""

_STEPS_ENOUGH: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why training waited."""

    seconds: float
    """That were looked at, from the first request to the last delivery."""
    stall_s: float
    """Of them, waited for data: here or, through a slow rank, elsewhere."""
    causes: Mapping[Cause, float]
    """Seconds by cause, the largest first; they add up to `stall_s`."""
    confidence: float
    """0 to 1: how sure the division is."""
    evidence: tuple[str, ...]
    """What shows it, in words."""
    action: str
    """One thing to do; '' where the stall is negligible."""
    gain_s: float
    """What that would save, of `stall_s`."""
    gain_from: str
    """How that was computed."""
    steps: int
    dropped: int = 0
    """Steps whose figures made no sense."""
    simulation: str = ""
    """`simulated lustre` where the storage is not real."""
    rank: str = ""
    """`rank 1 of 2 by torchrun`: whose loader it is, and by whose word; '' where nobody has asked."""

    @property
    def main(self) -> Cause | None:
        """The largest cause; None: nothing was waited for."""
        return next(iter(self.causes), None)

    @property
    def stall(self) -> float:
        """Share of the time."""
        return min(1.0, self.stall_s / self.seconds) if self.seconds > 0.0 else 0.0

    def share(self, cause: Cause) -> float:
        """Of the stall."""
        return self.causes.get(cause, 0.0) / self.stall_s if self.stall_s > 0.0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "seconds": self.seconds,
            "stall_s": self.stall_s,
            "stall": self.stall,
            "cause": self.main.value if self.main else None,
            "causes": {cause.value: seconds for cause, seconds in self.causes.items()},
            "confidence": self.confidence,
            "evidence": list(self.evidence),
            "action": self.action,
            "gain_s": self.gain_s,
            "gain_from": self.gain_from,
            "steps": self.steps,
            "dropped": self.dropped,
            "simulation": self.simulation,
            "rank": self.rank,
        }

    def __str__(self) -> str:
        return verdict_text(self)


def verdict_of(
    steps: NDArray[np.void],
    evidence: Evidence | None = None,
    ranks: Sequence[NDArray[np.void]] | Mapping[int, NDArray[np.void]] = (),
) -> Verdict:
    """Say why a rank waited for data.

    Args:
        steps: of this rank, dtype `STEP` (fields that are missing are not known), shape (steps,).
        evidence: what else is known of the same stretch.
        ranks: the steps of the other ranks that it goes on together with, by their numbers if these are
            known.
    """
    seen = (evidence or Evidence()).sane()
    waits = waits_of(steps)
    reading = reading_of(waits, seen)
    found = {cause: float(each.sum()) for cause, each in _divided(waits, reading, seen).items()}
    others = ranks if isinstance(ranks, Mapping) else dict(enumerate(ranks))
    other_s, at = slow_rank(steps, list(others.values())) if others else (0.0, None)
    found[Cause.SLOW_RANK] += other_s
    stall_s = sum(found.values())
    causes = {
        cause: found[cause]
        for cause in sorted(found, key=lambda each: -found[each])
        if found[cause] > 0.0
    }
    slowest = "" if at is None else f"rank {list(others)[at]}"
    if slowest and others is not ranks:
        slowest += " of those given"
    case = Case(causes, waits, reading, seen, slowest)
    main = next(iter(causes), None)
    seconds = max(waits.seconds, stall_s - other_s)
    needed = main is not None and stall_s > NEGLIGIBLE * seconds
    nothing = ("", 0.0, "")
    action, gain_s, gain_from = action_for(main, case) if needed and main else nothing
    return Verdict(
        seconds=seconds,
        stall_s=stall_s,
        causes=causes,
        confidence=_confidence(causes, stall_s, reading, len(waits.phases)),
        evidence=evidence_words(case),
        action=action,
        gain_s=max(0.0, min(gain_s, stall_s)),
        gain_from=gain_from,
        steps=len(waits.phases),
        dropped=waits.dropped,
        simulation=seen.simulation,
    )


def causes_by_step(
    steps: NDArray[np.void], evidence: Evidence | None = None
) -> NDArray[np.float64]:
    """The causes of each step's own wait, as `verdict_of` adds them up; a slower rank is not looked for.

    Args:
        steps: of a rank, dtype `STEP`.
        evidence: what else is known of the same stretch.

    Returns:
        Seconds, shape (steps, causes), in the order of `Cause`. Steps whose figures make no sense have none.
    """
    seen = (evidence or Evidence()).sane()
    waits, good = waits_of(steps), sensible(steps)
    found = np.zeros((len(steps), len(Cause)))
    for at, each in enumerate(_divided(waits, reading_of(waits, seen), seen).values()):
        found[good, at] = each
    return found


def _divided(waits: Waits, reading: Reading, seen: Evidence) -> dict[Cause, NDArray[np.float64]]:
    """Each step's wait by cause, shape (steps,) each; all causes are there, in their order."""
    phase = dict(zip(PHASES, waits.phases.T, strict=True))
    making = phase["queue"] + phase["decode"]
    lost = making * lost_share(waits, seen)
    known = seen.interpreter_looks > 0 or bool(waits.looks.any())
    locked = phase["hand"] * taken(waits, seen) if known else phase["hand"]
    # A batch that is ready and cannot be handed over, since decoding has the lock, waits for decoding.
    python = locked * others_share(waits, unseen=1.0)
    more = {
        Cause.METADATA: phase["open"],
        Cause.DECODE: making - lost + locked - python,
        Cause.PYTHON: lost + python,
        Cause.COLLATE: phase["collate"],
        Cause.TRANSFER: phase["transfer"],
        Cause.OTHER: phase["hand"] - locked + waits.unknown_s,
    }
    nothing = np.zeros(len(waits.phases))
    return {
        cause: reading.seconds.get(cause, nothing) + more.get(cause, nothing) for cause in Cause
    }


def _confidence(
    causes: Mapping[Cause, float], stall_s: float, reading: Reading, steps: int
) -> float:
    if stall_s <= 0.0:
        return 1.0
    sure = {
        Cause.LATENCY: reading.sure,
        Cause.BANDWIDTH: reading.sure,
        Cause.PREFETCH: 0.9,
        Cause.PYTHON: 0.85,
        Cause.SLOW_RANK: 0.85,
        Cause.OTHER: 0.0,
    }
    total = sum(seconds * sure.get(cause, 0.95) for cause, seconds in causes.items()) / stall_s
    return total * min(1.0, 0.5 + 0.5 * steps / _STEPS_ENOUGH)
