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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.errors import OrderError, SourceChanged, StateMismatch, StoreError
from headrace.order import Mixed, Opportunistic, OrderState
from headrace.plane.loader import Loader, mixed_order
from headrace.store.opening import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.config import ReaderOptions
    from headrace.order import Order, Share
    from headrace.plane.loader import Pass
    from headrace.plane.tokens import WindowReader
    from headrace.store import Store


class Follower:
    """Opens the snapshots of a store that grows, or of a mixture of such stores.

    Args:
        store: as it was opened; it stays its owner's.

    Raises:
        ValueError: it is a source that was opened directly, a job's store, or a mixture with one of these: they
            do not grow.
    """

    def __init__(self, store: Store) -> None:
        sources = [store] if store.mixture is None else list(store.mixture.sources.values())
        for source in sources:
            if not source.appendable:
                raise ValueError(
                    f"follow is True and {source.path} is no store that is appended to: pack or index it first"
                )
        self._store = store
        self._mixed: Store | None = None  # of snapshots, where it is not the first
        self._first = sources
        self._now = sources

    @property
    def segments(self) -> tuple[int, ...]:
        """How many segments each source's snapshot has that is read now."""
        return tuple(len(source.segments) for source in self._now)

    def newest(self, world_size: int) -> Store | None:
        """The store as all ranks see it now; None if it has not grown.

        Raises:
            OrderError: there are several ranks, and nothing that they could agree through.
            SourceChanged: another store lies there.
            CorruptStore, VolumeError: it cannot be opened.
        """
        opened = self._snapshots([None] * len(self._first))
        seen = tuple(len(source.segments) for source in opened)
        try:
            agreed = _agreed(seen, world_size)
        except BaseException:
            _close(opened)
            raise
        if agreed != seen:
            _close(opened)
            opened = self._snapshots(agreed)
        return self._taken_up(opened)

    def at(self, segments: tuple[int, ...]) -> Store | None:
        """The store as it was when its sources had so many segments; None if that is what is read now.

        Raises:
            StateMismatch: one has fewer now.
        """
        if segments == self.segments:
            return None
        opened = self._snapshots(segments)
        for source, expected in zip(opened, segments, strict=True):
            if len(source.segments) != expected:
                _close(opened)
                raise StateMismatch(
                    f"state knows {expected} segments, {source.path} has {len(source.segments)}.",
                    next_step="Resume with the store that the state was saved with.",
                )
        return self._taken_up(opened)

    def _snapshots(self, segments: Sequence[int | None]) -> list[Store]:
        """Each source as it was when it had so many segments; None: as it is."""
        opened: list[Store] = []
        try:
            for source, count in zip(self._first, segments, strict=True):
                opened.append(snapshot(source, count))
        except BaseException:
            _close(opened)
            raise
        return opened

    def _taken_up(self, opened: list[Store]) -> Store | None:
        before = self._now
        # Whose segments are as many stays open as it is.
        pairs = list(zip(before, opened, strict=True))
        now = [a if len(a.segments) == len(b.segments) else b for a, b in pairs]
        errors = [_difference(a, b) for a, b in zip(before, now, strict=True) if a is not b]
        if error := next(filter(None, errors), None):
            _close(opened)
            raise error
        _close([b for b in opened if b not in now])
        if not errors:
            return None
        if self._mixed is not None:
            self._mixed.close()
        _close([a for a in before if a not in now and a not in self._first])
        self._now = now
        if self._store.mixture is None:
            return now[0]
        self._mixed = self._store.mixture.of(now)
        return self._mixed


def _close(stores: list[Store]) -> None:
    for store in stores:
        store.close()


def _difference(before: Store, opened: Store) -> Exception | None:
    """Why another snapshot is not one of the same store."""
    common = min(len(opened.segments), len(before.segments))
    ours = [s.entry.uuid for s in before.segments[:common]]
    if ours != [s.entry.uuid for s in opened.segments[:common]]:
        return SourceChanged(
            f"{before.path}: its first {common} segments are others than they were: nothing was appended, "
            "the store was made anew.",
            path=before.path,
            next_step="Open it again, and begin anew.",
        )
    if opened.parts != before.parts:
        return StoreError(
            f"{before.path}: samples that were appended have the parts {opened.parts}, those before have "
            f"{before.parts}.",
            path=before.path,
            next_step="Name the parts to read: parts=[...], in a loader that is made anew.",
        )
    return None


