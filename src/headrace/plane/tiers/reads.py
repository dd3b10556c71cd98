"""Reads: what every stage of a plane offers to the one above it.

Indices go down, whole native batches come up, in the order in which they were asked for. The lowest
one is `headrace.io.BatchReader`; tiers and limits stand on top of one another and look alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace import _native

__all__ = ["PendingReads", "Reads"]


class PendingReads(Protocol):
    """A batch that was asked for."""

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""

    def take(self) -> _native.Batch:
        """Wait for the batch, once.

        Raises:
            VolumeTimeout: the deadline passed; names what the batch waits for.
        """


class Reads(Protocol):
    """Gives batches of samples by index."""

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made it."""

    @property
    def engine(self) -> tuple[str, str]:
        """The engine of the source, and why it is not io_uring (or '')."""

    @property
    def mapped_bytes(self) -> int:
        """Memory that it and those below it take."""

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch; returns at once.

        Raises:
            SampleNotFound: an index lies outside the data set.
        """

    def gather(self, pieces: list[tuple[_native.Batch, int, int]]) -> _native.Batch:
        """Copy samples start to stop - 1 of each (batch, start, stop) into one new batch."""

    def close(self) -> None:
        """Stop. Batches that were taken stay valid."""
