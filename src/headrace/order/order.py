"""Order: which sample comes when.

An order is a pure function of (seed, epoch, position). It holds no cursor, so any number of ranks
and workers can ask for any part of any epoch and agree; what moves is the position, which is
counted where batches are delivered (`OrderState`).

Orders are immutable and safe to share between threads. Each says in its docstring how much memory
it takes; only orders that need labels or weights take memory that grows with the data.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from hashlib import blake2b
from operator import index as as_integer
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import OrderError, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from headrace.order.label_mix import LabelMix
    from headrace.order.randomness import Randomness


class Order(ABC):
    """A sequence of sample indices for every epoch.

    Two orders are equal if they deliver the same sequence: same type, same `describe()`.

    Attributes:
        samples: the number of samples in the data, n; indices lie in [0, n).
        seed: the seed of all epochs, 0 to 2^64 - 1.
    """

    # The dataclasses below have these as fields. At run time they must not stand here: dataclass
    # would take an inherited property for the field's default.
    if TYPE_CHECKING:

        @property
        def samples(self) -> int:
            """The number of samples in the data, n; indices lie in [0, n)."""

        @property
        def seed(self) -> int:
            """The seed of all epochs, 0 to 2^64 - 1."""

    @property
    def length(self) -> int:
        """The number of positions in an epoch; n unless an order says otherwise."""
        return self.samples

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence (mode, parameters, n, seed), ready for JSON."""

    @abstractmethod
    def randomness(self) -> Randomness:
        """Say how far the order is from a full shuffle."""

    def label_mix(self, labels: npt.ArrayLike, batch_size: int, epoch: int = 0) -> LabelMix:
        """Say how far the labels that come together are from those of the epoch.

        Args:
            labels: the store's `labels`: whole numbers, shape (n,).
            batch_size: samples of all ranks' batches together.
            epoch: which one.

        Raises:
            OrderError: labels are not one whole number for each sample.
            ValueError: the epoch or the batch size is out of bounds.
        """
        from headrace.order.label_mix import LabelMix  # which knows the orders that repeat samples

        return LabelMix.of(self, labels, batch_size, epoch=epoch)

    @abstractmethod
    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the indices at positions start to stop - 1; the arguments are checked."""

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sample indices at positions `start` to `stop - 1` of an epoch.

        Args:
            epoch: 0 to 2^32 - 1.
            start: the first position, 0 to `length`.
            stop: the position after the last, `start` to `length`.

        Returns:
            int64, shape (stop - start,).

        Raises:
            ValueError: the epoch or a position is out of bounds.
            OrderError: the order gave another number of indices than it was asked for.
        """
        epoch = checked("epoch", epoch, 0, EPOCH_MAX)
        stop = checked("stop", stop, 0, self.length)
        start = checked("start", start, 0, stop)
        if start == stop:
            return np.empty(0, np.int64)
        indices = self._indices(epoch, start, stop)
        if len(indices) != stop - start:  # an order of the user's: ranks would fall out of step
            raise OrderError(
                f"{type(self).__name__} gave {len(indices)} indices for the positions {start} to "
                f"{stop - 1} of epoch {epoch}, expected {stop - start}.",
                next_step="Its `length` must say how many positions an epoch has.",
            )
        return indices

    def wrapped(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return indices like `indices`, but start over at position 0 past the end of the epoch.

        This is how padded batches are filled. The epoch number does not change on the way.

        Args:
            epoch: 0 to 2^32 - 1.
            start: the first position, at least 0; may lie past `length`.
            stop: the position after the last, at least `start`.

        Returns:
            int64, shape (stop - start,).

        Raises:
            ValueError: the epoch or a position is out of bounds.
        """
        start = checked("start", start, 0)
        stop = checked("stop", stop, start)
        length = self.length
        if stop <= length:
            return self.indices(epoch, start, stop)
        if start == stop:
            return np.empty(0, np.int64)
        if stop - start >= length:
            whole = self.indices(epoch, 0, length)
            return whole[np.arange(start, stop) % length]
        first, last = start % length, (stop - 1) % length + 1
        if first < last:
            return self.indices(epoch, first, last)
        return np.concatenate(
            [self.indices(epoch, first, length), self.indices(epoch, 0, last)],
        )

    def basis(self, epoch: int, position: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return what states hold of this order beside its digest: whole numbers, nothing for most orders.

        An order whose past is not told by its parameters has one: of a mixture whose proportions may have been
        others before, the samples that each source has given.
        """
        return ()

    def saved_with(self, basis: tuple[int, ...]) -> Order:  # noqa: ARG002
        """Return the order that a state with this basis belongs to, as far as the basis says."""
        return self

    def resumed(self, epoch: int, position: int, basis: tuple[int, ...]) -> Order:  # noqa: ARG002
        """Return the order that goes on from a state with this basis.

        Raises:
            StateMismatch: the state belongs to another kind of order.
        """
        if basis:
            raise StateMismatch(
                f"state was saved with a mixture or a store that was followed, this is {self.describe()}.",
                next_step="Resume with the mixture that the state was saved with, or with follow=True.",
            )
        return self

    def digest(self) -> str:
        """Return 16 hex digits that identify `describe()`; kept in saved states."""
        return digest_of(json.dumps(self.describe(), sort_keys=True).encode())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Order):
            return NotImplemented
        return type(self) is type(other) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(self.digest())


def digest_of(data: bytes | memoryview) -> str:
    """Return a 64-bit BLAKE2b digest in hex: enough to notice a change, not to resist an attack."""
    return blake2b(data, digest_size=8).hexdigest()


def window_tokens_of(described: Mapping[str, Any]) -> int:
    """Tokens of a window, of an order's `describe()`; 0: it is one of samples."""
    inner = described.get("sources")  # of a trace, perhaps: it may be anything
    first = inner[0] if isinstance(inner, list) and inner else described
    tokens = first.get("window_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) else 0


def unit_of(described: Mapping[str, Any]) -> str:
    """What an order counts, of its `describe()`: `windows` of tokens, or `samples`."""
    return "windows" if window_tokens_of(described) else "samples"


SEED_MAX = (1 << 64) - 1

EPOCH_MAX = (1 << 32) - 1
"""Far more than is trained; small enough that epoch times rounds stays in 64 bits in practice."""


def checked(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as a plain int (numpy integers become ints) if it lies in [low, high].

    Raises TypeError if the value is not a whole number, and OrderError if the value is out of bounds; the
    message carries it.
    """
    try:
        number = as_integer(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected a whole number") from None
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise OrderError(f"{name} is {number}, expected {bounds}")
    return number
