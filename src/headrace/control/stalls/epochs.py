"""Epochs: one line at the end of each pass: how fast it went, what was waited for, where bytes came from.

Written to the logger `headrace.epoch` at level INFO, and to standard error where HEADRACE_VERDICT=1.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.control.stalls.live import verdict_on
from headrace.control.stalls.words import verdict_line
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.control.controller import TuningHandle
    from headrace.control.plane import Change
    from headrace.control.stalls.verdict import Verdict
    from headrace.plane import Loader

__all__ = ["PassEnded", "epoch_line", "tell_epoch"]

LOG = logging.getLogger("headrace.epoch")

VARIABLE: Final = "HEADRACE_VERDICT"


class PassEnded:
    """Called when a pass of a loader has ended: tells whoever tunes it, and people who want to know.

    Args:
        tuning: of the loader.
        loader: held weakly.
    """

    def __init__(self, tuning: TuningHandle, loader: Loader) -> None:
        self._tuning = tuning
        self._loader = weakref.ref(loader)
        self._seen = 0
        # Its own: an iterator may rest after all names of this module are gone.
        self._is_finalizing = sys.is_finalizing

    def __call__(self) -> None:
        """A pass has ended. At the interpreter's end, all has been said."""
        if self._is_finalizing():
            return
        self._tuning.rested()
        loader = self._loader()
        if loader is not None:
            self._seen = tell_epoch(loader, self._seen, self._tuning.plane.changes)


def tell_epoch(loader: Any, seen: int = 0, changes: Sequence[Change] = ()) -> int:
    """Tell whoever wants to know of the epoch that has ended. Never fails.

    Args:
        loader: any of headrace's.
        seen: its steps that were told of already, as this returned it the last time.
        changes: what was tuned.
    """
    wanted = os.environ.get(VARIABLE, "0") not in ("", "0")
    if sys.is_finalizing() or not (wanted or LOG.isEnabledFor(logging.INFO)):
        return seen
    try:
        steps, seen = loader.stats.steps.since(seen)
        if not len(steps):
            return seen
        epoch = int(steps["epoch"][-1])
        kept = [change for change in changes if change.action == "keep"]
        verdict = verdict_on(loader, epoch=epoch)
        line = epoch_line(epoch, steps[steps["epoch"] == epoch], verdict, kept)
    except Exception:  # what says how training fares must not end it
        LOG.exception("nothing can be said of this epoch")
        return seen
    LOG.info("%s", line)
    if wanted:
        sys.stderr.write(f"{line}\n")
    return seen


def epoch_line(
    epoch: int, steps: NDArray[np.void], verdict: Verdict, changes: Sequence[Change] = ()
) -> str:
    """A pass in a line.

    Args:
        epoch: its number.
        steps: its steps, dtype `STEP`.
        verdict: on them.
        changes: what was tuned.
    """
    samples = int(steps["samples"].sum())
    parts = [f"headrace: epoch {epoch}", f"{samples:,} samples"]
    if verdict.seconds > 0.0:
        parts.append(f"{samples / verdict.seconds:,.0f}/s")
    parts.append(verdict_line(verdict))
    tiers = _tiers(steps["bytes"].astype(np.float64).sum(axis=0))
    if tiers:
        parts.append(tiers)
    if changes:
        last = changes[-1]
        parts.append(f"tuner: {_turned(last)}")
    return " | ".join(parts)


def _tiers(sums: Any) -> str:
    total = float(sums.sum())
    if total <= 0.0:
        return ""
    shares = [(name, float(sums[at]) / total) for at, name in enumerate(TIERS)]
    return " ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)


def _turned(change: Change) -> str:
    turned = change.after.changes_from(change.before)
    told = ", ".join(
        f"{name} {getattr(change.before, name)} -> {value}" for name, value in turned.items()
    )
    return f"{told} kept" if told else change.reason
