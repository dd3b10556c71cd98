"""Section: what one part of the data-plane benchmark found, ready to be printed and kept."""

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


@dataclass(frozen=True, slots=True)
class Section:
    """One part's tables and targets."""

    title: str
    rows: Sequence[Sequence[str]]
    """A table, its header first."""

    targets: Sequence[Target]
    notes: Sequence[str] = ()
    raw: Any = field(default=None, repr=False)
    """Everything that was measured, for the JSON file."""
