"""Pipeline: the stages that read batches of one store, from the source's reader up.

    source reader -> throttle -> disk tier -> (decoded once) -> memory tier -> (node daemon) -> prefetch

They are made when a process first reads, so that a loader or data set may be made anywhere and used in any
process, forked ones included. The pipeline keeps no order and no position. No stage changes what is
delivered: only where from, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from headrace.config import TierOptions
from headrace.io import BatchReader, simulation_of
from headrace.machine.host import available_memory
from headrace.order import Blocked
from headrace.plane.batch import Batch, OnError, Skipped
from headrace.plane.batch_trace import NOT_READ, BatchTrace
from headrace.plane.stage import StageStats, native_figures, own_knobs

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.config import ReaderOptions
    from headrace.io.objects.faults import RemoteStats
    from headrace.order import Order
    from headrace.plane.decoding import Decoded, Decoding
    from headrace.plane.disk_cache import DiskCache
    from headrace.plane.images import Images
    from headrace.plane.loader import Span
    from headrace.plane.stage import BatchReads, PendingReads, Stage
    from headrace.plane.tiers import CacheReport, DiskTier, MemoryTier
    from headrace.plane.tokens import WindowReader
    from headrace.store import Store

    SampleSource = Store  # what loaders read: any store

BATCHES_AHEAD_MAX = 4096  # however small they are: a submitted batch costs memory for its indices
_LOCAL_KINDS = ("packed", "file", "tree")

_QUEUE_BYTES = 256 << 20
"""Batches that wait to be written to the cache take no more than this, nor than another budget."""

_ROOM = 2  # buffers' worth of requests that a throttle lets go: one is read, one waits for its room
_IDLE_BYTES = 1 << 20  # what a source's reader may hold while the cache has every sample


class Delivery(NamedTuple):
    """What a consumer gets, and what its delivery is counted with."""

    value: Any
    asked: NDArray[np.int64]  # int64, shape (samples asked for,): goes into the order hash
    samples: int  # samples that are in it
    nbytes: int  # bytes of its batch in the store
    reads: dict[str, int]  # how the bytes were read: numbers by name, see `LoaderStats`
    trace: BatchTrace


class Fetched(NamedTuple):
    """A batch that was read."""

    batch: Batch  # where windows are read, a `TokenBatch`
    asked: NDArray[np.int64]
    """int64, shape (samples asked for,): `batch.indices` and those that were left out."""
    reads: dict[str, int]
    trace: BatchTrace  # when and how it was read; each stage that works on the batch adds its time

    def delivery(self, value: Any) -> Delivery:
        """The delivery of a value that was made from the batch."""
        samples = len(self.asked) - len(self.trace.left_out)
        return Delivery(value, self.asked, samples, self.batch.nbytes, self.reads, self.trace)


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one process."""

    top: BatchReads  # what order and prefetch ask for batches
    source: BatchReader  # the source's reader
    stages: tuple[Stage, ...] = ()
    """The tiers and limits, the lowest first; the source's reader is none of them."""
    disk: DiskTier | None = None  # the disk tier, if there is one
    ram: MemoryTier | None = None  # the RAM tier, if there is one

    @property
    def active(self) -> BatchReader:
        """The reader whose knobs count: the cache's in a pass that it serves alone, else the source's."""
        whole = self.disk.whole if self.disk is not None else None
        return whole or self.source

    def missing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the indices that no tier holds now: they would come from the source."""
        if self.ram is not None:
            indices = self.ram.missing(indices)
        if self.disk is not None and len(indices):
            indices = self.disk.missing(indices)
        return indices

    def begin(self, knobs: Mapping[str, int]) -> None:
        """A pass through the data begins; the reader's knobs, whichever it is now, shall stand so."""
        if self.disk is None:
            return
        before = self.active
        self.disk.begin()
        if self.active is before:
            return
        if self.active is not self.source:
            self.source.turn(buffer_bytes=_IDLE_BYTES)
        self.active.turn(**knobs)


AddStage = Callable[[Stages, Any, Sequence[str], "Images | None"], Stages]
"""Puts another stage on top: of the stages, the source, the names of parts, and what pictures become."""


