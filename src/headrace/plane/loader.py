"""Loader: delivers batches of a store in an order, epoch after epoch, and knows where it stands.

It holds stages rather than doing their work: the order says which samples come, the slices which of
them are this rank's, prefetch reads them ahead. What is left here is the cursor: the state counts what
was delivered, so that a run can stop after any batch and go on, with another world size too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.io import BatchReader
from headrace.order import Blocked, OrderState, Slices, order_hash
from headrace.plane.batch import Batch
from headrace.plane.skipped import OnError, Skipped
from headrace.plane.prefetch import read_batches, read_windows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from headrace import _native
    from headrace.config import ReaderOptions
    from headrace.errors import HeadraceError
    from headrace.order import Order

__all__ = ["Loader", "LoaderStats", "SampleSource"]


class SampleSource(Protocol):
    """What a loader needs of a store."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data."""

    @property
    def parts(self) -> Sequence[str]:
        """Names of the parts of its samples."""

    @property
    def catalog(self) -> _native.Catalog:
        """Directories and volumes, opened in this process."""

    @property
    def names(self) -> Sequence[str]:
        """The samples' names."""

    def failure_error(self, index: int, failure: dict[str, Any]) -> HeadraceError:
        """The error for a failed slot of a native batch."""


@dataclass(slots=True)
class LoaderStats:
    """What a loader has delivered so far, and how long its consumer waited."""

    batches: int = 0
    samples: int = 0
    bytes: int = 0
    stall_s: float = 0.0
    """Time that the consumer waited in `next`."""
    cached_reads: int = 0
    direct_reads: int = 0
    buffered_reads: int = 0
    opened_files: int = 0

    def count(self, native: _native.Batch, delivered: Batch, waited_s: float) -> None:
        """Add one batch."""
        self.batches += 1
        self.samples += len(delivered)
        self.bytes += delivered.nbytes
        self.stall_s += waited_s
        for name, value in native.stats.items():
            if name in _ROUTES:
                setattr(self, name, getattr(self, name) + value)


_ROUTES = ("cached_reads", "direct_reads", "buffered_reads", "opened_files")


class Loader:
    """An iterable over the batches of an epoch; the epoch advances by itself.

    Each `for` goes through the rest of the current epoch. If it is left early, the next `for` begins
    the next epoch; after `load_state_dict` it goes on where the state was saved.

    Args:
        source: the store.
        order: which sample comes when.
        slices: which positions are this rank's.
        options: how to read.
        parts: names of the parts to read; all if empty.
        on_error: what to do with a sample that cannot be delivered.
    """

    def __init__(
        self,
        source: SampleSource,
        order: Order,
        slices: Slices,
        options: ReaderOptions,
        *,
        parts: Sequence[str] = (),
        on_error: OnError = "raise",
    ) -> None:
        self.source = source
        self.order = order
        self.slices = slices
        self.options = options
        self.stats = LoaderStats()
        self.skipped: list[Skipped] = []
        self._on_error = on_error
        self._part_names = tuple(parts) or tuple(source.parts)
        self._part_numbers = _numbers_of(self._part_names, source.parts)
        self._state = OrderState.begin(order, source.fingerprint)
        self._started = False
        self._reader: BatchReader | None = None
        self._passes = 0
        self._last_hash: str | None = None

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; the same on every rank."""
        return self.slices.steps()

    @property
    def epoch(self) -> int:
        """The epoch that is under way or, between epochs, the one that comes next."""
        return self._state.epoch

    @property
    def position(self) -> int:
        """Global positions of this epoch that were delivered."""
        return self._state.position

    @property
    def order_hash(self) -> str:
        """16 hex digits over what this rank delivered in this epoch.

        Two runs that delivered the same samples at the same positions have the same hash. Ranks'
        hashes add up (`headrace.order.combine_hashes`) to that of a run on one rank.
        """
        return f"{self._state.order_hash:016x}"

    @property
    def last_order_hash(self) -> str | None:
        """The order hash of the last epoch that was delivered to its end, or None."""
        return self._last_hash

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next `for`. Not needed: epochs advance by themselves."""
        if epoch != self._state.epoch or self._started:
            self._state = OrderState.begin(self.order, self.source.fingerprint, epoch)
            self._started = False

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: plain values, under 300 bytes as JSON."""
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next `for`; exactly what is left is delivered.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        loaded = OrderState.from_dict(state)
        loaded.check(self.order, self.source.fingerprint)
        if self.slices.steps(loaded.position) == 0:
            loaded = loaded.next_epoch()
        self._state = loaded
        self._started = False

    def close(self) -> None:
        """Stop reading ahead. Delivered batches stay valid; the loader can be used again."""
        self._passes += 1
        if self._reader is not None and self._reader.usable:
            self._reader.close()
        self._reader = None

    def __iter__(self) -> Iterator[Batch]:
        if self._started:  # an earlier pass was left early
            self._state = self._state.next_epoch()
        self._started = True
        self._passes += 1
        return self._deliver(self._passes)

    def _deliver(self, this_pass: int) -> Iterator[Batch]:
        begin = self._state.position
        epoch = self._state.epoch
        steps = self.slices.steps(begin)
        # Lazily: an epoch may have billions of steps.
        batches = self._read(epoch, (self.slices.span(step, begin) for step in range(steps)))
        try:
            for step in range(steps):
                if self._passes != this_pass:
                    raise RuntimeError("this iterator ended when a new one was made")
                asked = time.perf_counter()
                native = next(batches)
                waited = time.perf_counter() - asked
                first = self.slices.span(step, begin)[0]
                batch = self._checked(native, epoch, first)
                self.stats.count(native, batch, waited)
                self._state = self._state.delivered(
                    self.slices.position_after(step + 1, begin),
                    order_hash(first, native.indices),
                )
                yield batch
        finally:
            batches.close()
        self._last_hash = self.order_hash
        self._state = self._state.next_epoch()
        self._started = False

    def _read(
        self,
        epoch: int,
        spans: Iterable[tuple[int, int]],
    ) -> Generator[_native.Batch, None, None]:
        if self._reader is None or not self._reader.usable:
            self._reader = BatchReader(self.source.catalog, self._part_numbers, self.options)
        if isinstance(self.order, Blocked):
            return read_windows(self._reader, self.order, epoch, spans)
        return read_batches(self._reader, self.order, epoch, spans)

    def _checked(self, native: _native.Batch, epoch: int, position: int) -> Batch:
        if native.failed == 0:
            return Batch(native, self._part_names, epoch=epoch, position=position)
        keep = np.ones(native.samples, np.bool_)
        for failure in self.source.catalog.failures(native):
            sample = failure["slot"] // native.parts
            index = int(native.indices[sample])
            error = self.source.failure_error(index, failure)
            if self._on_error == "raise":
                raise error
            if keep[sample]:
                self.skipped.append(Skipped(index, self.source.names[index], str(error)))
            keep[sample] = False
        return Batch(native, self._part_names, epoch=epoch, position=position, keep=keep)


def _numbers_of(wanted: Sequence[str], available: Sequence[str]) -> list[int]:
    missing = [name for name in wanted if name not in available]
    if missing:
        raise ValueError(f"the store has no part {missing[0]!r}, only {list(available)}")
    return [list(available).index(name) for name in wanted]
