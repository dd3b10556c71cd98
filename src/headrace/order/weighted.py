"""Orders that draw samples: `Weighted` in proportion to weights, `Balanced` every class equally often.

A weighted draw is with replacement, and a pure function of (seed, epoch, position): the position is
hashed to a number in [0, 1), and a binary search in the cumulative weights gives the sample (inversion
method). So, unlike a sampler with the state of a generator, any part of any epoch can be asked for.

Balanced positions come in rounds of C, the number of classes: each round names every class once, in an
order of its own. The k-th round takes from each class its k-th draw; the draws of a class run through a
random permutation of its members, and through a new one each time all have been used. Draws are counted on
through the epochs, so a class with more members than an epoch has rounds is used up evenly instead of
being drawn again by chance. The last round of an epoch may be cut short: the classes that it does not
reach skip that draw.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace._native import BalancedOrder
from headrace.errors import OrderError
from headrace.order.hash import SAMPLES_MAX, Purpose, derive_key, uniform
from headrace.order.order import SEED_MAX, Order, checked, digest_of
from headrace.order.randomness import Randomness

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Weighted(Order):
    """Independent draws; a sample of weight 0 never comes, others may come more than once.

    Memory: 8 bytes per sample for the cumulative weights.

    Args:
        weights: finite and not negative, shape (n,); they need not sum to 1.
        seed: another seed, another sequence of epochs.
        epoch_length: positions in an epoch; n by default.

    Raises:
        OrderError: weights are not one-dimensional, one is negative or not finite, their sum is 0
            or not finite, or another argument is out of bounds.
    """

    weights: InitVar[npt.ArrayLike]
    seed: int = 0
    epoch_length: int | None = None
    samples: int = field(init=False)
    weights_digest: str = field(init=False)
    _cumulative: npt.NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self, weights: npt.ArrayLike) -> None:
        array = _checked_weights(weights, "weights")
        length = array.size if self.epoch_length is None else self.epoch_length
        values = {
            "seed": checked("seed", self.seed, 0, SEED_MAX),
            "epoch_length": checked("epoch_length", length, 1, SAMPLES_MAX),
            "samples": array.size,
            "weights_digest": digest_of(array.data),
            "_cumulative": _cumulated(array),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def by_class(
        cls,
        labels: npt.ArrayLike,
        class_weights: npt.ArrayLike,
        seed: int = 0,
        epoch_length: int | None = None,
    ) -> Self:
        """Give every sample the weight of its class: `class_weights[label]`.

        A class is then drawn in proportion to its weight times its number of samples. Samples with
        a negative label get weight 0.

        Args:
            labels: whole numbers below the number of classes, shape (n,).
            class_weights: finite and not negative, shape (C,).
            seed: another seed, another sequence of epochs.
            epoch_length: positions in an epoch; n by default.

        Raises:
            OrderError: a label has no weight, or as for `Weighted`.
        """
        array = checked_labels(labels)
        table = _checked_weights(class_weights, "class_weights")
        if int(array.max()) >= table.size:
            raise OrderError(
                f"label {int(array.max())} has no weight: class_weights holds {table.size}",
            )
        return cls(np.where(array < 0, 0.0, table[np.maximum(array, 0)]), seed, epoch_length)

    @property
    def length(self) -> int:
        """The number of positions in an epoch: `epoch_length`, or n."""
        return self.samples if self.epoch_length is None else self.epoch_length

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON; weights by their digest."""
        return {
            "mode": "weighted",
            "samples": self.samples,
            "seed": self.seed,
            "length": self.length,
            "weights": self.weights_digest,
        }

    def randomness(self) -> Randomness:
        """Return the entropy share of the draws; the level is defined to be equal to it. O(n)."""
        return Randomness.of_weighted(np.diff(self._cumulative, prepend=0.0), self.length)

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, stop, dtype=np.int64)
        key = derive_key(self.seed, Purpose.DRAWS, epoch)
        total = self._cumulative[-1]
        # Right-sided, so that a sample of weight 0 (an empty interval) is passed over. The product
        # may round up to the total: the last interval that is not empty then takes it.
        drawn = np.minimum(uniform(key, positions) * total, np.nextafter(total, 0.0))
        indices: npt.NDArray[np.int64] = np.searchsorted(self._cumulative, drawn, side="right")
        return indices.astype(np.int64, copy=False)


