"""Following: a loader takes up what was appended to its store, at the borders of its epochs.

A store is opened as it is, and stays so for whoever reads it: an epoch is over one snapshot from its beginning
to its end. Before the next begins, the `Follower` looks whether there are more segments, and if so the loader
goes on with a newer snapshot and an order over it. Its state says how many segments the epoch under way knows,
so that a run that is resumed in the middle reads that snapshot again, however much has been appended since.

All ranks must take up the same. They ask each other through torch.distributed where it has joined them, and
take the fewest segments that one of them sees; where nobody has joined them, following is refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from headrace.errors import OrderError, SourceChanged, StateMismatch, StoreError
from headrace.order import OrderState
from headrace.plane.loader import Cursor, Loader
from headrace.store.opening import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.config import ReaderOptions
    from headrace.order import Order, Share
    from headrace.plane.loader import Pass
    from headrace.store import Store


class Follower:
    """Opens the snapshots of a store that grows.

    Args:
        store: the store as it was opened; it stays its owner's.
        order_of: the order over a snapshot.

    Raises:
        ValueError: it is a source that was opened directly, a mixture or a job's store: none of these grows.
    """

    def __init__(self, store: Store, order_of: Callable[[Store], Order]) -> None:
        if store.mixture is not None:
            raise ValueError(
                "follow is True over a mixture, whose proportions and epochs are those of the sources as they "
                "were: mix them anew where an epoch begins"
            )
        if not store.appendable:
            raise ValueError(
                f"follow is True and {store.path} is no store that is appended to: pack or index it first"
            )
        self.order_of = order_of
        self._first = store
        self._now = store

    @property
    def segments(self) -> int:
        """How many segments the snapshot has that is read now."""
        return len(self._now.segments)

    def newest(self, world_size: int) -> Store | None:
        """The store as all ranks see it now; None if it has not grown.

        Raises:
            OrderError: there are several ranks, and nothing that they could agree through.
            SourceChanged: another store lies there.
            CorruptStore, VolumeError: it cannot be opened.
        """
        opened = snapshot(self._first, None)
        segments = _agreed(len(opened.segments), world_size)
        if segments == self.segments:
            opened.close()
            return None
        if segments != len(opened.segments):
            opened.close()
            opened = snapshot(self._first, segments)
        return self._taken_up(opened)

    def at(self, segments: int) -> Store | None:
        """The store as it was when it had so many segments; None if that is the snapshot that is read now.

        Raises:
            StateMismatch: it has fewer now.
        """
        if segments == self.segments:
            return None
        opened = snapshot(self._first, segments)
        if len(opened.segments) != segments:
            opened.close()
            raise StateMismatch(
                f"state knows {segments} segments, {self._first.path} has {len(opened.segments)}.",
                next_step="Resume with the store that the state was saved with.",
            )
        return self._taken_up(opened)

    def _taken_up(self, opened: Store) -> Store:
        before, common = self._now, min(len(opened.segments), len(self._now.segments))
        ours = [s.entry.uuid for s in before.segments[:common]]
        theirs = [s.entry.uuid for s in opened.segments[:common]]
        error: Exception | None = None
        if ours != theirs:
            error = SourceChanged(
                f"{before.path}: its first {common} segments are others than they were: nothing was appended, "
                "the store was made anew.",
                path=before.path,
                next_step="Open it again, and begin anew.",
            )
        elif opened.parts != before.parts:
            error = StoreError(
                f"{before.path}: samples that were appended have the parts {opened.parts}, those before have "
                f"{before.parts}.",
                path=before.path,
                next_step="Name the parts to read: parts=[...], in a loader that is made anew.",
            )
        if error is not None:
            opened.close()
            raise error
        if before is not self._first:
            before.close()
        self._now = opened
        return opened


class FollowingLoader(Loader):
    """A loader whose store may have grown whenever an epoch begins.

    Args:
        source: the store, as it was opened.
        order: over the store as it was opened.
        share: which positions are this rank's.
        options: how to read.
        order_of: the order over another snapshot.
        others: further arguments of `Loader`.

    Raises:
        ValueError: the store is none that is appended to.
    """

    def __init__(
        self, source: Store, order: Order, share: Share, options: ReaderOptions,
        *, order_of: Callable[[Store], Order], **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(source, order, share, options, **others)
        self._follower = Follower(source, order_of)
        self._growing = GrowingCursor(order, share, source.fingerprint)
        self._growing.segments = self._follower.segments
        self._cursor = self._growing

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved; within an epoch, with the snapshot that it is over.

        Raises:
            StateMismatch: the state belongs to other data or another order, or to no store that was followed.
            OrderError: the state is damaged.
        """
        loaded = OrderState.from_dict(state)
        if len(loaded.basis) == 1:
            self._go_to(self._follower.at(loaded.basis[0]))
        super().load_state_dict(state)

    def begin(self) -> Pass:
        """Begin a pass; where it begins an epoch, with what was appended.

        Raises:
            RankError: see `Loader.begin`.
            OrderError: several ranks cannot agree on what was appended.
            SourceChanged: another store lies where the store was.
            CorruptStore, VolumeError: what was appended cannot be opened.
        """
        if self._growing.is_at_border():
            self._go_to(self._follower.newest(self.slices.world_size))
        return super().begin()

    def _go_to(self, store: Store | None) -> None:
        if store is not None:
            self._reader.go_to(store)
            order = self._follower.order_of(store)
            self._growing.renew(order, store.fingerprint, self._follower.segments)


class GrowingCursor(Cursor):
    """The place in an order over a store that grows.

    Attributes:
        segments: how many of the store's segments the epoch knows.
    """

    segments = 0

    def basis(self) -> tuple[int, ...]:
        """The number of segments: a fingerprint alone does not say where to find them."""
        return (self.segments,)

    def resumed(self, loaded: OrderState) -> Order:
        """This order, if the state knows as many segments.

        Raises:
            StateMismatch: it does not.
        """
        if loaded.basis != self.basis():
            raise StateMismatch(
                f"state says {loaded.basis}, expected {self.segments} segments: its store was not followed.",
                next_step="Resume without follow=True, and follow from the next epoch on.",
            )
        return self.order

    def is_at_border(self) -> bool:
        """Whether the next pass begins an epoch."""
        left = self.share.decide().steps(self._position)
        return self._started or self._position == 0 or left == 0

    def renew(self, order: Order, fingerprint: str, segments: int) -> None:
        """Go on with another snapshot of the store; an epoch that was begun ends before."""
        epoch = self.epoch + (self._started or self._position > 0)
        self._started = False
        self.order, self._fingerprint, self.segments = order, fingerprint, segments
        self.share.resize(order.length)
        self._go_to(OrderState.begin(order, fingerprint, epoch))


def _agreed(segments: int, world_size: int) -> int:
    """The fewest segments that a rank sees: all see those."""
    if world_size == 1:
        return segments
    torch: Any = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        raise OrderError(
            f"follow is True on {world_size} ranks, which must take up the same segments, and "
            "torch.distributed has not joined them.",
            next_step="Join them (torch.distributed.init_process_group), or open the store anew for an epoch.",
        )
    seen: list[Any] = [None] * torch.get_world_size()
    torch.all_gather_object(seen, segments)
    return int(min(seen))
