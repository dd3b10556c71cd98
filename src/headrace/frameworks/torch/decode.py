"""Decode: calls a user's function on each sample, wherever that happens.

The function gets the sample's bytes and, if it takes two arguments, a `Sample` that knows the label
and a random key. The key is a hash of (seed, epoch, index) and of nothing else: an augmentation
does not depend on how many threads or workers there are, nor on where a run was resumed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.errors import DecodeError
from headrace.frameworks.torch.tensors import TensorBatch
from headrace.order.hash import Purpose, derive_key
from headrace.plane.batch import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.plane import Batch
    from headrace.plane.batch import OnError

__all__ = ["Decoded", "Decoder", "Sample"]

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
        self._takes_sample = function is not None and _takes_two(function)

    def decode(
        self,
        batch: Batch,
        names: Sequence[str],
        skipped: list[Skipped],
        span: slice = slice(None),
    ) -> list[Decoded]:
        """Decode some samples of a batch.

        Args:
            batch: the bytes.
            names: the store's names, for errors.
            skipped: takes what was left out.
            span: which samples of the batch.

        Raises:
            DecodeError: the user's function failed; names the sample.
        """
        places = range(len(batch))[span]
        if self.function is None:
            tensors = TensorBatch.over(batch)
            one = tensors.offsets.ndim == 1
            return [
                (tensors[i] if one else self._parts(tensors, i), int(batch.labels[i]))
                for i in places
            ]
        decoded = []
        for i in places:
            try:
                decoded.append((self._call(batch, i), int(batch.labels[i])))
            except Exception as e:
                error = _named(e, int(batch.indices[i]), names)
                if self._on_error == "raise":
                    raise error from e
                skipped.append(Skipped(error.index, error.name, str(error)))
        return decoded

    def _call(self, batch: Batch, i: int) -> Any:
        assert self.function is not None
        data: Any = batch[i] if batch.offsets.ndim == 1 else self._parts(batch, i)
        if not self._takes_sample:
            return self.function(data)
        index, label = int(batch.indices[i]), int(batch.labels[i])
        return self.function(data, Sample(index, label, batch.epoch, self.seed))

    @staticmethod
    def _parts(batch: Batch | TensorBatch, i: int) -> dict[str, Any]:
        return {name: batch[i, name] for name in batch.part_names}


def _named(cause: Exception, index: int, names: Sequence[str]) -> DecodeError:
    name = names[index]
    return DecodeError(
        f"decoding sample {index} ({name!r}) failed: {type(cause).__name__}: {cause}.",
        next_step="Mend the sample or the decode function, or pass on_error='skip'.",
        index=index,
        name=name,
    )


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function wants a second positional argument; builtins without signature do not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(wanted) > 1
