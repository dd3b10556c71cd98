"""HF datasets: a memory-mapped Arrow table, one fancy index a batch in exact random order.

`dataset[indices]` is the batch access that its documentation recommends over `dataset[i]`, and the
one that the DataLoader's `__getitems__` ends in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import datasets
from benchmarks.loaders import Plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


class HfDatasets(Plain):
    """In the training process itself."""

    form = "hf"

    def load(self) -> None:
        import datasets as hf

        self._hf = hf

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._dataset = self._hf.Dataset.from_file(str(path / "data.arrow"))

    def batches(self, seed: int) -> Iterator[Batch]:
        order = datasets.epoch_order(self._data, seed).tolist()
        step = self._data.batch_size
        for at in range(0, len(order), step):
            yield self._dataset[order[at : at + step]]["data"]
