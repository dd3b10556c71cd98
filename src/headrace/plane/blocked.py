"""Blocked orders: whole windows are read at once, neighbours together; batches are cut from them."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.order import Blocked
    from headrace.plane.loader import Span
    from headrace.plane.stage import BatchReads, PendingReads

WINDOWS_AHEAD_MAX = 2  # windows that are submitted ahead of the one that is being consumed
_Pieces = list[tuple[int, bool]]
"""How positions fall into batches: numbers of samples, and whether the batch is complete with them."""


def _windows(
    order: Blocked, epoch: int, spans: Iterable[Span]
) -> Iterator[tuple[NDArray[np.int64], _Pieces]]:
    """Cut spans at the bounds of windows: the samples of each, and the pieces of batches that they are.

    A padded span comes back to the first windows.
    """
    indices, pieces, bounds = [np.empty(0, np.int64)], _Pieces(), (0, 0)
    for start, stop in spans:
        if start == stop:
            pieces.append((0, True))
        at = start
        while at < stop:
            position = at % order.length
            if not bounds[0] <= position < bounds[1]:
                if pieces:
                    yield np.concatenate(indices), pieces
                indices, pieces = [np.empty(0, np.int64)], []
                bounds = order.window_at(epoch, position)
            count = min(stop - at, bounds[1] - position)
            indices.append(order.indices(epoch, position, position + count))
            at += count
            pieces.append((count, at == stop))
    if pieces:
        yield np.concatenate(indices), pieces


def read_windows(
    reader: BatchReads, order: Blocked, epoch: int, spans: Iterable[Span]
) -> Generator[_native.Batch, None, None]:
    """Yield the batch of each span, in order."""
    windows = ((reader.submit(i), pieces) for i, pieces in _windows(order, epoch, spans))
    ahead: deque[tuple[PendingReads, _Pieces]] = deque()
    batch: list[tuple[_native.Batch, int, int]] = []
    while True:
        ahead.extend(islice(windows, 1 + WINDOWS_AHEAD_MAX - len(ahead)))
        if not ahead:
            return
        pending, pieces = ahead.popleft()
        native = pending.take()
        at = 0
        for count, complete in pieces:
            batch.append((native, at, at + count))
            at += count
            if complete:
                yield reader.gather(batch)
                batch = []
