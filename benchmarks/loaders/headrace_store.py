"""headrace: a packed store and its loader, in exact and in blocked order, nothing tuned."""

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


class Exact(Plain):
    """The five lines of the README."""

    form = "headrace"
    order = "exact"
    _order: str | None = None  # the loader's own default

    def load(self) -> None:
        import headrace as hr

        # The facade's names are imported when they are first used: imports are not measured.
        self._hr, _ = hr, (hr.open, hr.loader)

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._store = self._hr.open(path)
        self._loader: Any = None

    def batches(self, seed: int) -> Iterator[Batch]:
        chosen = {} if self._order is None else {"order": self._order}
        loader = self._hr.loader(
            self._store, batch_size=self._data.batch_size, seed=seed, rank=0, world_size=1, **chosen
        )
        self._loader = loader
        # A class folder that is missing (a tiny --scale) shifts the labels: compare none then.
        labelled = self._data.samples >= datasets.CLASSES
        for batch in loader:
            # Samples of a direct read lie where the read put them: in any order, with gaps.
            yield FlatBatch(
                data=np.asarray(batch.data),
                starts=batch.offsets,
                ends=batch.offsets + batch.lengths,
                labels=batch.labels if labelled else None,
            )

    def close(self) -> None:
        self._store.close()

    def facts(self) -> dict[str, object]:
        """The loader's own word on how random its order is."""
        randomness = self._loader.order.randomness()
        return {"randomness_level": randomness.level, "entropy_share": randomness.entropy_share}


class Blocked(Exact):
    """Whole blocks, shuffled in a window: DLFS's chunk batching."""

    order = "blocked"
    _order = "blocked"
