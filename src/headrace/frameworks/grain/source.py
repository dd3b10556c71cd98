"""Source: a store as a `grain.sources.RandomAccessDataSource`.

For pipelines that leave order and batches to Grain. `headrace.grain.dataset` is faster: it reads
whole batches, ahead. Any number of threads may read; the source is pickled to Grain's workers as
the store's path and fingerprint.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import api
from headrace.config import reader_options
from headrace.plane.pipeline import Pipeline
from headrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from headrace.plane import Batch

__all__ = ["Source"]


class Source:
    """A store for Grain: item i is a dict of `data` (uint8) and `label` (int64, -1: none).

    Where several parts are read, `data` is a dict of them by part.

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...).
        parts: parts to read of samples that have several; all if empty.
        options: fields of `headrace.config.ReaderOptions`.

    Raises:
        ValueError: an unknown part or option.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        *,
        parts: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.store = store if isinstance(store, Store) else api.open(store)
        self._parts = tuple(parts)
        self._options, _ = reader_options(options)
        self._begin()

    def _begin(self) -> None:
        self._reader = Pipeline(self.store, self._options, self._parts)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample.

        Raises:
            IndexError: there is no such sample.
            HeadraceError: it cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index is {index}, expected 0 to {len(self) - 1}")
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples at `indices`; one native read for all. Grain calls it by this name.

        Raises:
            SampleNotFound: an index lies outside the store.
            HeadraceError: a sample cannot be read.
        """
        wanted = np.asarray([int(i) for i in indices], np.int64)
        with self._lock:  # the native reader is made with the first read
            reader = self._reader
            _ = reader.engine
        batch = reader.fetch(wanted).batch
        return [_sample(batch, i) for i in range(len(batch))]

    def __repr__(self) -> str:
        """Tell this data from other data: Grain compares it when it restores a checkpoint."""
        parts = f", parts={self._parts}" if self._parts else ""
        return f"headrace.grain.Source({self.store.fingerprint!r}{parts})"

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "_parts": self._parts, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _sample(batch: Batch, i: int) -> dict[str, Any]:
    if len(batch.part_names) == 1:
        data: Any = np.frombuffer(batch[i], np.uint8)
    else:
        data = {name: np.frombuffer(batch[i, name], np.uint8) for name in batch.part_names}
    return {"data": data, "label": batch.labels[i]}
