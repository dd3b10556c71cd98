"""Loader: delivers batches of a store in an order, epoch after epoch, and knows where it stands.

It holds stages rather than doing their work: the order says which samples come, the slices which
of them are this rank's, the pipeline reads them ahead. What is left here is the loop that joins them, and the
place in the order (`Cursor`), which moves when a batch is delivered, never when one is read ahead, so that a
run can stop after any batch and go on, with another world size or number of workers too. Whoever delivers
begins a `Pass`, asks it which spans to read, and tells it of each delivery: batches may be read and decoded
here, in threads or in other processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.base.job import tell_resumed
from headrace.base.text import bytes_text
from headrace.errors import RankError, StateMismatch
from headrace.io.objects.location import shown
from headrace.order import Mixed, OrderState, combine_hashes, order_hash
from headrace.order.order import unit_of
from headrace.plane.batch_trace import StepLog
from headrace.plane.pipeline import Pipeline
from headrace.plane.stage import ConsumerStats, Stage, StageStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.base.job import RankDecision
    from headrace.config import ReaderOptions, TierOptions
    from headrace.order import Order, Share, Slices
    from headrace.plane.batch import Batch, OnError, Skipped
    from headrace.plane.decoding import Decoding
    from headrace.plane.images import Images
    from headrace.plane.pipeline import AddStage, Delivery, SampleSource
    from headrace.plane.tiers import CacheReport
    from headrace.plane.tokens import WindowReader


T = TypeVar("T")

Span = tuple[int, int]
"""Global positions (start, stop) of one batch; past the order's length they wrap."""


class Cursor:
    """The place in an order that deliveries have reached.

    Each pass goes through the rest of the current epoch. If it is left early, the next pass begins
    the next epoch; after `load_state_dict` it goes on where the state was saved. An iterator that nobody
    took a batch of (frameworks make some, to look whether there are any) is no pass that was left.

    Attributes:
        share: which positions are this rank's.
        last_order_hash: the order hash of the last epoch that was delivered to its end, or None.
    """

    if TYPE_CHECKING:
        stats: LoaderStats  # of whoever makes batches

    def __init__(self, order: Order, share: Share, fingerprint: str) -> None:
        self._order = share.order = order
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
        basis = self._basis()
        return replace(self._base, position=self._position, order_hash=self._hash, basis=basis)

    def _basis(self) -> tuple[int, ...]:
        """What a state holds beside the order's digest, see `Order.basis`."""
        return self._order.basis(self.epoch, self._position)

    def _resumed(self, loaded: OrderState) -> Order:
        """The order that goes on from a state, see `Order.resumed`."""
        return self._order.resumed(loaded.epoch, loaded.position, loaded.basis)

    @property
    def order(self) -> Order:
        """Which sample comes when."""
        return self._order

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
        """16 hex digits over what this rank delivered in this epoch.

        Two runs that delivered the same samples at the same positions have the same hash. Ranks'
        hashes add up (`headrace.order.combine_hashes`) to that of a run on one rank.
        """
        return f"{self._hash:016x}"

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next pass, and end one under way; the epoch of a loaded state goes on.

        Not needed: epochs advance by themselves.
        """
        if epoch != self.epoch or self._started:
            self._go_to(OrderState.begin(self._order, self._fingerprint, epoch))
            self._started = False
            self.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: plain values, under 300 bytes as JSON for one store.

        Of an opportunistic order up to 4 kB: it has which samples come first.
        """
        self.stats.steps.settle()
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next pass; exactly what is left is delivered.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        loaded = OrderState.from_dict(state)
        loaded.check(self._order.saved_with(loaded.basis), self._fingerprint)
        self._order = self.share.order = self._resumed(loaded)
        self._go_to(loaded)
        self.stats.steps.resumed = True
        with contextlib.suppress(RankError):  # then it is looked at when the pass begins
            self._leave_finished(self.share.slices)
            tell_resumed(self.share.slices.rank, self.epoch, self._position, self.order.length)
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
        return self._pass(slices)

    def _pass(self, slices: Slices) -> Pass:
        self._passes += 1
        return Pass(self, self._passes, slices, self.epoch, self._position)

    def _leave_finished(self, slices: Slices) -> None:
        """An epoch that was resumed may have no step left."""
        if self._position and slices.steps(self._position) == 0:
            self._go_to(self._base.next_epoch())

    def end_pass(self) -> None:
        """End the pass under way: its iterator will deliver no more."""
        self._passes += 1

    def _check(self, number: int) -> None:
        if number != self._passes:
            raise RuntimeError(
                "this iterator ended when a new one was made, set_epoch was called or the loader was closed"
            )

    def _delivered(self, position: int, hashed: int) -> None:
        self._started = True
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
        # Without this pass in it: whoever reads ahead would keep the loader by it.
        slices, begin = self.slices, self.begin
        return (slices.span(step, begin) for step in range(self.steps))

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

    def again(self) -> Pass:
        """Begin a pass with the batch that this one failed at.

        Raises:
            RuntimeError: a new pass was begun, or the loader was closed.
        """
        self.check()
        return self._cursor._pass(self.slices)  # noqa: SLF001

    def finish(self) -> None:
        """Go on to the next epoch: every step was delivered and the consumer came back."""
        self._cursor._finish()  # noqa: SLF001


