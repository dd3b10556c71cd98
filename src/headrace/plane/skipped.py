"""What a loader does with samples that cannot be delivered, and its record of those left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OnError", "Skipped"]

OnError = Literal["raise", "skip"]
"""`raise`: stop with an error that names the sample. `skip`: leave the sample out of its batch, keep
the number of steps, and record it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was left out of its batch."""

    index: int
    name: str
    reason: str
