"""The parts of `benchmarks/plane.py`, one file each: `run(options)` measures and returns a `Section`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.targets import Target


@dataclass(frozen=True, slots=True)
class Section:
    """What one part found."""

    title: str
    rows: Sequence[Sequence[str]]
    """The table: a heading, then the rows."""

    targets: Sequence[Target]
    """Each target of the part, met or not."""