class PassIterator(Iterator[T]):
    """Goes through a pass. An error or an interrupt does not end it: whoever asks again meets the same batch.

    A generator would be exhausted by it: the rest of the epoch would be missing, in silence.

    Args:
        begin: begins the pass, with the first batch.
        deliver: gives its batches.
    """

    def __init__(self, begin: Callable[[], Pass], deliver: Callable[[Pass], Iterator[T]]) -> None:
        self._begin, self._deliver = begin, deliver
        self._batches: Iterator[T] | None = None

    def __next__(self) -> T:
        if self._batches is None:
            self._begin = (a_pass := self._begin()).again
            self._batches = self._deliver(a_pass)
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            if getattr(self._batches, "gi_frame", None) is None:  # else another thread is at it
                self._batches = None
            raise

    def close(self) -> None:
        """End reading ahead for it; it delivers no more."""
        self._batches = iter(())


@dataclass(slots=True, weakref_slot=True)
class LoaderStats:
    """What a loader has delivered so far, and how long its consumer waited."""

    batches: int = 0
    samples: int = 0
    bytes: int = 0
    stall_s: float = 0.0
    """Time that the consumer waited in `next`."""
    worked_s: float = 0.0
    """Time between a delivery and the next request: the consumer's own work."""
    cached_reads: int = 0
    direct_reads: int = 0
    buffered_reads: int = 0
    opened_files: int = 0
    stages_now: Callable[[], Sequence[Stage]] = field(default=tuple, repr=False, compare=False)
    """Gives the stages of the plane."""
    steps: StepLog = field(default_factory=StepLog, repr=False, compare=False)
    """The last deliveries, and what each was waited for."""
    rested: Callable[[], object] | None = field(default=None, repr=False, compare=False)
    """Is called when a pass has ended."""
    _handed_s: float = field(default=0.0, repr=False, compare=False)
    _asked_at: float | None = field(default=None, repr=False, compare=False)
    _delivered_at: float | None = field(default=None, repr=False, compare=False)

    @property
    def stages(self) -> dict[str, StageStats]:
        """What each stage of the plane did since it started and holds now, by name."""
        return {stage.name: stage.stats() for stage in self.stages_now()}

    def consumer(self) -> ConsumerStats:
        """What the consumer did, a wait or work that is under way included. Thread-safe."""
        now, asked_at, delivered_at = time.perf_counter(), self._asked_at, self._delivered_at
        return ConsumerStats(
            waited_s=self.stall_s - self._handed_s + (now - asked_at if asked_at else 0.0),
            worked_s=self.worked_s + self._handed_s + (now - delivered_at if delivered_at else 0.0),
            batches=self.batches,
            samples=self.samples,
            bytes=self.bytes,
        )

    def ask(self, waited_s: float = 0.0) -> float:
        """The consumer asks for a batch: its work is done, its wait began so long ago; returns when."""
        asked_at, delivered_at = time.perf_counter() - waited_s, self._delivered_at
        self._delivered_at, self._asked_at = None, asked_at
        if delivered_at is not None:
            self.worked_s += asked_at - delivered_at
        return asked_at

    def rest(self) -> None:
        """No batch is asked for any more: between epochs the consumer neither waits nor works."""
        self._asked_at = self._delivered_at = None
        if self.rested is not None:
            self.rested()

    def count(
        self,
        samples: int,
        nbytes: int,
        reads: Mapping[str, int],
        waited_s: float = 0.0,
        *,
        ready: bool = False,
    ) -> None:
        """Add one delivered batch.

        Args:
            samples: samples that were delivered.
            nbytes: their bytes in the store.
            reads: how they were read, by name.
            waited_s: how long the consumer waited.
            ready: the batch was there; the time was spent on handing it over.
        """
        now, delivered_at = time.perf_counter(), self._delivered_at
        self._asked_at, self._delivered_at = None, now
        if delivered_at is not None:  # nobody said `ask`
            self.worked_s += max(0.0, now - delivered_at - waited_s)
        self.batches += 1
        self.samples += samples
        self.bytes += nbytes
        self.stall_s += waited_s
        if ready:
            self._handed_s += waited_s
        for name, value in reads.items():
            if name in _ROUTES:
                setattr(self, name, getattr(self, name) + value)

    def deliver(
        self,
        a_pass: Pass,
        step: int,
        delivery: Delivery,
        times: tuple[float, float],
        *,
        ready: bool = False,
    ) -> None:
        """Count a delivery here, in its pass, and in the log of steps.

        `times` are when the consumer asked for it, and had it; the step is counted from the beginning of the
        pass.
        """
        _, asked, samples, nbytes, reads, trace = delivery
        self.count(samples, nbytes, reads, times[1] - times[0], ready=ready)
        self.steps.add(a_pass.delivered(step, asked), len(asked), times, trace, asked)