class FollowingLoader(Loader):
    """A loader whose store may have grown whenever an epoch begins.

    Args:
        source: the store or mixture, as it was opened.
        order: over it as it was opened.
        share: which positions are this rank's.
        options: how to read.
        plan: the order over another snapshot; of tokens, what makes windows of it, too.
        others: further arguments of `Loader`.

    Raises:
        ValueError: the store is none that is appended to.
    """

    def __init__(
        self, source: Store, order: Order, share: Share, options: ReaderOptions,
        *, plan: Callable[[Store], tuple[Order, WindowReader | None]], **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(source, order, share, options, **others)
        self._follower = Follower(source)
        self._plan = plan
        # How many segments of each source the epoch knows.
        self._segments = self._follower.segments

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved; within an epoch, with the snapshot that it is over.

        Raises:
            StateMismatch: the state belongs to other data or another order, or to no store that was followed.
            OrderError: the state is damaged.
        """
        self._go_back(OrderState.from_dict(state))
        super().load_state_dict(state)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """As `Loader.continue_from`; what was appended since is taken up by the epoch that begins."""
        loaded = OrderState.from_dict(state)
        segments = self._go_back(loaded)
        own = loaded.basis[: len(loaded.basis) - len(segments)]
        changed = mixed_order(self.order).continue_from(replace(loaded, basis=own).to_dict())
        known = OrderState.from_dict(changed)
        basis = (*known.basis, *self._segments)
        super().load_state_dict(replace(known, basis=basis).to_dict())

    def _go_back(self, loaded: OrderState) -> tuple[int, ...]:
        """Read the snapshot that a state is over; the numbers of segments that it knows, if it knows any."""
        segments = self._segments_of(loaded)
        if segments and (store := self._follower.at(segments)) is not None:
            self._renew(store, self._read_from(store))
        return segments

    def begin(self) -> Pass:
        """Begin a pass; where it begins an epoch, with what was appended.

        Raises:
            RankError: see `Loader.begin`.
            OrderError: several ranks cannot agree on what was appended.
            SourceChanged: another store lies where the store was.
            CorruptStore, VolumeError: what was appended cannot be opened.
        """
        # Whether this pass begins an epoch.
        left = self.share.decide().steps(self._position)
        if self._started or self._position == 0 or left == 0:
            store = self._follower.newest(self.slices.world_size)
            if store is not None:
                self._go_on(store)
        return super().begin()

    def _read_from(self, store: Store) -> Order:
        order, windows = self._plan(store)
        self._reader.go_to(store, windows)
        return order

    def _go_on(self, store: Store) -> None:
        """Go on with another snapshot of the store; an epoch that was begun ends before."""
        order, epoch = self._read_from(store), self.epoch + (self._started or self._position > 0)
        if isinstance(order, Mixed) and isinstance(self._order, Mixed):
            order = order.grown_from(self._order, epoch)
        self._renew(store, order, epoch)

    def _renew(self, store: Store, order: Order, epoch: int = 0) -> None:
        """Stand at the beginning of an epoch over another snapshot."""
        self._started = False
        self._order, self._fingerprint = order, store.fingerprint
        self._segments = self._follower.segments
        self.share.resize(order.length)
        self._go_to(OrderState.begin(order, store.fingerprint, epoch))

    # -- what a state says of segments -------------------------------------------------------------

    def _basis(self) -> tuple[int, ...]:
        """The order's own, and the numbers of segments: a fingerprint alone does not say where to find them."""
        own = () if isinstance(self._order, Opportunistic) else super()._basis()
        return (*own, *self._segments)

    def _segments_of(self, loaded: OrderState) -> tuple[int, ...]:
        """The numbers of segments that a state knows; none if it is of no store that was followed."""
        own = len(self._segments) + 1 if isinstance(self._order, Mixed) else 0
        known = loaded.basis[own:]  # (0,): an opportunistic order's, without a resident range
        return known if len(known) == len(self._segments) and known != (0,) else ()

    def _resumed(self, loaded: OrderState) -> Order:
        """This order as it goes on from a state, if the state knows as many segments.

        Raises:
            StateMismatch: it does not.
        """
        if self._segments_of(loaded) != self._segments:
            raise StateMismatch(
                f"state says {loaded.basis}, expected {self._segments} segments: its store was not followed.",
                next_step="Resume without follow=True, and follow from the next epoch on.",
            )
        own = loaded.basis[: -len(self._segments)]
        return self._order.resumed(loaded.epoch, loaded.position, own)


def _agreed(segments: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """The fewest segments of each source that a rank sees: all see those."""
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
    return tuple(map(min, zip(*seen, strict=True)))
