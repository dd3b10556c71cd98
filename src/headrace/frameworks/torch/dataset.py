"""Dataset: a store as a map-style data set, for torch's own loaders and samplers.

`__getitems__` reads a whole batch in one native call, and torch's DataLoader calls it. The native
reader is made when a process first reads, so the data set may be forked, or pickled (as the store's
path and fingerprint) to spawned workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import data as torch_data

from headrace import api
from headrace.config import reader_options, tier_options
from headrace.frameworks.torch.tensors import TensorBatch
from headrace.frameworks.view import decode_error, sample_data, takes_two
from headrace.order.hash import Purpose, derive_key
from headrace.plane.batch import Skipped
from headrace.plane.pipeline import Pipeline
from headrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from headrace.plane import Batch
    from headrace.plane.batch import OnError
    from headrace.plane.pipeline import Fetched


Decoded = tuple[Any, int]
"""What the user's function returned, and the sample's label (-1: none)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a decode function may want to know beside the bytes."""

    index: int
    """The sample's index in the store."""

    label: int
    """Its label, -1 if it has none."""

    epoch: int
    """The epoch it is delivered in."""

    seed: int
    """The loader's seed."""

    @property
    def key(self) -> int:
        """64 random bits that depend on seed, epoch and index only."""
        return derive_key(self.seed, Purpose.SAMPLES, self.epoch, self.index)

    def rng(self) -> np.random.Generator:
        """Return numpy's random numbers for this sample in this epoch."""
        return np.random.Generator(np.random.Philox(key=self.key))

    def torch_generator(self) -> torch.Generator:
        """Return torch's random numbers for this sample in this epoch."""
        return torch.Generator().manual_seed(self.key)


class Decoder:
    """Decodes samples of batches. May be shared by threads; is pickled if its function is.

    Args:
        function: `decode(data)` or `decode(data, sample)`, where data is a read-only memoryview of
            the sample's bytes (a dict of them by part, where several parts are read). None: samples
            are delivered as uint8 tensors over headrace's buffer.
        seed: of the random keys.
        on_error: what to do with a sample that cannot be decoded.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        seed: int = 0,
        on_error: OnError = "raise",
    ) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"decode is {function!r}, expected a function")
        self.function = function
        self.seed = seed
        self._on_error = on_error
        self._takes_sample = function is not None and takes_two(function)

    def decode(
        self,
        batch: Batch,
        names: Sequence[str],
        skipped: list[Skipped],
        span: slice = slice(None),
    ) -> list[Decoded]:
        """Decode some samples of a batch.

        Raises:
            DecodeError: the user's function failed; names the sample.
        """
        places = range(len(batch))[span]
        if self.function is None:
            tensors = TensorBatch.over(batch)
            return [(sample_data(tensors, i), int(batch.labels[i])) for i in places]
        decoded = []
        for i in places:
            try:
                decoded.append((self._call(batch, i), int(batch.labels[i])))
            except Exception as e:
                index = int(batch.indices[i])
                error = decode_error(index, names[index], f"{type(e).__name__}: {e}")
                if self._on_error == "raise":
                    raise error from e
                skipped.append(Skipped(error.index, error.name, str(error)))
        return decoded

    def _call(self, batch: Batch, i: int) -> Any:
        assert self.function is not None
        data = sample_data(batch, i)
        if not self._takes_sample:
            return self.function(data)
        index, label = int(batch.indices[i]), int(batch.labels[i])
        return self.function(data, Sample(index, label, batch.epoch, self.seed))


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
