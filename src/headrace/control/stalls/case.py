"""Case: all that a verdict's action and words are made of. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.base.causes import Cause
    from headrace.control.stalls.evidence import Evidence
    from headrace.control.stalls.phases import Waits
    from headrace.control.stalls.reading import Reading

__all__ = ["Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """What was found.

    Attributes:
        causes: seconds by cause, the largest first.
        slowest: the other rank that this one waited for most, as people call it; '': none.
    """

    causes: Mapping[Cause, float]
    waits: Waits
    reading: Reading
    seen: Evidence
    slowest: str = ""
