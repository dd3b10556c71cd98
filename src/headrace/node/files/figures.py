"""What the file service did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["AheadFigures", "CopyFigures", "OpenFigures"]

TIERS: tuple[str, ...] = ("ram", "disk", "ahead", "source")
"""Where an open was served from; `ahead`: from the source, after it was read into the page cache."""

ERRORS_MAX = 16


@dataclass(slots=True)
class AheadFigures:
    """Of reading ahead into the page cache."""

    read_files: int = 0
    read_bytes: int = 0
    hot_files: int = 0
    """Files that were in memory already, or taken to be."""
    used_files: int = 0
    used_bytes: int = 0
    """Of those that were read ahead: opened afterwards."""
    wasted_files: int = 0
    wasted_bytes: int = 0
    failures: int = 0
    errors: list[str] = field(default_factory=list)

    def failed(self, error: OSError) -> None:
        """Count an error, and keep the first ones."""
        self.failures += 1
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(str(error))


@dataclass(slots=True)
class CopyFigures:
    """Of the copies of one root's files, all runs together."""

    source_files: int = 0
    source_bytes: int = 0
    """Read from the source, each to be placed."""
    reused_files: int = 0
    reused_bytes: int = 0
    """Copies of an earlier daemon that were checked, and taken over."""
    damaged_files: int = 0
    """Copies whose bytes were not what they had been."""
    evicted_files: int = 0
    evicted_bytes: int = 0
    """Made room for files that come sooner."""
    given_back_files: int = 0
    """Given back because memory was short."""
    withdrawn_files: int = 0
    """Because the original was written to or changed."""
    wasted_files: int = 0
    wasted_bytes: int = 0
    """Of those that went: never opened."""
    failures: int = 0
    errors: list[str] = field(default_factory=list)

    def failed(self, text: str) -> None:
        """Count an error, and keep the first ones."""
        self.failures += 1
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(text)


@dataclass(slots=True)
class OpenFigures:
    """Of one run's opens."""

    files: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    written: int = 0
    unknown: int = 0
    refused: int = 0
    hostile: int = 0
    """Reports that no program of ours writes."""

    def add(self, earlier: OpenFigures) -> None:
        """Go on from the figures of the same program's board before."""
        for tier in TIERS:
            self.files[tier] += earlier.files[tier]
            self.bytes[tier] += earlier.bytes[tier]
        for name in ("written", "unknown", "refused", "hostile"):
            setattr(self, name, getattr(self, name) + getattr(earlier, name))

    def describe(self) -> dict[str, Any]:
        """For reports."""
        return {
            "opens": dict(self.files), "bytes": dict(self.bytes), "written": self.written,
            "unknown": self.unknown, "refused": self.refused, "hostile": self.hostile,
        }  # fmt: skip
