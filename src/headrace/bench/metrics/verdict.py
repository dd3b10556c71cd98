"""Verdict: what a run's result is about. A harness that is slower than the storage measures itself.

The ceiling is the same run on a null store: what is lost there is not the storage's fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from headrace.bench.metrics.own import Shares

__all__ = ["Verdict", "verdict_of"]

Bound = Literal["compute", "storage", "harness", "unknown"]

_CEILING_LEAST = 99.0
"""AU in percent that the harness must reach on a null store before a loss counts as the storage's."""

_LOSS_LEAST = 1.0
"""Percent of AU below which nothing is worth a verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a run.

    Attributes:
        bound: compute, storage or harness; unknown without a ceiling.
        reason: with figures.
    """

    bound: Bound
    reason: str


def verdict_of(
    au: float, ceiling_au: float | None, shares: Shares, late_p99_s: float, step_s: float
) -> Verdict:
    """Decide what lost the accelerators' time.

    Args:
        au: of the run, in percent.
        ceiling_au: of the same run on a null store; None when it was not made.
        shares: where the time went.
        late_p99_s: how late ends of steps were noticed.
        step_s: mean compute time of a step.
    """
    lost = 100 - au
    if step_s > 0 and late_p99_s > 0.05 * step_s and late_p99_s > 0.001:
        return Verdict(
            "harness",
            f"ends of steps were noticed up to {late_p99_s * 1e3:.2f} ms late (p99), steps take "
            f"{step_s * 1e3:.2f} ms: this host is too busy to emulate them",
        )
    if lost <= _LOSS_LEAST:
        return Verdict("compute", f"AU is {au:.2f} %: the storage keeps up")
    if ceiling_au is None:
        return Verdict(
            "unknown", "there is no ceiling: run with --ceiling to tell storage from harness"
        )
    if ceiling_au < _CEILING_LEAST and 100 - ceiling_au >= 0.2 * lost:
        return Verdict(
            "harness",
            f"without any storage AU is {ceiling_au:.2f} %, with it {au:.2f} %: the harness alone loses "
            f"{(100 - ceiling_au) / lost:.0%} of what is lost, so this result is not about the storage",
        )
    if shares.of("harness") > shares.of("wait"):
        return Verdict(
            "harness",
            f"{shares.of('harness'):.1%} of the time went to the harness, {shares.of('wait'):.1%} to "
            "waiting for data",
        )
    waited = f"{shares.of('wait'):.1%} of the time was waiting for data"
    if shares.of("barrier") > shares.of("wait"):
        waited += f", {shares.of('barrier'):.1%} waiting at the barrier for others that did"
    return Verdict("storage", f"{waited}; without storage AU is {ceiling_au:.2f} %")
