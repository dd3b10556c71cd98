"""LitData: StreamingDataset over local chunks, shuffle=True, no workers.

Its shuffle permutes chunks and the samples inside them: not a true global shuffle, so it reads
whole chunks where the exact engines read single samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.loaders import Plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet


def keep_bytes(samples: list[bytes]) -> list[bytes]:
    """Collates nothing."""
    return samples


class LitData(Plain):
    """In the training process itself."""

    form = "litdata"
    order = "chunks, then samples inside a chunk"

    def load(self) -> None:
        import litdata

        self._litdata = litdata

    def open(self, data: DataSet, path: Path) -> None:
        self._batch_size = data.batch_size
        self._path = str(path)

    def batches(self, seed: int) -> Iterator[Batch]:
        dataset = self._litdata.StreamingDataset(
            self._path, shuffle=True, seed=seed, drop_last=False
        )
        yield from self._litdata.StreamingDataLoader(
            dataset, batch_size=self._batch_size, num_workers=0, collate_fn=keep_bytes
        )
