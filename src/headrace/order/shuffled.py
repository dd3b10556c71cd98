"""Shuffled order: an exact random permutation of the whole data, another one in every epoch.

The default of training. No buffer, no window, no list: a sample's place is computed from
(seed, epoch, position), so an epoch of 2^48 samples starts as fast as one of ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.order.arguments import SEED_MAX, checked
from headrace.order.hash import Purpose, derive_key
from headrace.order.order import Order
from headrace.order.permutation import SAMPLES_MAX, keyed
from headrace.order.randomness import Randomness

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Shuffled"]


@dataclass(frozen=True, eq=False)
class Shuffled(Order):
    """Every sample once an epoch, in the order of a keyed permutation. O(1) memory.

    Raises:
        OrderError: `samples` is not 1 to 2^48, or `seed` not 0 to 2^64 - 1.
    """

    samples: int
    """The number of samples in the data."""

    seed: int = 0
    """Another seed, another sequence of epochs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))
        object.__setattr__(self, "seed", checked("seed", self.seed, 0, SEED_MAX))

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        return {"mode": "shuffled", "samples": self.samples, "seed": self.seed}

    def randomness(self) -> Randomness:
        """Return 1 for both measures."""
        return Randomness.of_shuffled()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        key = derive_key(self.seed, Purpose.SHUFFLED, epoch)
        return keyed(self.samples, key).range(start, stop)
