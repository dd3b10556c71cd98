"""LMDB: one get a sample in one read transaction, keys in exact random order.

`readahead=False` is what py-lmdb recommends for random reads of a data set larger than memory.
`buffers=False` copies each value into a bytes object: a view would not read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import datasets
from benchmarks.forms import lmdb_key
from benchmarks.loaders import Plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


class Lmdb(Plain):
    """In the training process itself: its fastest way in earlier measurements."""

    form = "lmdb"

    def load(self) -> None:
        import lmdb

        self._lmdb: Any = lmdb  # its stubs know nothing of a key that must exist

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._env = self._lmdb.open(
            str(path), readonly=True, lock=False, readahead=False, meminit=False
        )

    def batches(self, seed: int) -> Iterator[Batch]:
        order = datasets.epoch_order(self._data, seed).tolist()
        step = self._data.batch_size
        with self._env.begin(buffers=False) as txn:
            for at in range(0, len(order), step):
                yield [txn.get(lmdb_key(index)) for index in order[at : at + step]]

    def close(self) -> None:
        self._env.close()
