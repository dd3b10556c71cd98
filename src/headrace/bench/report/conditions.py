"""Conditions: `au < -2%`. Of a comparison, where a percentage is a change; and of one run's value."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.bench.report.measures import Measure, measure_named

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Condition", "condition_of"]

_FORM: Final = re.compile(
    r"\s*(?P<name>[a-z]\w*)\s*(?P<sign><=|>=|<|>)\s*"
    r"(?P<bound>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)\s*"
)
_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """A measure, and what it is held against.

    Attributes:
        bound: in the measure's unit; of a change: as a fraction.
        change: it is about the change from one result to another.
        written: as it was given.
    """

    measure: Measure
    sign: str
    bound: float
    change: bool
    written: str

    def holds(self, value: float) -> bool:
        """Whether the value, or the change, is as the condition says."""
        return _SIGNS[self.sign](value, self.bound)


def condition_of(text: str, *, changes: bool) -> Condition:
    """Read a condition: a measure's name, one of < <= > >=, a number, perhaps %.

    Args:
        text: `au < -2%`.
        changes: a percentage is a change from one result to another; else a value.

    A bound of a percentage without % is a fraction up to 1, as DLIO has `metric.au`, and percent above.

    Raises:
        ValueError: it is no condition, or no measure has that name.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no condition, expected a measure, one of < <= > >=, and a number: au < -2%"
        )
    measure = measure_named(match["name"])
    bound, percent = float(match["bound"]), bool(match["percent"])
    change = changes and percent
    if change:
        bound /= 100
    elif percent and measure.unit != "%":
        raise ValueError(f"{text!r}: {measure.name} is in {measure.unit or 'numbers'}, not in %")
    elif measure.unit == "%" and not percent and abs(bound) <= 1:
        bound *= 100
    return Condition(measure, match["sign"], bound, change, text.strip())
