"""The parts of `benchmarks/plane.py`, one file each: `run(options)` measures and returns a `Section`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the benchmark is run."""

    dir: Path
    """Work folder for data sets."""

    quick: bool = False
    """Small and short: does everything work?"""

    jobs: int = 2
    """Measurements at the same time, for parts that mostly sleep."""

    @property
    def scale(self) -> float:
        """Fraction of data set A's samples: 20,000 of them, 2.2 GB."""
        return 0.02 if self.quick else 0.4

    @property
    def rounds(self) -> int:
        """How often each is measured."""
        return 1 if self.quick else 3

    @property
    def seconds(self) -> float:
        """A run ends after this long, or with its epoch."""
        return 1.5 if self.quick else 5.0


@dataclass(frozen=True, slots=True)
class Section:
    """What one part found."""

    title: str
    rows: Sequence[Sequence[str]]
    """The table: a heading, then the rows."""

    targets: Sequence[Target]
    """Each target of the part, met or not."""

    notes: Sequence[str] = ()
    raw: Any = field(default=None, repr=False)
    """Everything that was measured, for the JSON file."""
