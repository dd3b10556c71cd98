"""Opportunistic order: what is resident comes first, the rest afterwards (DeepIO).

For a first epoch over storage that is being filled: the samples that are near already are shuffled and
served while the others are on their way. Each sample comes exactly once an epoch. What it costs in
randomness, `randomness()` says. From epoch `epochs` on it is a full shuffle.

Which samples are resident is an argument, not a look at the machine: all ranks and a resumed run must
have been told the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import OrderError
from headrace.order.hash import SAMPLES_MAX, Purpose, derive_key, keyed
from headrace.order.order import EPOCH_MAX, SEED_MAX, Order, checked, digest_of
from headrace.order.randomness import Randomness

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Opportunistic(Order):
    """Every sample once an epoch, the resident ones first. Memory for the ranges only.

    Raises:
        OrderError: the ranges overlap, are not ascending or leave the data; `samples`, `seed` or
            `epochs` is out of bounds.
    """

    samples: int
    """The number of samples in the data."""

    resident: tuple[tuple[int, int], ...]
    """Ranges (first, behind the last) of samples that come first, ascending."""

    seed: int = 0
    """Another seed, another sequence of epochs."""

    epochs: int = 1
    """Epochs that begin with what is resident; later ones are a full shuffle."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))
        object.__setattr__(self, "seed", checked("seed", self.seed, 0, SEED_MAX))
        object.__setattr__(self, "epochs", checked("epochs", self.epochs, 0, EPOCH_MAX + 1))
        ranges = tuple((int(a), int(b)) for a, b in self.resident if b > a)
        ends = [0, *(x for pair in ranges for x in pair), self.samples]
        if ends != sorted(ends):
            raise OrderError(
                f"the resident ranges are {ranges[:4]}..., expected ascending ones in 0 to "
                f"{self.samples}"
            )
        object.__setattr__(self, "resident", ranges)

    @property
    def resident_samples(self) -> int:
        """How many samples come first."""
        return sum(b - a for a, b in self.resident)

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        ranges = np.array(self.resident, "<i8").tobytes()
        return {
            "mode": "opportunistic",
            "samples": self.samples,
            "resident_samples": self.resident_samples,
            "resident": digest_of(ranges),
            "epochs": self.epochs,
            "seed": self.seed,
        }

    def randomness(self) -> Randomness:
        """Return DeepIO's level and the entropy share of the epochs that begin with the resident."""
        return Randomness.of_opportunistic(self.samples, self.resident_samples)

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        first = self.resident_samples
        if epoch >= self.epochs or first in (0, self.samples):
            key = derive_key(self.seed, Purpose.SHUFFLED, epoch)
            return keyed(self.samples, key).range(start, stop)
        gaps = [0, *(x for pair in self.resident for x in pair), self.samples]
        others = tuple(zip(gaps[::2], gaps[1::2], strict=True))
        pieces = []
        for group, ranges, base, count in (
            (0, self.resident, 0, first),
            (1, others, first, self.samples - first),
        ):
            low, high = max(start - base, 0), min(stop - base, count)
            if low < high:
                key = derive_key(self.seed, Purpose.RESIDENT, epoch, group)
                pieces.append(_nth_of(ranges, keyed(count, key).range(low, high)))
        return np.concatenate(pieces)


def _nth_of(
    ranges: tuple[tuple[int, int], ...], numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The samples with these numbers when those of all ranges are counted through."""
    bounds = np.array(ranges, np.int64)
    ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
    which = np.searchsorted(ends, numbers, side="right")
    found: npt.NDArray[np.int64] = bounds[which, 1] - (ends[which] - numbers)
    return found
