"""torch.utils.data.DataLoader over the folder of files, with 0 and 2 workers.

As users with raw bytes write it: a map-style data set that opens and reads a file, and a collate
function that leaves the bytes alone (variable lengths cannot be stacked). The sampler is the same
permutation that the other exact engines get (`shuffle=True` would draw another, at more cost), so
that a hot run knows which files to warm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import datasets
from benchmarks.loaders import Plain
from benchmarks.loaders.openread import read_file, sample_paths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


class FileDataset:
    """A map-style data set; the DataLoader asks for no base class."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        return read_file(self._paths[index])


def keep_bytes(samples: list[bytes]) -> list[bytes]:
    """Collates nothing."""
    return samples


class Torch0(Plain):
    """In the training process itself."""

    form = "files"
    workers = 0

    def load(self) -> None:
        import torch.utils.data

        self._torch: Any = torch  # its stubs ask for a base class that it does not need

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._dataset = FileDataset(sample_paths(data, path))

    def batches(self, seed: int) -> Iterator[Batch]:
        yield from self._torch.utils.data.DataLoader(
            self._dataset,
            batch_size=self._data.batch_size,
            sampler=datasets.epoch_order(self._data, seed).tolist(),
            num_workers=self.workers,
            collate_fn=keep_bytes,
        )


class Torch2(Torch0):
    """With two worker processes, as many as the test machine has cores."""

    workers = 2
