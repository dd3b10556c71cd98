"""Delivery: what the ways of making batches hand to the loader, which alone counts.

A way has `deliveries(this)`: a generator of one `Delivery` for each span of a pass, in order, that
cleans up when it is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import numpy as np
    from numpy.typing import NDArray

    from headrace.frameworks.torch.decode import Decoded
    from headrace.plane.batch_trace import BatchTrace as Came
    from headrace.plane.cursor import Pass
    from headrace.plane.pipeline import Fetched

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

    way: Came
    """How it came."""

    @classmethod
    def of(cls, fetched: Fetched, value: Any, samples: int) -> Delivery:
        """Return the delivery of a value that was made from a batch."""
        return cls(value, fetched.asked, samples, fetched.batch.nbytes, fetched.reads, fetched.way)


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
        one: gives any sample, decoded: what an empty batch is shaped like.
    """

    def __init__(
        self, function: Callable[[list[Decoded]], Any] | None, one: Callable[[], Decoded]
    ) -> None:
        self.function = function
        self._one = one

    def __call__(self, samples: list[Decoded], asked: int) -> Any:
        """Return the batch. Where several ranks share an exact tail of fewer samples, it may be empty.

        Args:
            samples: decoded.
            asked: how many there would be if none had been skipped.

        Raises:
            ValueError: all samples were skipped, and there is no function of the user's that might accept
                that.
        """
        if self.function is not None:
            return self.function(samples)
        if samples:
            return default_collate(samples)
        if asked:
            raise ValueError(
                f"a batch has no samples: all {asked} were skipped; see `loader.skipped`, or give a "
                "collate_fn that accepts an empty list",
            )
        return _emptied(default_collate([self._one()]))


def _emptied(batch: Any) -> Any:
    """A batch of the same shapes without samples."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(each) for key, each in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    if all(isinstance(each, (str, bytes)) for each in batch):  # default_collate leaves them a list
        return []
    parts = [_emptied(each) for each in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else parts
