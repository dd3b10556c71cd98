"""Grain over ArrayRecord, and headrace's adapter for Grain.

Grain as its documentation writes it: a random-access ArrayRecord file with one record a group, a
global shuffle, and records read by its 16 threads, in this process or in two workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import datasets
from benchmarks.check import FlatBatch
from benchmarks.loaders import Plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


def keep_bytes(samples: list[bytes]) -> list[bytes]:
    """Collates nothing."""
    return samples


class Grain0(Plain):
    """In the training process itself."""

    form = "arrayrecord"
    workers = 0

    def load(self) -> None:
        import grain
        from absl import flags

        flags.FLAGS(["benchmark"])
        self._grain: Any = grain

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._source = self._grain.sources.ArrayRecordDataSource(
            sorted(map(str, path.glob("*.array_record")))
        )

    def batches(self, seed: int) -> Iterator[Batch]:
        grain = self._grain
        records = grain.MapDataset.source(self._source).seed(seed).shuffle()
        batches = records.batch(self._data.batch_size, batch_fn=keep_bytes)
        # Grain reads elements ahead, so each is a batch: 500 of them, its default, are 14 GB.
        read = grain.ReadOptions(num_threads=16, prefetch_buffer_size=16)
        made = batches.to_iter_dataset(read)
        if self.workers:
            options = grain.multiprocessing.MultiprocessingOptions(num_workers=self.workers)
            made = made.mp_prefetch(options)
        self._iterator = iter(made)
        return self._iterator

    def close(self) -> None:
        self._iterator.close()


class Grain2(Grain0):
    """With two worker processes, as many as the test machine has cores."""

    workers = 2


class Headrace(Plain):
    """headrace's whole batches through Grain's iterator."""

    form = "headrace"

    def load(self) -> None:
        import headrace as hr
        from headrace.grain import dataset

        self._open, self._dataset = hr.open, dataset

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._store = self._open(path)

    def batches(self, seed: int) -> Iterator[Batch]:
        labelled = self._data.samples >= datasets.CLASSES
        for batch in self._dataset(
            self._store, self._data.batch_size, seed=seed, **self._options()
        ):
            starts = batch["offsets"]
            yield FlatBatch(
                data=np.asarray(batch["data"]),
                starts=np.asarray(starts, np.int64),
                ends=np.asarray(starts, np.int64) + np.asarray(batch["lengths"], np.int64),
                labels=np.asarray(batch["labels"], np.int64) if labelled else None,
            )

    def _options(self) -> dict[str, Any]:
        return {}


class HeadraceJax(Headrace):
    """The same as JAX arrays."""

    def load(self) -> None:
        super().load()
        import jax

        self._device = jax.devices()[0]

    def _options(self) -> dict[str, Any]:
        return {"device": self._device}
