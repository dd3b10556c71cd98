"""Order: the epochs of a record, and in what order each of them read its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from typing import Literal

    from numpy.typing import NDArray

    from headrace.insight.record.data import Reads

__all__ = ["OrderStatistics", "batched", "epochs_of", "statistics_of"]

_SEQUENTIAL: Final = 0.9
_IN_SHARDS: Final = 0.8


@dataclass(frozen=True, slots=True)
class OrderStatistics:
    """What an order looks like.

    Attributes:
        correlation: of place in the epoch and place in name order (Spearman's), over the first epoch.
        next_share: share of reads that read what comes next in name order.
        file_changes: share of reads that read another file than the one before.
        same_each_epoch: None: there is one epoch only.
        shuffle: what DLIO would call it.
    """

    correlation: float
    next_share: float
    file_changes: float
    same_each_epoch: bool | None
    shuffle: Literal["samples", "files", "none"]


def epochs_of(reads: Reads, trainer_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """The epoch of each read, from 0: a training process that meets a sample again is in its next one.

    Returns:
        int64 (reads,).
    """
    found = np.zeros(reads.count, np.int64)
    for trainer in np.unique(trainer_of).tolist():
        epoch, seen = 0, set[int]()
        for at in np.flatnonzero(trainer_of == trainer).tolist():
            sample = int(reads.sample[at])
            if sample in seen:
                epoch += 1
                seen.clear()
            seen.add(sample)
            found[at] = epoch
    return found


def batched(reads: Reads, rows: NDArray[np.intp], batch: int) -> NDArray[np.intp]:
    """An epoch's reads with those of a batch together: workers read several batches at a time.

    Args:
        reads: of the record.
        rows: of the epoch, in the order of time.
        batch: samples that a worker reads for one step.
    """
    parts: list[NDArray[np.intp]] = []
    for process in np.unique(reads.process[rows]).tolist():
        mine = rows[reads.process[rows] == process]
        parts += [mine[at : at + batch] for at in range(0, len(mine), batch)]
    parts.sort(key=lambda part: int(reads.begin_ns[part[0]]))
    return np.concatenate(parts) if parts else rows


def statistics_of(
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    place: NDArray[np.int64],
    file: NDArray[np.int64],
) -> OrderStatistics:
    """The statistics of an order.

    Args:
        order: samples, epoch after epoch.
        starts: where each epoch begins in it, and its end.
        place: int64 (samples,): of each in name order.
        file: int64 (samples,): that it lies in.
    """
    first = place[order[: starts[1]]] if len(starts) > 1 else place[order]
    steps = np.diff(first)
    changes = np.diff(file[order[: starts[1]]]) != 0 if len(starts) > 1 else np.zeros(0, bool)
    next_share = float((steps == 1).mean()) if len(steps) else 1.0
    file_changes = float(changes.mean()) if len(changes) else 0.0
    correlation = _correlation(np.arange(len(first)), first)
    shuffle: Literal["samples", "files", "none"] = "samples"
    if correlation >= _SEQUENTIAL:
        shuffle = "none"
    elif next_share >= _IN_SHARDS and len(np.unique(file)) < len(file):
        shuffle = "files"
    return OrderStatistics(correlation, next_share, file_changes, _same(order, starts), shuffle)


def _same(order: NDArray[np.int64], starts: NDArray[np.int64]) -> bool | None:
    if len(starts) < 3:
        return None
    one, two = order[starts[0] : starts[1]], order[starts[1] : starts[2]]
    both = np.intersect1d(one, two)
    if len(both) < 2:
        return False
    most = int(order.max()) + 1
    at = np.zeros((2, most), np.int64)
    at[0, one], at[1, two] = np.arange(len(one)), np.arange(len(two))
    return _correlation(at[0, both], at[1, both]) >= _SEQUENTIAL


def _correlation(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Spearman's: of ranks."""
    if len(a) < 2:
        return 1.0
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