def build_stages(
    source: Store,
    part_names: Sequence[str],
    part_numbers: Sequence[int],
    options: ReaderOptions,
    tiers: TierOptions,
    *,
    done_fd: int | None = None,
    kept: Images | None = None,
) -> Stages:
    """Make the stages that the options ask for.

    `done_fd`: they serve other processes. Batches lie in memory that these may map, and this eventfd is rung
    whenever one is done. `kept`: what is done to their pictures, once for all of them.
    """
    shared = done_fd is not None
    # Stages that nobody asked for are not imported: the first batch waits for every module.
    cache = None
    if tiers.cache_dir is not None:
        from headrace.plane.disk_cache import CacheDirectory, DiskCache

        cache = DiskCache(CacheDirectory(tiers.cache_dir, tiers.cache_bytes), source, part_names)
    rung = -1 if done_fd is None else done_fd
    reader = BatchReader(
        source.catalog, part_numbers, _budgeted(options, cache), shared=shared, done_fd=rung
    )
    top: BatchReads = reader
    stages: list[Stage] = []
    if tiers.bytes_per_s is not None or tiers.reads_per_s is not None:
        from headrace.plane.rate_limit import Throttle

        top = throttle = Throttle(
            top,
            lambda indices: bytes_of(source, indices),
            bytes_per_s=tiers.bytes_per_s,
            reads_per_s=tiers.reads_per_s,
            deadline_s=options.deadline_s,
            room=lambda: _ROOM * int(reader.stats()["buffer_bytes"]),
        )
        stages.append(throttle)
    disk = None
    if cache is not None:
        from headrace.plane.cache_writer import CacheWriter
        from headrace.plane.tiers import DiskTier

        writer = CacheWriter(cache, min(_QUEUE_BYTES, options.budget_bytes))
        top = disk = DiskTier(top, cache, options, writer, shared=shared, done_fd=rung)
        stages.append(disk)
    if kept is not None:
        from headrace.plane.decoding import DecodedOnce

        top = decoded = DecodedOnce(top, kept, part_names, rung, waits=disk is not None)
        stages.append(decoded)
    ram = None
    quota = _ram_bytes(source, options, tiers)
    if quota > 0:
        from headrace.plane.tiers import MemoryTier

        yielding = not isinstance(tiers.ram_bytes, int)
        top = ram = MemoryTier(
            top, len(source), len(part_numbers), quota, yielding=yielding, shared=shared
        )
        stages.append(ram)
    return Stages(top, reader, tuple(stages), disk, ram)


def bytes_of(store: Store, indices: NDArray[np.int64]) -> int:
    """Bytes of the samples with these indices, all parts counted."""
    total = 0
    for segment in store.segments:
        local = indices - segment.base
        inside = local[(local >= 0) & (local < segment.directory.samples)]
        if len(inside):
            total += int(segment.directory.extents_of(inside)["length"].sum())
    return total


def _budgeted(options: ReaderOptions, cache: DiskCache | None) -> ReaderOptions:
    """How the source is read beside a cache, which has half of the budget until it is whole.

    While little is cached, hardly anything is read there: the source has the whole budget. A whole
    cache needs nothing of the source's.
    """
    if cache is None or 2 * cache.cached < len(cache.places):
        return options
    share = _IDLE_BYTES if cache.complete else options.budget_bytes // 2
    return replace(options, budget_bytes=max(_IDLE_BYTES, share))


def is_far(source: Store, options: ReaderOptions) -> bool:
    """Whether a store lies on no disk of this machine, or behaves so."""
    kinds = {v.kind for s in source.segments for v in s.entry.volumes}
    return not kinds <= set(_LOCAL_KINDS) or bool(options.simulate)


def _ram_bytes(source: Store, options: ReaderOptions, tiers: TierOptions) -> int:
    if isinstance(tiers.ram_bytes, int):
        return tiers.ram_bytes
    far = is_far(source, options)
    # What lies on the local disk already is near, once it is there; memory still saves reading it.
    if tiers.ram_bytes is None and (not far or tiers.cache_dir is not None):
        return 0
    from headrace.plane.tiers import memory_quota

    return memory_quota(
        tiers.ram_bytes, far=far, data_bytes=source.nbytes, available_bytes=available_memory()
    )


