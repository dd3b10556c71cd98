"""SPDL: its thread pipeline over the folder of files, one task a batch.

One task a sample (its `DataLoader` class) spends more on the event loop than on these files:
batches of paths go in, four threads read them. Four was its best on two cores.
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

THREADS = 4


def read_files(paths: list[str]) -> list[bytes]:
    """One batch."""
    return [read_file(path) for path in paths]


class Spdl(Plain):
    """Source, one concurrent stage, sink."""

    form = "files"

    def load(self) -> None:
        import spdl.pipeline

        self._pipeline_module: Any = spdl.pipeline

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._paths = sample_paths(data, path)

    def _path_batches(self, seed: int) -> Iterator[list[str]]:
        order = datasets.epoch_order(self._data, seed).tolist()
        step = self._data.batch_size
        for at in range(0, len(order), step):
            yield [self._paths[index] for index in order[at : at + step]]

    def batches(self, seed: int) -> Iterator[Batch]:
        pipeline = (
            self._pipeline_module.PipelineBuilder()
            .add_source(self._path_batches(seed))
            .pipe(read_files, concurrency=THREADS)
            .add_sink(3)
            .build(num_threads=THREADS)
        )
        with pipeline.auto_stop():
            yield from pipeline
