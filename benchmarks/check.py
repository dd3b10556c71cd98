"""Checks every delivered sample by its stamps, at about the same cost for every engine.

A batch is either a sequence of bytes-like samples (what most loaders hand out) or a `FlatBatch`.
`Checker.add` touches the first and the last 8 bytes of each sample, inside the timed section, for
all engines alike (0.02 us a sample for a flat batch, 0.2 us for a list: Python's own price of
one object a sample). It keeps one byte of memory a sample to find duplicates, not the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.datasets import CLASSES, STAMP, TAIL_MASK

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WrongDeliveryError(Exception):
    """An engine handed out something that is not a sample of the data set, or one twice."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Samples in one buffer: sample `i` is `data[starts[i]:ends[i]]`."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    """Compared with the samples' own classes where the engine delivers labels."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """Samples that stay where they are: only their stamps were cut out."""

    heads: NDArray[np.uint64]
    tails: NDArray[np.uint64]
    nbytes: int
    """What the samples hold."""

    def __len__(self) -> int:
        return len(self.heads)


Batch = FlatBatch | Stamped | Sequence[bytes | memoryview]


def _stamps_at(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    # An unaligned view of every 8 bytes: one gather, three times faster than a gather of bytes.
    every = np.ndarray((len(data) - STAMP.size + 1,), np.dtype("<u8"), data.data, 0, strides=(1,))
    return every[offsets]


def stamps(batch: Batch) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The first and the last 8 bytes of each sample of `batch`."""
    if isinstance(batch, FlatBatch):
        if len(batch.starts) and int((batch.ends - batch.starts).min()) < STAMP.size:
            raise WrongDeliveryError("a sample is shorter than its stamp")
        return _stamps_at(batch.data, batch.starts), _stamps_at(batch.data, batch.ends - STAMP.size)
    if isinstance(batch, Stamped):
        return batch.heads, batch.tails
    heads = np.frombuffer(b"".join([sample[: STAMP.size] for sample in batch]), "<u8")
    tails = np.frombuffer(b"".join([sample[-STAMP.size :] for sample in batch]), "<u8")
    if not len(heads) == len(tails) == len(batch):
        raise WrongDeliveryError("a sample is shorter than its stamp")
    return heads, tails


def _bytes_in(batch: Batch) -> int:
    if isinstance(batch, FlatBatch):
        return int((batch.ends - batch.starts).sum())
    return batch.nbytes if isinstance(batch, Stamped) else sum(map(len, batch))


def _thinned(batch: Batch, every: int) -> Batch:
    if isinstance(batch, Stamped):
        return Stamped(batch.heads[::every], batch.tails[::every], batch.nbytes)
    if not isinstance(batch, FlatBatch):
        return batch[::every]
    labels = None if batch.labels is None else batch.labels[::every]
    return FlatBatch(batch.data, batch.starts[::every], batch.ends[::every], labels)


class Checker:
    """Sees every batch of a run; raises `WrongDeliveryError` at the first wrong one.

    Args:
        samples: how many the data set has.
        every: look at every n-th sample of a batch. Looking at all of them takes the consumer's
            thread a cache miss a sample, more than the fastest engines take to deliver it.
    """

    def __init__(self, samples: int, every: int = 1) -> None:
        self.delivered = 0
        self._bytes = 0
        self._every = every
        self._checked = 0
        self._seen = np.zeros(samples, np.uint8)

    def add(self, batch: Batch) -> int:
        """Checks one batch and returns how many samples it holds."""
        count = len(batch.starts) if isinstance(batch, FlatBatch) else len(batch)
        self._bytes += _bytes_in(batch)
        if self._every > 1:
            batch = _thinned(batch, self._every)
        heads, tails = stamps(batch)
        bad = np.flatnonzero((heads ^ np.uint64(TAIL_MASK)) != tails)
        if len(bad):
            raise WrongDeliveryError(
                f"sample {self.delivered + int(bad[0])} of the run: begins as {heads[bad[0]]}, "
                f"ends as {tails[bad[0]] ^ np.uint64(TAIL_MASK)}"
            )
        if len(heads) and int(heads.max()) >= len(self._seen):
            raise WrongDeliveryError(f"index {heads.max()} in a data set of {len(self._seen)}")
        if isinstance(batch, FlatBatch) and batch.labels is not None:
            self._check_labels(heads, batch.labels)
        self._seen[heads] = 1
        self._checked += len(heads)
        self.delivered += count
        return count

    def _check_labels(self, heads: NDArray[np.uint64], labels: NDArray[np.int64]) -> None:
        wrong = np.flatnonzero(heads % CLASSES != labels)
        if len(wrong):
            index = int(heads[wrong[0]])
            raise WrongDeliveryError(f"sample {index} came with label {labels[wrong[0]]}")

    @property
    def bytes(self) -> int:
        """How many bytes the delivered samples hold."""
        return self._bytes

    def finish(self, *, complete: bool) -> None:
        """Ends the run: no sample came twice and, where the epoch was `complete`, all came."""
        distinct = int(np.count_nonzero(self._seen))
        if distinct != self._checked:
            raise WrongDeliveryError(
                f"{self._checked} samples were looked at, only {distinct} different ones"
            )
        if complete and self.delivered != len(self._seen):
            raise WrongDeliveryError(
                f"the epoch ended after {self.delivered} of {len(self._seen)} samples"
            )
