"""Batch: the bytes of some samples in one buffer, without a copy or an object per sample.

Direct reads land where the device puts them, so samples lie in `data` in any order and with gaps:
`offsets` says where each starts and `lengths` how long it is. The memory is recycled when the last
array, memoryview or tensor over it is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.store.mixture import Mixture


T = TypeVar("T")


def mixture_of(mixture: T | None) -> T:
    """What a batch was drawn from, or what names its sources.

    Raises:
        ValueError: one store.
    """
    if mixture is None:
        raise ValueError("the batch is of one store, not of a mixture: it has no sources")
    return mixture


class Batch:
    """Samples that are delivered together.

    Attributes:
        data: uint8, shape (bytes,), read-only: the buffer.
        offsets: int64, shape (samples,), or (samples, parts) where several parts are read.
        lengths: int64, shaped like `offsets`; 0 where a sample lacks a part.
        indices: int64, shape (samples,): the samples' indices in the store.
        labels: int64, shape (samples,), -1 where a sample has none.
        part_names: the parts that were read; `("",)` for samples of one part.
        epoch: the epoch the batch belongs to.
        position: the global position of its first sample.
        mixture: what it was drawn from, or None: one store.
    """

    __slots__ = (
        "_memory",
        "data",
        "epoch",
        "indices",
        "labels",
        "lengths",
        "mixture",
        "offsets",
        "part_names",
        "position",
    )

    def __init__(
        self,
        native: _native.Batch,
        part_names: Sequence[str],
        *,
        epoch: int = 0,
        position: int = 0,
        keep: NDArray[np.bool_] | None = None,
    ) -> None:
        self.mixture: Mixture | None = None
        self.data: NDArray[np.uint8] = native.data
        self.indices: NDArray[np.int64] = native.indices
        self.labels: NDArray[np.int64] = native.labels
        self.offsets: NDArray[np.int64] = native.offsets
        self.lengths: NDArray[np.int64] = native.lengths
        self.part_names = tuple(part_names)
        self.epoch = epoch
        self.position = position
        if len(self.part_names) > 1:
            shape = (native.samples, len(self.part_names))
            self.offsets = self.offsets.reshape(shape)
            self.lengths = self.lengths.reshape(shape)
        if keep is not None:
            for name in ("indices", "labels", "offsets", "lengths"):
                setattr(self, name, getattr(self, name)[keep])
        self._memory = memoryview(self.data)  # type: ignore[arg-type]  # numpy's stubs lag

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, i: int) -> memoryview: ...
    @overload
    def __getitem__(self, i: tuple[int, str]) -> memoryview: ...
    def __getitem__(self, i: int | tuple[int, str]) -> memoryview:
        """Return the bytes of the i-th sample, or of one of its parts: `batch[3, "jpg"]`.

        Raises:
            IndexError: the batch has no such sample.
            KeyError: the part was not read.
            ValueError: several parts were read and none is named.
        """
        if isinstance(i, tuple):
            return self._part(*i)
        if self.offsets.ndim == 2:
            raise ValueError(f"name a part: batch[{i}, part], one of {self.part_names}")
        start = int(self.offsets[i])
        return self._memory[start : start + int(self.lengths[i])]

    def _part(self, i: int, part: str) -> memoryview:
        if part not in self.part_names:
            raise KeyError(f"part {part!r} was not read, only {self.part_names}")
        if self.offsets.ndim == 1:
            return self[i]
        number = self.part_names.index(part)
        start = int(self.offsets[i, number])
        return self._memory[start : start + int(self.lengths[i, number])]

    def __iter__(self) -> Iterator[memoryview]:
        return (self[i] for i in range(len(self)))

    @property
    def sources(self) -> list[str]:
        """The name of each sample's source in the mixture.

        Raises:
            ValueError: the batch is of one store.
        """
        return mixture_of(self.mixture).source_names(self.indices)

    @property
    def source_indices(self) -> NDArray[np.int64]:
        """Each sample's index within its source; int64, shape (samples,).

        Raises:
            ValueError: the batch is of one store.
        """
        return mixture_of(self.mixture).source_indices(self.indices)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples, gaps not counted."""
        return int(self.lengths.sum())

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples, {self.nbytes:,} bytes, epoch {self.epoch})"

    def dense(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Copy the samples back to back.

        Returns:
            The bytes, uint8, and the starts with the end, int64, shape (slots + 1,).
        """
        offsets, lengths = self.offsets.reshape(-1), self.lengths.reshape(-1)
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        packed = np.empty(int(starts[-1]), np.uint8)
        for start, offset, length in zip(starts, offsets, lengths, strict=False):
            packed[start : start + length] = self.data[offset : offset + length]
        return packed, starts


OnError = Literal["raise", "skip"]
"""`raise`: stop with an error that names the sample. `skip`: leave the sample out of its batch, keep
the number of steps, and record it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was left out of its batch."""

    index: int
    name: str
    reason: str
    """A sentence that names it, too."""
