"""Dataset: a store as a map-style data set, for torch's own loaders and samplers.

`__getitems__` reads a whole batch in one native call, and torch's DataLoader calls it. The native
reader is made when a process first reads, so the data set may be forked, or pickled (as the store's
path and fingerprint) to spawned workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils import data as torch_data

from headrace import api
from headrace.config import reader_options, tier_options
from headrace.frameworks.torch.decode import Decoded, Decoder
from headrace.plane.pipeline import Pipeline
from headrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from headrace.plane.batch import OnError, Skipped
    from headrace.plane.pipeline import Fetched

__all__ = ["Dataset"]


class Dataset(torch_data.Dataset[Decoded]):
    """A map-style data set over a store: item i is (decoded sample, label).

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...).
        decode: `decode(data)` or `decode(data, sample)`, see `headrace.torch.Sample`. Without it,
            samples are uint8 tensors over headrace's buffer.
        parts: parts to read of samples that have several; all if empty.
        seed: of the random keys that `decode` gets.
        on_error: `raise`, or `skip` samples that cannot be read or decoded: batches get smaller.
        options: fields of `headrace.config.ReaderOptions`.

    Attributes:
        store: the open store.

    Raises:
        ValueError: an unknown part or option.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        decode: Callable[..., Any] | None = None,
        *,
        parts: Sequence[str] = (),
        seed: int = 0,
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        self.store = store if isinstance(store, Store) else api.open(store)
        self.decode = decode
        self.parts = tuple(parts)
        self.seed = seed
        self.on_error = on_error
        self.given_options = options
        self.decoder = Decoder(decode, seed, on_error)
        # One thread reads a batch; there is nothing for another one to do.
        self._tiers, reading, _ = tier_options(options)
        self._options, _ = reader_options({"workers": 1, **reading})
        self._epoch = 0
        self._reader = self._new_reader()

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Decoded:
        """Return (decoded sample, label).

        Raises:
            IndexError: there is no such sample.
            DecodeError: `decode` failed.
            HeadraceError: the sample cannot be read.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}, expected {-len(self)} to {len(self) - 1}")
        items = self.__getitems__([index % len(self)])
        if not items:
            raise IndexError(f"sample {index} was left out: {self.skipped[-1].reason}")
        return items[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Decoded]:
        """Return (decoded sample, label) of each index; one native read for all.

        Raises:
            SampleNotFound: an index lies outside the store.
            DecodeError: `decode` failed.
            HeadraceError: a sample cannot be read.
        """
        return self.decoded(self.fetch(np.asarray(indices, np.int64), self._epoch))

    @property
    def skipped(self) -> list[Skipped]:
        """Samples that this process left out so far."""
        return self._reader.skipped

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, so that `decode` gets other random keys than in the last.

        Like every change of a data set, it reaches workers that are started afterwards.
        """
        self._epoch = epoch

    def replaced(
        self,
        decode: Callable[..., Any] | None,
        parts: Sequence[str],
        seed: int | None,
        on_error: OnError | None,
        options: dict[str, Any],
    ) -> Dataset:
        """Return a data set over the same store; what is None or empty stays as it is here."""
        return Dataset(
            self.store,
            self.decode if decode is None else decode,
            parts=parts or self.parts,
            seed=self.seed if seed is None else seed,
            on_error=self.on_error if on_error is None else on_error,
            **{**self.given_options, **options},
        )

    def fetch(self, indices: Any, epoch: int) -> Fetched:
        """Read one batch; int64, shape (samples,)."""
        return self._reader.fetch(indices, epoch)

    def decoded(self, fetched: Fetched) -> list[Decoded]:
        """Decode a batch that was read."""
        return self.decoder.decode(fetched.batch, self.store.names, self.skipped)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reader = self._new_reader()

    def _new_reader(self) -> Pipeline:
        over = api.plane_over(self._tiers, self._options)
        return Pipeline(
            self.store, self._options, self.parts, self.on_error, self._tiers, over=over
        )
