"""Pieces: what is read in the place of the data set: some samples at random, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["POOL_MAX", "Piece", "Pool", "quantiles"]

POOL_MAX: Final = 2000
"""Samples that stand for all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample's bytes, or as many bytes as one would have, in a file."""

    path: str
    offset: int
    length: int


@dataclass(slots=True)
class Pool:
    """Samples at random.

    Attributes:
        pieces: in random order.
        whole_files: each is a file of its own, which is opened to be read.
        unopened: more files at random that nothing was asked about yet: opening them is news to the system.
        store: an open store whose samples lie in objects or another host's volumes; read by index.
        true_samples: whether the pieces are samples, and can be decoded; else they are blocks.
    """

    pieces: list[Piece] = field(default_factory=list)
    whole_files: bool = False
    unopened: list[str] = field(default_factory=list)
    store: Any = None
    true_samples: bool = True

    @property
    def mean_bytes(self) -> float:
        """Of a piece."""
        return sum(p.length for p in self.pieces) / max(1, len(self.pieces))

    def close(self) -> None:
        """Close the store, if there is one."""
        if self.store is not None:
            self.store.close()


def quantiles(sizes: NDArray[np.int64]) -> dict[str, Any]:
    """How sizes are spread, under the names that `DataSet` has for it."""
    p10, p50, p90 = (float(x) for x in np.percentile(sizes, (10, 50, 90)))
    return {
        "size_p10": p10, "size_p50": p50, "size_p90": p90, "size_max": float(sizes.max()),
        "size_mean": float(sizes.mean()),
    }  # fmt: skip
