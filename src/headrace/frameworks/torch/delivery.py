"""Delivery: what the ways of making batches hand to the loader, which alone counts.

A way has `deliveries(this)`: a generator of one `Delivery` for each span of a pass, in order, that
cleans up when it is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy as np
    from numpy.typing import NDArray

    from headrace.frameworks.torch.decode import Decoded
    from headrace.plane.cursor import Pass
    from headrace.plane.store_reader import Fetched

__all__ = ["Collate", "Delivery", "Way"]


class Delivery(NamedTuple):
    """One batch, and what its delivery is counted with."""

    value: Any
    """What the user gets."""

    asked: NDArray[np.int64]
    """int64, shape (samples asked for,): goes into the order hash."""

    samples: int
    """Samples that are in the batch."""

    nbytes: int
    """Their bytes in the store."""

    reads: dict[str, int]
    """How they were read, see `LoaderStats`."""

    @classmethod
    def of(cls, fetched: Fetched, value: Any, samples: int) -> Delivery:
        """Return the delivery of a value that was made from a batch."""
        return cls(value, fetched.asked, samples, fetched.batch.nbytes, fetched.reads)


class Way(Protocol):
    """A way from a pass to its batches."""

    def deliveries(self, this: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order."""

    def close(self) -> None:
        """Let go of what is kept from pass to pass."""


class Collate:
    """Puts decoded samples together; pickled to workers if the user's function is.

    Args:
        function: torch's `collate_fn`; None: `torch.utils.data.default_collate`.
    """

    def __init__(self, function: Callable[[list[Decoded]], Any] | None) -> None:
        self.function = function

    def __call__(self, samples: list[Decoded]) -> Any:
        """Return the batch.

        Raises:
            ValueError: there are no samples, and no function of the user's that might accept that.
        """
        if self.function is not None:
            return self.function(samples)
        if not samples:
            raise ValueError(
                "a batch has no samples: all were skipped, or several ranks share an exact tail of "
                "fewer samples; give tail='pad', or a collate_fn that accepts an empty list",
            )
        return default_collate(samples)
