"""Plain open and read, one file after the other: what everything else must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import datasets
from benchmarks.loaders import Plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


def sample_paths(data: DataSet, path: Path) -> list[str]:
    """The path of each sample's file, by index: the list a user makes once."""
    folder = str(path)
    return [f"{folder}/{datasets.file_name(index)}" for index in range(data.samples)]


def read_file(path: str) -> bytes:
    """All bytes of one file, unbuffered: the read goes straight into the result."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - pathlib costs 1 us a sample
        return file.read()


class OpenRead(Plain):
    """A loop."""

    form = "files"

    def load(self) -> None:
        """Nothing to import."""

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._paths = sample_paths(data, path)

    def batches(self, seed: int) -> Iterator[Batch]:
        order = datasets.epoch_order(self._data, seed).tolist()
        step = self._data.batch_size
        for at in range(0, len(order), step):
            yield [read_file(self._paths[index]) for index in order[at : at + step]]
