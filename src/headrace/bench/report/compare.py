"""Compare: two results beside each other: what changed, and whether that is more than noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.bench.report.measures import MEASURES, Measure, measured
from headrace.bench.report.repeats import differences
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.metrics.own import Confidence
    from headrace.bench.report.conditions import Condition
    from headrace.bench.report.result import RunResult

__all__ = ["Comparison", "Row", "Verdict", "compare", "judge"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of two results."""

    measure: Measure
    a: Confidence
    b: Confidence

    @property
    def change(self) -> float | None:
        """From a to b, as a fraction of a; None where a is 0 and b is not."""
        if self.a.mean == self.b.mean:
            return 0.0
        return self.b.mean / self.a.mean - 1 if self.a.mean else None

    @property
    def change_half_width(self) -> float | None:
        """Half of the change's 95 % interval, about; None without repeats on either side.

        Both sides' half widths are added as squares, which is Welch's interval but for its degrees of
        freedom; a side without repeats adds nothing that is known.
        """
        widths = [side.half_width for side in (self.a, self.b) if side.half_width is not None]
        if not widths or not self.a.mean:
            return None
        return math.hypot(*widths) / abs(self.a.mean)

    @property
    def clear(self) -> bool | None:
        """Whether the change is more than its interval; None without repeats on both sides."""
        change, width = self.change, self.change_half_width
        if change is None or width is None or None in (self.a.half_width, self.b.half_width):
            return None
        return abs(change) > width

    @property
    def worse(self) -> bool | None:
        """Whether b is on the bad side of a; None where no side is bad."""
        if self.measure.better is None or self.a.mean == self.b.mean:
            return None
        return (self.b.mean < self.a.mean) == (self.measure.better == "more")

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measure": self.measure.name, "title": self.measure.title, "unit": self.measure.unit,
            "a": self.a.document(), "b": self.b.document(), "change": self.change,
            "change_confidence_95": self.change_half_width, "clear": self.clear,
            "worse": self.worse,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results.

    Attributes:
        rows: the measures that both have.
        differences: (what, in a, in b) of how they were run: with these, figures may differ for
            another reason than the one looked for.
    """

    rows: tuple[Row, ...]
    differences: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition and whether it holds."""

    condition: Condition
    found: float
    holds: bool


def compare(a: Sequence[RunResult], b: Sequence[RunResult]) -> Comparison:
    """Compare two results, each of one run or of repeats."""
    rows = []
    for measure in MEASURES:
        left, right = measured(a, measure), measured(b, measure)
        if left is not None and right is not None:
            rows.append(Row(measure, left, right))
    return Comparison(tuple(rows), tuple(differences(a[0], b[0])))


def judge(comparison: Comparison, conditions: Sequence[Condition]) -> list[Verdict]:
    """Which conditions hold.

    Raises:
        BenchError: one cannot be told: a gate that finds nothing to look at must not be open.
    """
    rows = {row.measure.name: row for row in comparison.rows}
    found = []
    for condition in conditions:
        row = rows.get(condition.measure.name)
        if row is None:
            raise BenchError(
                f"{condition.written!r} cannot be told: not both results have "
                f"{condition.measure.name} ({condition.measure.title}).",
                next_step=f"Both have {', '.join(rows) or 'nothing in common'}.",
            )
        value = row.change if condition.change else row.b.mean
        if value is None:
            raise BenchError(
                f"{condition.written!r} cannot be told: {condition.measure.name} was 0 before, and "
                f"is {row.b.mean:g}: no percentage says how much that is.",
                next_step="Give a bound without %: it is held against the second result itself.",
            )
        found.append(Verdict(condition, value, condition.holds(value)))
    return found
