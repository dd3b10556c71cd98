"""Opportunistic order: what is resident comes first, the rest afterwards (DeepIO).

For a first epoch over storage that is being filled: the samples that are near already are shuffled and
served while the others are on their way. Each sample comes exactly once an epoch. What it costs in
randomness, `randomness()` says. From epoch `epochs` on it is a full shuffle.

No part of the data comes first twice: a model that begins every epoch with the same samples, of a few
classes perhaps, trains badly. So where more than one epoch begins with what is near, the samples that are
not resident are dealt out at random into parts as large as the resident one. Epoch e ends with part e + 1,
which is then the one in memory, and epoch e + 1 begins with it. When each part has been first, epochs are
full shuffles.

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
    """Epochs that begin with what is near: the resident samples, then what the epoch before ended with. Later
    ones are a full shuffle, as are those after which every part has been first."""

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
            # Where only one epoch begins so, the sequence is that of older versions, and so is its digest.
            **({"parts": self._parts} if self._parts > 1 else {}),
        }

    def randomness(self) -> Randomness:
        """Return DeepIO's level and the entropy share of the first epoch; later ones have no less."""
        first, last = self._part(0), self._part(1)
        return Randomness.of_opportunistic(
            self.samples, first[1] - first[0], last[1] - last[0] if self._parts > 1 else 0
        )

    @property
    def _parts(self) -> int:
        """Epochs that begin with a part that has not been first before."""
        first = self.resident_samples
        return 0 if first in (0, self.samples) else min(self.epochs, -(-self.samples // first))

    def _part(self, number: int) -> tuple[int, int]:
        """Where a part begins and ends, as samples are numbered by `_samples_of`."""
        first = self.resident_samples
        return min(number * first, self.samples), min((number + 1) * first, self.samples)

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if epoch >= self._parts:
            key = derive_key(self.seed, Purpose.SHUFFLED, epoch)
            return keyed(self.samples, key).range(start, stop)
        near = self._part(epoch)
        following = self._part(epoch + 1) if epoch + 1 < self._parts else (near[1], near[1])
        others = ((0, near[0]), (following[1], self.samples))
        pieces, base = [], 0
        for group, ranges in enumerate(((near,), others, (following,))):
            count = sum(b - a for a, b in ranges)
            low, high = max(start - base, 0), min(stop - base, count)
            if low < high:
                key = derive_key(self.seed, Purpose.RESIDENT, epoch, group)
                pieces.append(_nth_of(ranges, keyed(count, key).range(low, high)))
            base += count
        return self._samples_of(np.concatenate(pieces))

    def _samples_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples with these numbers: the resident ones first, then part by part the others."""
        first, near = self.resident_samples, numbers < self.resident_samples
        samples = np.empty(len(numbers), np.int64)
        samples[near] = _nth_of(self.resident, numbers[near])
        gaps = [0, *(x for pair in self.resident for x in pair), self.samples]
        others, numbers = tuple(zip(gaps[::2], gaps[1::2], strict=True)), numbers[~near] - first
        if self._parts > 1:
            dealt = keyed(self.samples - first, derive_key(self.seed, Purpose.PARTS))
            numbers = dealt.at(numbers)
        samples[~near] = _nth_of(others, numbers)
        return samples


def _nth_of(
    ranges: tuple[tuple[int, int], ...], numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The samples with these numbers when those of all ranges are counted through."""
    bounds = np.array(ranges, np.int64)
    ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
    which = np.searchsorted(ends, numbers, side="right")
    samples: npt.NDArray[np.int64] = bounds[which, 1] - (ends[which] - numbers)
    return samples
