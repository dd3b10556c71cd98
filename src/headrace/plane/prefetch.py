"""Prefetch: keeps the coming batches in flight while the consumer works.

Two ways to turn spans of positions into batches. `read_batches` reads each batch on its own: any
order. `read_windows` reads a whole window of a blocked order at once, so that neighbours are read together, and
copies batches out of it. Both submit ahead without deciding how much memory that takes: the native
reader keeps to its budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.order import Blocked, Order
    from headrace.plane.tiers import PendingReads, Reads

Span = tuple[int, int]
"""Global positions (start, stop) of one batch; past the order's length they wrap."""

WINDOWS_AHEAD_MAX = 2
"""Windows submitted ahead of the one that is being consumed."""


def read_batches(
    reader: Reads,
    order: Order,
    epoch: int,
    spans: Iterable[Span],
    batches_ahead: Callable[[], int],
    *,
    told: Callable[[bool], None] = lambda _: None,
) -> Generator[_native.Batch, None, None]:
    """Yield the batch of each span, in order.

    Args:
        reader: reads them.
        order: which sample lies at which position.
        epoch: the epoch.
        spans: global positions (start, stop) of each batch.
        batches_ahead: how many batches to submit ahead, now; more than the reader's budget of bytes
            holds only queue up.
        told: called before each batch is taken, with whether it was ready.
    """
    pending: deque[PendingReads] = deque()
    for span in spans:
        pending.append(reader.submit(order.wrapped(epoch, *span)))
        while len(pending) > max(1, batches_ahead()):
            told(pending[0].done)
            yield pending.popleft().take()
    while pending:
        told(pending[0].done)
        yield pending.popleft().take()


@dataclass(slots=True)
class _Window:
    """Positions that this rank takes from one window, and how they fall into batches."""

    indices: list[NDArray[np.int64]] = field(default_factory=list)
    pieces: list[tuple[int, bool]] = field(default_factory=list)  # samples; batch is complete


def _cut(order: Blocked, epoch: int, spans: Iterable[Span]) -> Iterator[_Window]:
    """Cut spans at the bounds of windows. A padded span comes back to the first windows."""
    window, bounds = _Window(), (0, 0)
    for start, stop in spans:
        if start == stop:
            window.pieces.append((0, True))
        at = start
        while at < stop:
            position = at % order.length
            if not bounds[0] <= position < bounds[1]:
                if window.pieces:
                    yield window
                window, bounds = _Window(), order.window_at(epoch, position)
            count = min(stop - at, bounds[1] - position)
            window.indices.append(order.indices(epoch, position, position + count))
            at += count
            window.pieces.append((count, at == stop))
    if window.pieces:
        yield window


def read_windows(
    reader: Reads,
    order: Blocked,
    epoch: int,
    spans: Iterable[Span],
) -> Generator[_native.Batch, None, None]:
    """Yield the batch of each span, in order, reading window by window."""
    batch: list[tuple[_native.Batch, int, int]] = []
    for window, pending in _submit_windows(reader, _cut(order, epoch, spans)):
        native = pending.take()
        at = 0
        for count, complete in window.pieces:
            batch.append((native, at, at + count))
            at += count
            if complete:
                yield reader.gather(batch)
                batch = []


def _submit_windows(
    reader: Reads,
    windows: Iterable[_Window],
) -> Iterator[tuple[_Window, PendingReads]]:
    ahead: deque[tuple[_Window, PendingReads]] = deque()
    for window in windows:
        indices = np.concatenate([np.empty(0, np.int64), *window.indices])
        ahead.append((window, reader.submit(indices)))
        if len(ahead) > WINDOWS_AHEAD_MAX:
            yield ahead.popleft()
    yield from ahead