class Pipeline:
    """Reads batches of a store; towards the controller it is the stage `prefetch`.

    The knobs that were turned last hold for all readers that it makes: after `close` and in forked children,
    too. Samples that cannot be read become errors, or are left out.

    `windows` makes batches of tokens of what was read. `over` puts another stage on top. `decoding` is what
    pictures become, and the seed of their crops; None: bytes are delivered. `done_fd`, `kept`: as in
    `build_stages`.

    Raises:
        ValueError: the store has no part of this name.
    """

    name = "prefetch"

    def __init__(
        self,
        source: SampleSource,
        options: ReaderOptions,
        parts: Sequence[str] = (),
        on_error: OnError = "raise",
        tiers: TierOptions | None = None,
        *,
        over: AddStage | None = None,
        decoding: tuple[Images, int] | None = None,
        decode_threads: int | None = None,
        windows: WindowReader | None = None,
        done_fd: int | None = None,
        kept: Images | None = None,
    ) -> None:
        self.source = source
        self.options = options
        self.part_names = tuple(parts) or tuple(source.parts)  # the parts that are read
        self.skipped: list[Skipped] = []  # samples that were left out so far
        self.was_ready = False  # the batch that was taken last did not have to be waited for
        self._part_numbers = _numbers_of(self.part_names, source.parts)
        self.decoding: Decoding | None = None  # the stage that decodes pictures, if there is one
        if decoding is not None:
            from headrace.plane.decoding import Decoding  # who reads bytes alone needs it not

            self.decoding = Decoding(
                *decoding, self.part_names, names=source.names, on_error=on_error,
                threads=decode_threads,
            )  # fmt: skip
        self.windows = windows
        self._on_error = on_error
        self._tiers = tiers or TierOptions()
        self._over = over
        self._done_fd, self._kept = done_fd, kept
        self._stages: Stages | None = None
        self._turned: dict[str, int] = {}
        self._batch_bytes = 0.0  # of a batch, lately
        each = options.threads if options.engine == "threads" else options.queue_depth
        reads = options.reads_in_flight or each * options.workers
        remote = self._remote()
        if remote is not None and options.reads_in_flight is None:
            reads = remote.reads_in_flight  # what waits inside of its engine is not in flight
        self._knobs = {"reads_in_flight": reads, "buffer_bytes": options.budget_bytes}

    # -- the stage, for whoever watches or tunes it ------------------------------------------------

    def stats(self) -> StageStats:
        """What the reader of this process did; zeros before it has begun."""
        native, remote = self.native_stats(), self._remote()
        simulation = _label(self.options.simulate)
        if not native:
            return StageStats(name=self.name, simulation=simulation, remote=remote)
        return StageStats(
            name=self.name,
            samples=native["delivered_samples"],
            bytes=native["delivered_bytes"],
            simulation=simulation,
            remote=remote,
            in_flight_s=native["in_flight_s"],
            **native_figures(native),
        )

    def knobs(self) -> Mapping[str, int]:
        """Reads in flight and buffer bytes, as they were given or turned last."""
        return {**self._knobs, **self._turned}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set reads in flight, buffer bytes or both, now and for readers that are made anew.

        Raises ValueError if a value is not positive.
        """
        self._turned |= own_knobs(knobs, self._knobs)
        stages = self._stages
        if stages is not None and stages.active.usable:
            stages.active.turn(**self._turned)

    def native_stats(self) -> dict[str, Any]:
        """Statistics of the reader whose knobs count, see `BatchReader.stats`; empty before it reads.

        That is the source's, or the cache's once every sample is cached.
        """
        stages = self._stages
        return stages.active.stats() if stages is not None and stages.active.usable else {}

    def _remote(self) -> RemoteStats | None:
        """What the engine of the store's remote volumes did in this process; None without one."""
        engine = self.source.objects
        if engine is None:
            return None
        return replace(engine.stats(), reads_in_flight=engine.reads_in_flight)

    @property
    def mapped_bytes(self) -> int:
        """Memory that batch buffers take, those of delivered batches included, and held samples."""
        pixels = self.decoding.mapped_bytes if self.decoding is not None else 0
        return pixels + (self._stages.top.mapped_bytes if self._stages is not None else 0)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The tiers and limits of this process, the lowest first; none before it reads."""
        return self._stages.stages if self._stages is not None else ()

    def all_stages(self) -> tuple[Stage, ...]:
        """The pipeline itself as the stage `prefetch`, what decodes, then the tiers and limits."""
        decoding = () if self.decoding is None else (self.decoding,)
        return (self, *decoding, *self.stages)

    @property
    def cache(self) -> CacheReport | None:
        """How far the cache in `cache_dir` is; None without one, or before reading began."""
        if self._stages is None or self._stages.disk is None:
            return None
        return self._stages.disk.report()

    @property
    def engine(self) -> tuple[str, str]:
        """The engine for bytes that are not resident, and why it is not io_uring (or '')."""
        return self._reader().engine

    # -- reading -----------------------------------------------------------------------------------

    def fetch(self, indices: NDArray[np.int64], epoch: int = 0) -> Fetched:
        """Read one batch now.

        Raises SampleNotFound if an index lies outside the store, and HeadraceError if a sample
        cannot be read and `on_error` is `raise`.
        """
        native = self._reader().submit(indices).take()
        if self.decoding is None:
            return self._checked(native, epoch, 0)
        return self._checked(self.decoding.pending(native, epoch).take(), epoch, 0)

    def stream(
        self,
        order: Order,
        epoch: int,
        spans: Iterable[Span],
    ) -> Generator[Fetched, None, None]:
        """Read the batch of each span ahead, and yield them in order.

        Raises HeadraceError if a sample cannot be read and `on_error` is `raise`.
        """
        stages = self.begin()
        reader = stages.top
        stages.begin({"buffer_bytes": self.options.budget_bytes, **self._turned})
        if self.windows is not None:
            yield from self._read_tokens(self.windows, order, epoch, spans)
            return
        # Reading runs ahead of the consumer: each walks the spans at its own pace.
        ahead, here = tee(spans)
        natives: Generator[_native.Batch | Decoded, None, None]
        if not isinstance(order, Blocked):
            natives = self._read_batches(reader, order, epoch, ahead)
        elif self.decoding is None:
            natives = _read_windows(reader, order, epoch, ahead)
        else:
            natives = self.decoding.ahead_of(_read_windows(reader, order, epoch, ahead), epoch)
        try:
            for native, (position, _) in zip(natives, here, strict=True):
                fetched = self._checked(native, epoch, position)
                nbytes = fetched.batch.nbytes or self._batch_bytes  # 0: all of it was kept decoded
                self._batch_bytes += 0.1 * (nbytes - self._batch_bytes)
                yield fetched
        finally:
            natives.close()

    def _read_tokens(
        self, windows: WindowReader, order: Order, epoch: int, spans: Iterable[Span]
    ) -> Generator[Fetched, None, None]:
        """Yield the batch of windows of each span, in order."""
        assert self._stages is not None
        # No tier knows ranges of samples: the source's reader does.
        reader = self._stages.top if windows.whole else self._stages.source
        groups_ahead = self._stages.active.batches_ahead
        batches = windows.batches(
            reader, groups_ahead, order, epoch, spans, checked=self._refuse_failed
        )
        for batch, native, self.was_ready in batches:
            trace = BatchTrace(getattr(native, "way", NOT_READ))
            reads = {} if native is None else native.stats
            yield Fetched(cast("Batch", batch), batch.indices, reads, trace)

    def _refuse_failed(self, native: _native.Batch) -> None:
        if native.failed:
            self._without_failed(native, self.skipped)

    def _read_batches(
        self, reader: BatchReads, order: Order, epoch: int, spans: Iterable[Span]
    ) -> Generator[_native.Batch | Decoded, None, None]:
        """Yield the batch of each span, in order; each is read on its own.

        Batches are submitted ahead: the native reader keeps to its budget, and what is more only queues up.
        """
        pending: deque[Any] = deque()  # PendingPixels where pictures are decoded
        submit: Callable[..., Any] = reader.submit
        if self.decoding is not None:
            submit = partial(self.decoding.ask, reader, self.source.catalog, epoch)
        for span in spans:
            pending.append(submit(order.wrapped(epoch, *span)))
            while len(pending) > max(1, self._batches_ahead()):
                yield self._take(pending)
        while pending:
            yield self._take(pending)

    def _take(self, pending: deque[Any]) -> _native.Batch | Decoded:
        self.was_ready = (first := pending.popleft()).done
        return first.take() if self.decoding is None else first.take(pending)  # type: ignore[no-any-return]

    def _batches_ahead(self) -> int:
        """Batches to submit ahead: what reads never runs dry, and the buffer can be filled."""
        if self._stages is None:
            return 0
        active = self._stages.active
        if self._batch_bytes <= 0.0:  # before the first batch
            return active.batches_ahead
        wanted = self._stages.top.ahead_bytes or self.knobs()["buffer_bytes"]
        filling = 1 + int(wanted / self._batch_bytes)
        return max(active.batches_ahead, min(filling, BATCHES_AHEAD_MAX))

    def begin(self) -> Stages:
        """The stages of this process, whose knobs stand where `knobs` says."""
        # What is shown is what holds: the reader starts the workers that so many reads take. Left to
        # their depths, two workers with small batches would have a handful of slow reads in flight.
        self._turned.setdefault("reads_in_flight", self._knobs["reads_in_flight"])
        self._reader()
        assert self._stages is not None
        return self._stages

    def close(self) -> None:
        """Stop reading ahead. Delivered batches stay valid; the pipeline can be used again."""
        if self._stages is not None:
            self._stages.top.close()
        self._stages = None
        if self.decoding is not None:
            self.decoding.close()

    def go_to(self, source: SampleSource, windows: WindowReader | None = None) -> None:
        """Read another snapshot of the store from now on."""
        self.close()
        self.source, self.windows = source, windows

    def _reader(self) -> BatchReads:
        if self._stages is None or not self._stages.top.usable:
            self._stages = build_stages(
                self.source, self.part_names, self._part_numbers, self.options, self._tiers,
                done_fd=self._done_fd, kept=self._kept,
            )  # fmt: skip
            if self._over is not None:
                images = None if self.decoding is None else self.decoding.images
                self._stages = self._over(self._stages, self.source, self.part_names, images)
            if self._turned:
                self._stages.source.turn(**self._turned)
            if self.decoding is not None:
                self.decoding.below = self._stages.top
        return self._stages.top

    def _checked(self, taken: _native.Batch | Decoded, epoch: int, position: int) -> Fetched:
        native = taken[0] if isinstance(taken, tuple) else taken
        trace = BatchTrace(getattr(native, "way", NOT_READ))
        keep = self._without_failed(native, trace.left_out) if native.failed else None
        if not isinstance(taken, tuple) or self.decoding is None:
            batch = Batch(native, self.part_names, epoch=epoch, position=position, keep=keep)
        else:
            trace.decoding_s, trace.decoded_s, trace.work_s, trace.cpu_s = taken.job.times
            batch = self.decoding.batch(
                taken, trace.left_out, epoch=epoch, position=position, keep=keep
            )
        self.skipped += trace.left_out
        batch.mixture = self.source.mixture
        return Fetched(batch, native.indices, native.stats, trace)

    def _without_failed(self, native: _native.Batch, left_out: list[Skipped]) -> NDArray[np.bool_]:
        keep = np.ones(native.samples, np.bool_)
        for failure in self.source.catalog.failures(native):
            sample = failure["slot"] // native.parts
            index = int(native.indices[sample])
            if self._on_error == "raise":
                # In no variable: the traceback holds this frame, and with it all that reads.
                raise self.source.failure_error(index, failure)
            if keep[sample]:
                error = self.source.failure_error(index, failure)
                left_out.append(Skipped(index, self.source.names[index], error.message))
            keep[sample] = False
        return keep


def _label(simulate: Any) -> str:
    """What figures of a simulated storage must be labelled with; '' for a real one."""
    if simulate is None:
        return ""
    label = getattr(getattr(simulate, "model", None), "label", None)  # of a SlowVolume
    return str(label) if label is not None else f"simulated {simulation_of(simulate).name}"


def _numbers_of(wanted: Sequence[str], available: Sequence[str]) -> list[int]:
    missing = [name for name in wanted if name not in available]
    if missing:
        raise ValueError(f"the store has no part {missing[0]!r}, only {list(available)}")
    return [list(available).index(name) for name in wanted]


# -- blocked orders --------------------------------------------------------------------------------

_WINDOWS_AHEAD_MAX = 2  # windows that are submitted ahead of the one that is being consumed
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


def _read_windows(
    reader: BatchReads, order: Blocked, epoch: int, spans: Iterable[Span]
) -> Generator[_native.Batch, None, None]:
    """Yield the batch of each span, in order: whole windows are read, neighbours together, and cut."""
    windows = ((reader.submit(i), pieces) for i, pieces in _windows(order, epoch, spans))
    ahead: deque[tuple[PendingReads, _Pieces]] = deque()
    batch: list[tuple[_native.Batch, int, int]] = []
    while True:
        ahead.extend(islice(windows, 1 + _WINDOWS_AHEAD_MAX - len(ahead)))
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
