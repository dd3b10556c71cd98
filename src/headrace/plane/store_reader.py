"""StoreReader: batches of one store, with failed samples turned into errors or left out.

Makes the chain of stages that reads them (`tiers`) when it is first needed in a process, so that a
loader or data set may be made anywhere and used in any process, forked ones included. Keeps no order
and no cursor.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import tee
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from headrace.config import TierOptions
from headrace.order import Blocked
from headrace.plane.batch import Batch
from headrace.plane.prefetch import read_batches, read_windows
from headrace.plane.skipped import OnError, Skipped
from headrace.plane.stage import RemoteStats
from headrace.plane.tiers import build_chain
from headrace.plane.way import NOT_READ, Way

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.config import ReaderOptions
    from headrace.errors import HeadraceError
    from headrace.order import Order
    from headrace.plane.prefetch import Span
    from headrace.plane.stage import Stage
    from headrace.plane.tiers import CacheReport, Chain, Reads

__all__ = ["Fetched", "Over", "SampleSource", "StoreReader"]


BATCHES_AHEAD_MAX = 4096
"""However small they are: a submitted batch costs memory for its indices."""


class Over(Protocol):
    """Puts another stage on top of a chain."""

    def __call__(self, chain: Chain, source: Any, part_names: Sequence[str], /) -> Chain:
        """The chain with the stage: over the source, for these parts."""


class SampleSource(Protocol):
    """What reading needs of a store."""

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


class Fetched(NamedTuple):
    """A batch that was read, and what its delivery has to be counted with."""

    batch: Batch
    asked: NDArray[np.int64]
    """int64, shape (samples asked for,): `batch.indices` and those that were left out."""
    reads: dict[str, int]
    """How the bytes were read: numbers by name, see `LoaderStats`."""
    way: Way
    """How it came; whoever makes something of it stamps it."""


class StoreReader:
    """Reads batches of a store.

    Args:
        source: the store.
        options: how to read.
        parts: names of the parts to read; all if empty.
        on_error: what to do with a sample that cannot be read.
        tiers: where samples are kept nearer than the source, and limits.
        over: puts another stage on top of the chain, of the source and the names of parts.

    Attributes:
        part_names: the parts that are read.
        skipped: samples that were left out so far.
        was_ready: the batch that was taken last did not have to be waited for.

    Raises:
        ValueError: the store has no part of this name.
    """

    def __init__(
        self,
        source: SampleSource,
        options: ReaderOptions,
        parts: Sequence[str] = (),
        on_error: OnError = "raise",
        tiers: TierOptions | None = None,
        *,
        over: Over | None = None,
    ) -> None:
        self.source = source
        self.options = options
        self._over = over
        self.part_names = tuple(parts) or tuple(source.parts)
        self.skipped: list[Skipped] = []
        self._part_numbers = _numbers_of(self.part_names, source.parts)
        self._on_error = on_error
        self._tiers = tiers or TierOptions()
        self._chain: Chain | None = None
        self._turned: dict[str, int] = {}
        self.was_ready = False
        self._batch_bytes = 0.0  # of a batch, lately

    @property
    def mapped_bytes(self) -> int:
        """Memory that batch buffers take, those of delivered batches included, and held samples."""
        return self._chain.top.mapped_bytes if self._chain is not None else 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The tiers and limits of this process, the lowest first; none before it reads."""
        return self._chain.stages if self._chain is not None else ()

    def stats(self) -> dict[str, Any]:
        """Statistics of the reader whose knobs count, see `BatchReader.stats`; empty before it reads.

        That is the source's, or the cache's once every sample is cached.
        """
        chain = self._chain
        return chain.active.stats() if chain is not None and chain.active.usable else {}

    def remote(self) -> RemoteStats | None:
        """What the engine of the store's remote volumes did in this process; None without one."""
        engine = getattr(self.source, "objects", None)
        if engine is None:
            return None
        found = engine.stats()
        return RemoteStats(
            reads_in_flight=engine.reads_in_flight,
            **{each.name: getattr(found, each.name) for each in fields(RemoteStats)
               if hasattr(found, each.name)},
        )  # fmt: skip

    def turn(self, *, reads_in_flight: int | None = None, buffer_bytes: int | None = None) -> None:
        """Set knobs of the reader whose knobs count, now and when it is made anew.

        See `BatchReader.turn`.
        """
        given = {"reads_in_flight": reads_in_flight, "buffer_bytes": buffer_bytes}
        self._turned |= {name: value for name, value in given.items() if value is not None}
        chain = self._chain
        if chain is not None and chain.active.usable:
            chain.active.turn(**self._turned)

    @property
    def cache(self) -> CacheReport | None:
        """How far the cache in `cache_dir` is; None without one, or before reading began."""
        if self._chain is None or self._chain.disk is None:
            return None
        return self._chain.disk.report()

    @property
    def engine(self) -> tuple[str, str]:
        """The engine for bytes that are not resident, and why it is not io_uring (or '')."""
        return self._reader().engine

    def fetch(self, indices: NDArray[np.int64], epoch: int = 0) -> Fetched:
        """Read one batch now.

        Args:
            indices: int64, shape (samples,).
            epoch: recorded in the batch.

        Raises:
            SampleNotFound: an index lies outside the store.
            HeadraceError: a sample cannot be read and `on_error` is `raise`.
        """
        return self._checked(self._reader().submit(indices).take(), epoch, 0)

    def stream(
        self,
        order: Order,
        epoch: int,
        spans: Iterable[Span],
    ) -> Generator[Fetched, None, None]:
        """Read the batch of each span ahead, and yield them in order.

        Args:
            order: which sample lies at which position.
            epoch: the epoch.
            spans: global positions (start, stop) of each batch.

        Raises:
            HeadraceError: a sample cannot be read and `on_error` is `raise`.
        """
        reader = self._reader()
        if self._chain is not None:
            self._chain.begin({"buffer_bytes": self.options.budget_bytes, **self._turned})
        # Reading runs ahead of the consumer: each walks the spans at its own pace.
        ahead, here = tee(spans)
        if isinstance(order, Blocked):
            natives = read_windows(reader, order, epoch, ahead)
        else:
            natives = read_batches(
                reader, order, epoch, ahead, self._batches_ahead, told=self._tell
            )
        try:
            for native, (position, _) in zip(natives, here, strict=True):
                fetched = self._checked(native, epoch, position)
                self._batch_bytes += 0.1 * (fetched.batch.nbytes - self._batch_bytes)
                yield fetched
        finally:
            natives.close()

    def _tell(self, ready: bool) -> None:
        self.was_ready = ready

    def _batches_ahead(self) -> int:
        """Batches to submit ahead: what reads never runs dry, and the buffer can be filled."""
        if self._chain is None:
            return 0
        active = self._chain.active
        if self._batch_bytes <= 0.0:  # before the first batch
            return active.batches_ahead
        buffer_bytes = self._turned.get("buffer_bytes", self.options.budget_bytes)
        filling = 1 + int(buffer_bytes / self._batch_bytes)
        return max(active.batches_ahead, min(filling, BATCHES_AHEAD_MAX))

    def close(self) -> None:
        """Stop reading ahead. Delivered batches stay valid; the reader can be used again."""
        if self._chain is not None:
            self._chain.top.close()
        self._chain = None

    def _reader(self) -> Reads:
        if self._chain is None or not self._chain.top.usable:
            self._chain = build_chain(
                self.source, self.part_names, self._part_numbers, self.options, self._tiers
            )
            if self._over is not None:
                self._chain = self._over(self._chain, self.source, self.part_names)
            if self._turned:
                self._chain.source.turn(**self._turned)
        return self._chain.top

    def _checked(self, native: _native.Batch, epoch: int, position: int) -> Fetched:
        keep = self._without_failed(native) if native.failed else None
        batch = Batch(native, self.part_names, epoch=epoch, position=position, keep=keep)
        return Fetched(batch, native.indices, native.stats, Way(getattr(native, "way", NOT_READ)))

    def _without_failed(self, native: _native.Batch) -> NDArray[np.bool_]:
        keep = np.ones(native.samples, np.bool_)
        for failure in self.source.catalog.failures(native):
            sample = failure["slot"] // native.parts
            index = int(native.indices[sample])
            if self._on_error == "raise":
                # In no variable: the traceback holds this frame, and with it all that reads.
                raise self.source.failure_error(index, failure)
            if keep[sample]:
                error = self.source.failure_error(index, failure)
                self.skipped.append(Skipped(index, self.source.names[index], str(error)))
            keep[sample] = False
        return keep


def _numbers_of(wanted: Sequence[str], available: Sequence[str]) -> list[int]:
    missing = [name for name in wanted if name not in available]
    if missing:
        raise ValueError(f"the store has no part {missing[0]!r}, only {list(available)}")
    return [list(available).index(name) for name in wanted]
