"""ReadsOver: reads that stand on others, and are as those are in all that they do not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import _native
    from headrace.plane.tiers.reads import Reads

__all__ = ["ReadsOver"]


class ReadsOver:
    """Passes on what is below.

    Args:
        below: what reads.
    """

    def __init__(self, below: Reads) -> None:
        self._below = below

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made it."""
        return self._below.usable

    @property
    def engine(self) -> tuple[str, str]:
        """As below."""
        return self._below.engine

    @property
    def mapped_bytes(self) -> int:
        """Memory of this process that it and those below it take."""
        return self._own_bytes() + self._below.mapped_bytes

    def _own_bytes(self) -> int:
        """Memory that it takes itself."""
        return 0

    def gather(self, pieces: list[tuple[_native.Batch, int, int]]) -> _native.Batch:
        """As below."""
        return self._below.gather(pieces)
