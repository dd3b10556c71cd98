"""Cursor: where a loader stands in the sequence of all epochs.

It moves when a batch is delivered, never when one is read ahead, so that a run can stop after any
batch and go on, with another world size or number of workers too. Whoever delivers begins a `Pass`,
asks it which spans to read, and tells it of each delivery. It reads nothing itself: batches may be
read and decoded here, in threads or in other processes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import RankError
from headrace.order import OrderState, combine_hashes, order_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from headrace.order import Order, Share, Slices

Span = tuple[int, int]
"""Global positions (start, stop) of one batch; past the order's length they wrap."""


class Cursor:
    """The place in an order that deliveries have reached.

    Each pass goes through the rest of the current epoch. If it is left early, the next pass begins
    the next epoch; after `load_state_dict` it goes on where the state was saved.

    Args:
        order: which sample comes when.
        share: which positions are this rank's.
        fingerprint: identifies the data.

    Attributes:
        last_order_hash: the order hash of the last epoch that was delivered to its end, or None.
    """

    def __init__(self, order: Order, share: Share, fingerprint: str) -> None:
        self.order = order
        self.share = share
        self.last_order_hash: str | None = None
        self._fingerprint = fingerprint
        self._started = False
        self._passes = 0
        self._go_to(OrderState.begin(order, fingerprint))

    def _go_to(self, state: OrderState) -> None:
        # Position and hash move with every batch, so they are plain numbers; `_state` makes a state
        # of them when somebody wants one.
        self._base = state
        self._position = state.position
        self._hash = state.order_hash

    @property
    def _state(self) -> OrderState:
        return replace(self._base, position=self._position, order_hash=self._hash)

    @property
    def epoch(self) -> int:
        """The epoch that is under way or, between epochs, the one that comes next."""
        return self._base.epoch

    @property
    def position(self) -> int:
        """Global positions of this epoch that were delivered."""
        return self._position

    @property
    def order_hash(self) -> str:
        """16 hex digits over what this rank delivered in this epoch."""
        return f"{self._hash:016x}"

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next pass."""
        if epoch != self.epoch or self._started:
            self._go_to(OrderState.begin(self.order, self._fingerprint, epoch))
            self._started = False

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: plain values, under 300 bytes as JSON."""
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next pass.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        loaded = OrderState.from_dict(state)
        loaded.check(self.order, self._fingerprint)
        self._go_to(loaded)
        with contextlib.suppress(RankError):  # then it is looked at when the pass begins
            self._leave_finished(self.share.slices)
        self._started = False

    def begin(self) -> Pass:
        """Begin a pass; it ends the one before.

        Raises:
            RankError: see `Share.decide`.
        """
        slices = self.share.decide()
        if self._started:  # the pass before was left early
            self._go_to(self._base.next_epoch())
        self._leave_finished(slices)
        self._started = True
        self._passes += 1
        return Pass(self, self._passes, slices, self.epoch, self._position)

    def _leave_finished(self, slices: Slices) -> None:
        """An epoch that was resumed may have no step left."""
        if self._position and slices.steps(self._position) == 0:
            self._go_to(self._base.next_epoch())

    def end(self) -> None:
        """End the pass under way: its iterator will deliver no more."""
        self._passes += 1

    def _check(self, number: int) -> None:
        if number != self._passes:
            raise RuntimeError("this iterator ended when a new one was made")

    def _delivered(self, position: int, hashed: int) -> None:
        self._position = position
        self._hash = combine_hashes(self._hash, hashed)

    def _finish(self) -> None:
        self.last_order_hash = self.order_hash
        self._go_to(self._base.next_epoch())
        self._started = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One way through the rest of an epoch."""

    _cursor: Cursor
    _number: int
    slices: Slices
    epoch: int
    """The epoch it goes through."""
    begin: int
    """The global position where it begins."""

    @property
    def steps(self) -> int:
        """The number of batches; the same on every rank."""
        return self.slices.steps(self.begin)

    def spans(self) -> Iterator[Span]:
        """Yield the global positions (start, stop) of each batch.

        Lazily: an epoch may have billions of steps.
        """
        slices = self.slices
        return (slices.span(step, self.begin) for step in range(self.steps))

    def check(self) -> None:
        """Look whether this pass is still the one under way.

        Raises:
            RuntimeError: a new pass was begun, or the loader was closed.
        """
        self._cursor._check(self._number)  # noqa: SLF001 - its own other half

    def delivered(self, step: int, indices: NDArray[np.int64]) -> tuple[int, int, int, int]:
        """Count one batch.

        Args:
            step: counted from the beginning of the pass.
            indices: int64, shape (samples,): what was asked for at this step's positions.

        Returns:
            The epoch, the step, the position of its first sample, and the order hash of these samples.
        """
        slices = self.slices
        first = slices.span(step, self.begin)[0]
        hashed = order_hash(first, indices)
        self._cursor._delivered(slices.position_after(step + 1, self.begin), hashed)  # noqa: SLF001
        return self.epoch, step, first, hashed

    def finish(self) -> None:
        """Go on to the next epoch: every step was delivered and the consumer came back."""
        self._cursor._finish()  # noqa: SLF001
