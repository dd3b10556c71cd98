"""Our own figures: where the time went, how it was spread, whether it was steady, how sure we are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike

    from headrace.bench.metrics.timeline import Block, Window

__all__ = [
    "Confidence",
    "Shares",
    "Steadiness",
    "confidence",
    "percentiles",
    "shares_of",
    "steadiness_of",
]

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)

_STUDENT_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
    2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; above, the normal's is near."""

_DRIFT_MOST: Final = 0.05
"""More change than this between the halves of a run is a trend, not noise."""

_STEPS_LEAST: Final = 8
"""Fewer steps say nothing about steadiness."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the counted time of all accelerators went, in seconds; they add up to `total_s`."""

    total_s: float
    compute_s: float
    wait_s: float
    harness_s: float
    barrier_s: float
    """What remains: waiting for slower accelerators."""

    def of(self, name: str) -> float:
        """A part as a fraction of the total."""
        return float(getattr(self, f"{name}_s") / self.total_s) if self.total_s > 0 else 0.0


def shares_of(blocks: Sequence[Block], window: Window) -> Shares:
    """Sum up training's blocks within the window."""
    total = compute = wait = harness = 0.0
    for block in blocks:
        counted = window.bounds(block.steps)
        outside = block.process_s.sum() - block.process_s[counted].sum()
        total += block.duration_s - float(outside)
        compute += float(block.compute_s[counted].sum())
        wait += float(block.load_s[counted].sum())
        harness += float(block.harness_s[counted].sum())
    return Shares(total, compute, wait, harness, max(0.0, total - compute - wait - harness))


def percentiles(values_s: ArrayLike) -> dict[str, float]:
    """p50, p90, p99, p99.9, the greatest and the mean; empty without values."""
    values = np.asarray(values_s, np.float64)
    if not len(values):
        return {}
    found = {f"p{q:g}": float(np.percentile(values, q)) for q in PERCENTILES}
    return found | {"max": float(values.max()), "mean": float(values.mean())}


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Whether the second half of a run went as the first.

    Attributes:
        drift: change of the time of a step from the first half to the second, as a fraction; None when
            there are too few steps to tell.
    """

    drift: float | None

    @property
    def steady(self) -> bool | None:
        """None: nobody can tell."""
        return None if self.drift is None else abs(self.drift) <= _DRIFT_MOST


def steadiness_of(blocks: Sequence[Block], window: Window) -> Steadiness:
    """Compare the halves of all counted steps, in the order of time, by their mean."""
    steps: list[float] = []
    for block in sorted(blocks, key=lambda b: b.start_s):
        steps += block.process_s[window.bounds(block.steps)].tolist()
    if len(steps) < _STEPS_LEAST:
        return Steadiness(None)
    half = len(steps) // 2
    first, second = np.mean(steps[:half]), np.mean(steps[-half:])
    return Steadiness(float(second / first - 1) if first > 0 else None)


@dataclass(frozen=True, slots=True)
class Confidence:
    """A mean over repeats and its 95 % confidence interval.

    Attributes:
        half_width: None with a single run.
    """

    mean: float
    half_width: float | None
    runs: int

    def document(self) -> Mapping[str, float | int | None]:
        """For JSON."""
        return {"mean": self.mean, "confidence_95": self.half_width, "runs": self.runs}


def confidence(values: Sequence[float]) -> Confidence:
    """Student's interval of the mean.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values is empty, expected at least one run")
    count = len(values)
    mean = float(np.mean(values))
    if count == 1:
        return Confidence(mean, None, 1)
    quantile = _STUDENT_95[count - 2] if count - 2 < len(_STUDENT_95) else 1.96
    return Confidence(mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(count), count)