def _checked_weights(weights: npt.ArrayLike, name: str) -> npt.NDArray[np.float64]:
    array = np.ascontiguousarray(weights, np.float64)
    if np.ndim(weights) != 1 or array.size == 0:
        raise OrderError(f"{name} have shape {np.shape(weights)}, expected one number each")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        at = int(wrong[0])
        raise OrderError(f"{name}[{at}] is {array[at]}, expected a finite number, at least 0")
    return array


def _cumulated(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    # Scaled by the largest first: a sum of huge or tiny weights must not overflow or vanish.
    largest = float(weights.max())
    if largest == 0.0:
        raise OrderError(f"all {weights.size} weights are 0, expected at least one above 0")
    return np.cumsum(weights / largest)


_POSITION_MAX = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Balanced(Order):
    """Each class once in every round; samples with a negative label never.

    Memory: 8 bytes per labelled sample for the member lists, and up to 4 bytes more for the
    permutations of small classes, made as they are used.

    Args:
        labels: whole numbers, shape (n,); classes are the distinct values that are not negative.
        seed: another seed, another sequence of epochs.
        epoch_length: positions in an epoch; n by default.

    Raises:
        OrderError: labels are not one-dimensional whole numbers, none is a class, or another
            argument is out of bounds.
    """

    labels: InitVar[npt.ArrayLike]
    seed: int = 0
    epoch_length: int | None = None
    samples: int = field(init=False)
    labels_digest: str = field(init=False)
    _native: BalancedOrder = field(init=False, repr=False)

    def __post_init__(self, labels: npt.ArrayLike) -> None:
        array = checked_labels(labels)
        if int(array.max()) < 0:
            raise OrderError(f"all {array.size} labels are negative, expected at least one class")
        length = array.size if self.epoch_length is None else self.epoch_length
        length = checked("epoch_length", length, 1, SAMPLES_MAX)
        seed = checked("seed", self.seed, 0, SEED_MAX)
        values = {
            "seed": seed,
            "epoch_length": length,
            "samples": array.size,
            "labels_digest": digest_of(array.data),
            "_native": BalancedOrder(array, seed, length),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def length(self) -> int:
        """The number of positions in an epoch: `epoch_length`, or n."""
        return self.samples if self.epoch_length is None else self.epoch_length

    @property
    def classes(self) -> npt.NDArray[np.int64]:
        """The labels that are drawn, ascending; int64, shape (C,)."""
        return self._native.classes

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON; labels by their digest."""
        return {
            "mode": "balanced",
            "samples": self.samples,
            "seed": self.seed,
            "length": self.length,
            "classes": self.classes.size,
            "labels": self.labels_digest,
        }

    def randomness(self) -> Randomness:
        """Return the entropy share of the draws; the level is defined to be equal to it."""
        return Randomness.of_balanced(self.samples, self.length, np.diff(self._native.starts))

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        try:
            return self._native.indices(epoch, start, stop)
        except ValueError as e:  # draws are counted through all epochs
            raise OrderError(str(e)) from None


def checked_labels(labels: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return labels as a contiguous int64 array.

    Raises OrderError if they are not whole numbers in one dimension, or there are none.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise OrderError(
            f"labels have shape {array.shape} and dtype {array.dtype}, "
            "expected one whole number per sample",
        )
    if array.dtype.kind == "u" and int(array.max()) > _POSITION_MAX:
        raise OrderError(f"a label is {int(array.max())}, expected at most 2^63 - 1")
    return np.ascontiguousarray(array, np.int64)
