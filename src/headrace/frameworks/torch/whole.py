"""Whole batches: nothing is decoded, so nothing is copied and no Python runs per sample."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.frameworks.torch.delivery import Delivery
from headrace.frameworks.torch.tensors import TensorBatch

if TYPE_CHECKING:
    from collections.abc import Generator

    from headrace.plane import Loader
    from headrace.plane.cursor import Pass

__all__ = ["WholeBatches"]


class WholeBatches:
    """Delivers `TensorBatch`.

    Args:
        loader: gives order and reader.
        pin_memory: copy each batch into page-locked memory.
    """

    def __init__(self, loader: Loader, *, pin_memory: bool) -> None:
        self._loader = loader
        self._pin_memory = pin_memory

    def deliveries(self, this: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order."""
        fetched = self._loader.reader.stream(self._loader.order, this.epoch, this.spans())
        try:
            for one in fetched:
                tensors = TensorBatch.over(one.batch)
                if self._pin_memory:
                    one.way.collated_s = time.perf_counter()
                    tensors = tensors.pin_memory()
                    one.way.moved_s = time.perf_counter()
                yield Delivery.of(one, tensors, len(tensors))
        finally:
            fetched.close()

    def close(self) -> None:
        """There is nothing to let go of."""
