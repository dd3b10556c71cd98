"""Amounts as people write them: `2G`, `500 MB/s`, `1.5Ti`, `20k`. 1000-based, with an `i` 1024-based."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["amount", "amount_text"]

_PATTERN: Final = re.compile(
    r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kKMGTP]?)(i?)[bB]?\s*(?:/\s*s)?\s*", re.ASCII
)
_POWERS: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_MAX: Final = 1e18


def amount(value: object) -> float:
    """Read a positive amount.

    Raises:
        ValueError: it is none; the message says what was expected.
    """
    expected = "expected an amount above 0, as 500M, 1.5G, 2Gi or 20k"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is no amount, {expected}")  # noqa: TRY004 - the document's mistake
    if isinstance(value, str):
        found = _PATTERN.fullmatch(value)
        if found is None or (found[3] and not found[2]):
            raise ValueError(f"{value!r} is no amount, {expected}")
        number = float(found[1]) * float((1024 if found[3] else 1000) ** _POWERS[found[2]])
    else:
        number = float(value)
    if not 0 < number <= _MAX:
        raise ValueError(f"{value!r} is out of bounds, {expected}")
    return number


def amount_text(value: float | None) -> str:
    """The shortest that `amount` reads back as the same; `-` for None."""
    if value is None:
        return "-"
    for unit in ("P", "T", "G", "M", "k"):
        scaled = value / 1000 ** _POWERS[unit]
        if scaled >= 1 and float(f"{scaled:.6g}") == scaled:
            return f"{scaled:.6g}{unit}"
    return f"{value:.17g}" if value != int(value) else str(int(value))
