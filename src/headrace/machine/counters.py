"""Counters: how much figures of the kernel and of drivers have grown, whatever happens to them.

They wrap, begin anew (a device that came back, a module that was reloaded) and vanish. A figure that is
seen for the first time has grown by nothing: what it counted before is not ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Growth", "grown"]

_FRESH = 0.5
"""A counter that wrapped has come less far than this share of its range since; one that comes from the
lower half of it cannot have wrapped."""


def grown(before: float, now: float, bits: int = 64) -> float:
    """How much a counter has grown between two looks; never negative.

    Args:
        before: at the first.
        now: at the second.
        bits: after which it begins again at 0.
    """
    if not (math.isfinite(before) and math.isfinite(now)):
        return 0.0
    if now >= before:
        return now - before
    span = float(1 << bits)
    around = now + span - before
    if before < span and before > _FRESH * span and around < _FRESH * span:
        return around
    return max(0.0, now)  # it began anew


class Growth:
    """Remembers what counters said last.

    Args:
        bits: of each of them.
    """

    def __init__(self, bits: int = 64) -> None:
        self._bits = bits
        self._before: Mapping[tuple[str, str], float] = {}

    def since(self, values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """How much each has grown since this was last asked; what is new has grown by 0.

        What is not named any more is forgotten: if it comes back it is new.
        """
        before = self._before
        found = {
            key: grown(before[key], value, self._bits) if key in before else 0.0
            for key, value in values.items()
        }
        self._before = dict(values)
        return found