_ROUTES = ("cached_reads", "direct_reads", "buffered_reads", "opened_files")


class Tuning(Protocol):
    """Whoever turns the knobs of a loader's stages."""

    def wake(self) -> None:
        """Delivery begins, perhaps in another process than before."""

    def close(self) -> None:
        """Turn no more."""


class Loader(Cursor):
    """An iterable over the batches of an epoch; the epoch advances by itself.

    Each `for` is a pass: it goes through the rest of the current epoch. If it is left early, the next `for`
    begins the next epoch; after `load_state_dict` it goes on where the state was saved.

    Args:
        source: the store.
        order: which sample comes when.
        share: which positions are this rank's.
        options: how to read.
        parts: names of the parts to read; all if empty.
        on_error: what to do with a sample that cannot be delivered.
        tiers: where samples are kept nearer than the source, and limits.
        over: puts another stage on top, see `Pipeline`.
        decoding: what pictures become, see `Pipeline`.
        decode_threads: threads that decode, likewise.
        windows: makes batches of tokens, likewise.

    Attributes:
        share: as given; its ranks are decided when the first pass begins.
        last_order_hash: the order hash of the last epoch that was delivered to its end, or None.
        tuning: whoever does; None: nobody.
        made_of: the function that made it, and its arguments.
    """

    made_of: tuple[Callable[..., Any], dict[str, Any]]

    def __init__(
        self,
        source: SampleSource,
        order: Order,
        share: Share,
        options: ReaderOptions,
        *,
        parts: Sequence[str] = (),
        on_error: OnError = "raise",
        tiers: TierOptions | None = None,
        over: AddStage | None = None,
        decoding: tuple[Images, int] | None = None,
        decode_threads: int | None = None,
        windows: WindowReader | None = None,
    ) -> None:
        super().__init__(order, share, source.fingerprint)
        self.options = options
        self._reader = Pipeline(
            source, options, parts, on_error, tiers,
            over=over, decoding=decoding, decode_threads=decode_threads, windows=windows,
        )  # fmt: skip
        # Not of this loader's own method: a cycle would keep files and threads open after the last
        # reference has gone, until garbage is collected.
        self.stats = LoaderStats(stages_now=self._reader.all_stages)
        self.tuning: Tuning | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as what it was made of, and where it stands; ranks are looked up again there."""
        begun = self.epoch or self.position
        return made_again, (*self.made_of, self.state_dict() if begun else None)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; the same on every rank.

        Before the first epoch begins, the number as things stand: if frameworks join this process to others
        in between, it becomes another one, and the logger `headrace` says so.

        Raises:
            RankError: nobody says which rank this is, or two disagree.
        """
        return len(self.share)

    def __repr__(self) -> str:
        return loader_line(self)

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        return loader_card(self)

    @property
    def slices(self) -> Slices:
        """Which positions are this rank's; as things stand, while no epoch has begun.

        Raises:
            RankError: nobody says which rank this is, or two disagree.
        """
        return self.share.slices

    @property
    def ranks(self) -> RankDecision:
        """Which rank this is, and by whose word."""
        return self.share.ranks

    @property
    def source(self) -> SampleSource:
        """The store, as the epoch under way knows it."""
        return self._reader.source

    @property
    def reader(self) -> Pipeline:
        """What reads its batches, for adapters that deliver them in their own way."""
        return self._reader

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The tiers and limits that batches pass, the lowest first; none before it reads."""
        return self._reader.stages

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes read so far by where they came from: `ram`, `disk` (the cache) and `source`."""
        tiers = {"ram": 0, "disk": 0}
        for stage in self.stages:
            for tier, count in stage.stats().bytes_by_tier.items():
                tiers[tier] = tiers.get(tier, 0) + count
        return {**tiers, "source": max(0, self.stats.bytes - sum(tiers.values()))}

    @property
    def cache(self) -> CacheReport | None:
        """How far the cache in `cache_dir` is; None without one, or before reading began."""
        return self._reader.cache

    @property
    def decoding(self) -> Decoding | None:
        """The stage that decodes pictures; None where bytes are delivered."""
        return self._reader.decoding

    @property
    def skipped(self) -> list[Skipped]:
        """Samples that were left out so far."""
        return self._reader.skipped

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Go on in this mixture's proportions from a state of other ones, with the samples that come next.

        The epoch of `state` ends there; one of these proportions begins with the next `for`.

        Raises:
            StateMismatch: it is of no mixture, or of other sources or orders of theirs; or this is no mixture.
            OrderError: the state is damaged.
        """
        self.load_state_dict(mixed_order(self.order).continue_from(state))

    def close(self) -> None:
        """Stop reading ahead. Delivered batches stay valid; the loader can be used again."""
        self.end_pass()
        self._reader.close()

    def stages_now(self) -> tuple[Stage, ...]:
        """The stages of this process, the reading one first; tiers from when reading began."""
        return tuple(self.stats.stages_now())

    def begin(self) -> Pass:
        """Begin a pass, for adapters that deliver in their own way; it ends the one before.

        Raises:
            RankError: nobody says which rank this is, two disagree, or it is another than it was.
        """
        if self.tuning is not None:
            self.tuning.wake()
        return super().begin()

    def __iter__(self) -> Iterator[Batch]:
        a_pass = self.begin()
        return PassIterator(lambda: a_pass, self._deliver)

    def _deliver(self, a_pass: Pass) -> Iterator[Batch]:
        fetched = self._reader.stream(self.order, a_pass.epoch, a_pass.spans())
        try:
            for step in range(a_pass.steps):
                a_pass.check()
                self.stats.ask()
                asked_at = time.perf_counter()
                one = next(fetched)
                times = asked_at, time.perf_counter()
                delivery = one.delivery(one.batch)
                self.stats.deliver(a_pass, step, delivery, times, ready=self._reader.was_ready)
                yield one.batch
            self.stats.ask()  # what came after the last batch was work, too
        finally:
            self.stats.rest()
            fetched.close()
        a_pass.finish()


def made_again(
    make: Callable[..., Any], arguments: dict[str, Any], state: dict[str, Any] | None
) -> Any:
    """A loader as `make` made it, where `state` says that it stands."""
    loader = make(**arguments)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def mixed_order(order: Order) -> Mixed:
    """The order, if it is a mixture's.

    Raises:
        StateMismatch: it is not.
    """
    if not isinstance(order, Mixed):
        raise StateMismatch(
            "there are no proportions to continue in: this loader is over one store, no mixture.",
            next_step="Go on with load_state_dict, or make a loader over headrace.mix(...).",
        )
    return order


def loader_line(loader: Loader, kind: str = "Loader") -> str:
    """`Loader('photos.hr', shuffled, seed 7, batch 4, rank 0 of 2, epoch 1 at 16 of 36)`."""
    parts = [
        repr(_source(loader)),
        _order_text(loader.order),
        f"batch {loader.share.batch_size}",
        str(loader.ranks),
        f"epoch {loader.epoch} at {loader.position:,} of {loader.order.length:,}",
    ]
    return f"{kind}({', '.join(parts)})"


def loader_card(loader: Loader, kind: str = "Loader") -> str:
    """The same with what was delivered, as HTML."""
    share, unit = loader.share, unit_of(loader.order.describe())
    rows: list[tuple[str, object]] = [
        (unit, f"{loader.order.samples:,}"),
        ("order", _order_text(loader.order)),
        ("batch", f"{share.batch_size:,} {unit}{share.steps_text()}"),
        ("rank", str(loader.ranks)),
        (
            "stands at",
            f"epoch {loader.epoch}, position {loader.position:,} of {loader.order.length:,}",
        ),
    ]
    rows += delivered_rows(loader.stats, unit)
    from headrace.pages.html import card  # notebooks only

    return card(f"{kind}: {_source(loader)}", rows, waited=waited_share(loader.stats))


def delivered_rows(stats: LoaderStats, unit: str = "samples") -> list[tuple[str, object]]:
    """What was delivered so far; nothing before the first batch."""
    if not stats.batches:
        return []
    text = f"{stats.batches:,} batches, {stats.samples:,} {unit}"
    return [("delivered", f"{text}, {bytes_text(stats.bytes)}" if stats.bytes else text)]


def waited_share(stats: LoaderStats) -> float | None:
    """Share of its consumer's time that was waited; None before there was any."""
    seconds = stats.stall_s + stats.worked_s
    return stats.stall_s / seconds if stats.batches and seconds > 0 else None


def _order_text(order: Order) -> str:
    described = order.describe()
    text, sequence = str(described.get("mode", type(order).__name__)), "stored"
    if text == "subset":
        text, sequence = f"subset of {order.length:,} of {order.samples:,} samples", "given"
    if not described.get("shuffle", True):
        return f"{text}, in the {sequence} order"
    return f"{text}, seed {described['seed']}" if "seed" in described else text


def _source(loader: Loader) -> str:
    return shown(str(loader.source.path))
