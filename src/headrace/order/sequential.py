"""Sequential order: samples as they lie in the data, the same in every epoch.

For validation, for export, and for measuring what random order costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.order.arguments import checked
from headrace.order.order import Order
from headrace.order.permutation import SAMPLES_MAX
from headrace.order.randomness import Randomness

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Sequential"]


@dataclass(frozen=True, eq=False)
class Sequential(Order):
    """Index i at position i. O(1) memory.

    Raises:
        OrderError: `samples` is not 1 to 2^48.
    """

    samples: int
    """The number of samples in the data."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))

    @property
    def seed(self) -> int:
        """Always 0: nothing is random."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        return {"mode": "sequential", "samples": self.samples}

    def randomness(self) -> Randomness:
        """Return 0 for both measures."""
        return Randomness.of_sequential()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        return np.arange(start, stop, dtype=np.int64)
