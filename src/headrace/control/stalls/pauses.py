"""Pauses: where a training loop itself stood, and no loader is to blame. Pure.

A validation every thousand steps, a checkpoint, a log over a slow network: the time between the delivery of a
batch and the next request is the loop's own, and most of it may lie in a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.base.text import duration_text
from headrace.control.stalls.waits import STEP_MAX_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TIMES: Final = 5.0
"""So many times as long as the middle step: one that does something else, too."""

_LEAST_S: Final = 0.2
_LEAST_SHARE: Final = 0.05  # of the whole time: less is not worth a word
_STEPS_LEAST: Final = 8
_STEPS_SHARE: Final = 0.1
"""Of all steps. More of them are how this loop goes, such as an optimiser's step after every fourth batch."""
_NEEDED: Final = {"epoch", "step", "asked_s", "delivered_s"}


@dataclass(frozen=True, slots=True)
class Pauses:
    """The long steps of a loop."""

    seconds: float  # that they took longer than the middle one, added up
    count: int
    longest_s: float
    usual_s: float
    where: str  # after which step the longest was

    def __str__(self) -> str:
        several = f" in {self.count:,} steps, the longest {duration_text(self.longest_s)}"
        return (
            f"your own loop took {self.seconds:.3g} s longer than usual{several if self.count > 1 else ''} "
            f"{self.where} (usually {duration_text(self.usual_s)} a step)"
        )


_OWN_SHARE: Final = 0.8
"""Whose own steps take more of the time than this finds more there than in all waiting."""


_NO_STEP_S: Final = 1e-3
"""A loop that does less between two batches trains nothing."""


def own_loop(seconds: float, stall_s: float, steps: int) -> str:
    """Say that a loop's own steps take most of the time, or none; '': neither."""
    own_s = seconds - stall_s
    if not steps or _NO_STEP_S * steps <= own_s <= _OWN_SHARE * seconds:
        return ""
    each = duration_text(own_s / steps)
    if own_s < _NO_STEP_S * steps:
        return f"your loop took {each} between batches: it trains nothing, so this is the loader's own speed"
    return f"your own step took {each} ({own_s / seconds:.0%} of the time): look there first"


def besides(action: str, seconds: float, stall_s: float, *, shared: bool) -> str:
    """What to do about waiting, where most of the time is the loop's own: the second thing.

    `shared`: processors were busy with decoding meanwhile, which a step that runs on them feels.
    """
    if not action or seconds - stall_s <= _OWN_SHARE * seconds:
        return action
    where = ""
    if shared:
        where = (
            ", and decoding keeps the processors busy meanwhile: a step that runs on them is slower for it, "
            "the more so the more threads torch has (try OMP_NUM_THREADS=1)"
        )
    return f"most of the time is your own step's{where}. Of waiting: {action}"


def pauses_of(steps: NDArray[np.void], seconds: float) -> Pauses | None:
    """Find the pauses among sensible steps, dtype `STEP`, that took so long in all; None: hardly any."""
    if len(steps) <= _STEPS_LEAST or not set(steps.dtype.names or ()) >= _NEEDED:
        return None
    worked_s = np.maximum(0.0, steps["asked_s"][1:] - steps["delivered_s"][:-1])
    worked_s[worked_s > STEP_MAX_S] = 0.0  # a clock that jumped
    usual_s = float(np.median(worked_s))
    long = np.flatnonzero(worked_s > max(_LEAST_S, _TIMES * usual_s))
    paused_s = float((worked_s[long] - usual_s).sum())
    if paused_s < _LEAST_SHARE * seconds or not 0 < len(long) <= _STEPS_SHARE * len(steps):
        return None
    at = int(worked_s.argmax())
    where = f"after step {int(steps['step'][at])} of epoch {int(steps['epoch'][at])}"
    where += ", its last" if steps["epoch"][at] != steps["epoch"][at + 1] else ""
    return Pauses(paused_s, len(long), float(worked_s[at]), usual_s, where)
