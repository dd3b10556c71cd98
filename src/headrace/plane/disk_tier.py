"""DiskTier: reads cached samples from the local disk and the rest from the source, and caches those.

A batch is split by a look into an array, both halves are read at the same time, and one native call
puts them together; a batch that lies whole in one tier is not copied. A cached sample that cannot be
read is read from the source instead, reported, and its segment is not trusted any more.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.errors import HeadraceError, VolumeTimeout
from headrace.io import BatchReader
from headrace.plane.stage import TIERS, ReadStage, StageStats, own_knobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.config import ReaderOptions
    from headrace.plane.cache_writer import CacheWriter
    from headrace.plane.disk_cache import DiskCache
    from headrace.plane.stage import BatchReads, PendingReads
    from headrace.store.store import Store


_log = logging.getLogger("headrace")

_DISK = TIERS.index("disk")

_REFRESH_S = 5.0
"""How often others' publications are looked for within an epoch."""

_RETAINED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How far a cache is.

    Attributes:
        path: its folder.
        samples: samples that are cached.
        of_samples: samples of the data set.
        written: samples that this process has added.
        left: samples that came faster than they could be written, left for the next epoch.
        read_again: cached samples that could not be read and came from the source.
        distrusted_segments: segments that are not trusted any more.
        stopped: why nothing more is written, or ''.
    """

    path: str
    samples: int
    of_samples: int
    written: int
    left: int
    read_again: int
    distrusted_segments: int
    stopped: str


@dataclass(frozen=True, slots=True)
class _Local:
    """A reader of what is cached, and what it was made for."""

    store: Store
    reader: BatchReader


class DiskTier(ReadStage):
    """Reads from the local disk what is there.

    Args:
        below: reads the source.
        cache: the data set's cache.
        options: how to read the cache.
        writer: writes what was read from the source.
        shared: deliver in memory that other processes may map.
    """

    name = "disk"

    def __init__(
        self,
        below: BatchReads,
        cache: DiskCache,
        options: ReaderOptions,
        writer: CacheWriter,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__(below)
        self.cache = cache
        self.writer = writer
        self._options = replace(options, simulate=None)  # which stands for the source alone
        self._assembler = _native.Assembler(min(_RETAINED_BYTES, options.budget_bytes), shared)
        self._shared = shared
        self._local: _Local | None = None
        self._whole: BatchReader | None = None
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()
        self._samples = self._bytes = self._local_bytes = self._read_again = 0

    def _own_bytes(self) -> int:
        """Of batches that are put together, or were read here."""
        local = self._local
        return self._assembler.mapped_bytes + (local.reader.mapped_bytes if local else 0)

    @property
    def whole(self) -> BatchReader | None:
        """The cache's reader, if every sample was cached when the pass began: it reads them all."""
        return self._whole

    def begin(self) -> None:
        """A pass begins: publish what the one before has left, and see what others have."""
        self.writer.publish()
        self.cache.refresh()
        store = self.cache.store
        self._whole = self._reader(store).reader if store and self.cache.complete else None

    def missing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the indices that are not cached."""
        store, places = self.cache.look_up(indices)
        return indices if store is None else indices[places <= 0]

    def submit(self, indices: NDArray[np.int64]) -> PendingReads:
        """Ask for one batch, of each tier what it has."""
        now = time.monotonic()
        if now - self._looked_at > _REFRESH_S:
            self._looked_at = now
            self.cache.refresh()
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self.cache.places):
            return self._below.submit(indices)  # says what is wrong
        store, places = self.cache.look_up(indices)
        held = np.flatnonzero(places > 0)
        if store is None or not len(held):
            return _Pending(self, indices, None, self._below.submit(indices))
        local = self._reader(store)
        rest = np.flatnonzero(places <= 0)
        near = local.reader.submit(places[held] - 1)
        far = self._below.submit(indices[rest]) if len(rest) else None
        return _Pending(self, indices, _Near(local, held, places[held] - 1, near), far, rest)

    def close(self) -> None:
        """Write what waits, then close both tiers."""
        self.writer.close()
        local, self._local, self._whole = self._local, None, None
        if local is not None:
            local.reader.close()
        self.cache.close()
        self._below.close()

    def __del__(self) -> None:
        self.writer.stop()

    def stats(self) -> StageStats:
        """What passed, how much of it from the local disk, and how the writer fares."""
        with self._lock:
            return StageStats(
                name=self.name,
                busy_s=self.writer.busy_s,
                wait_input_s=self.writer.idle_s,
                samples=self._samples,
                bytes=self._bytes,
                buffered_bytes=self.writer.queued_bytes,
                bytes_by_tier={"disk": self._local_bytes},
            )

    def report(self) -> CacheReport:
        """How far the cache is."""
        cache, writer = self.cache, self.writer
        return CacheReport(
            str(cache.folder), cache.cached, len(cache.places), writer.samples, writer.left,
            self._read_again, cache.distrusted, writer.why_stopped,
        )  # fmt: skip

    def knobs(self) -> Mapping[str, int]:
        """The quota of the folder of caches, where there is one."""
        quota = self.cache.directory.quota_bytes
        return {} if quota is None else {"cache_bytes": quota}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set `cache_bytes`, for what is written from now on.

        Raises:
            ValueError: the quota is not positive.
        """
        for quota in own_knobs(knobs, {"cache_bytes"}).values():
            self.cache.directory.quota_bytes = quota

    # -- for pending batches ----------------------------------------------------------------------

    def join(self, pending: _Pending) -> _native.Batch:
        """Wait for both halves of a batch and put it together."""
        indices, near, far = pending.indices, pending.near, pending.far
        if near is None:
            assert far is not None
            return self._counted(self._take_far(far, 0), 0)
        local, good = self._take_near(near)
        if local is not None and len(good) == len(indices):
            whole = self._assembler.assemble(indices, [(local, near.positions)])
            return self._counted(whole, int(local.lengths.sum()))
        parts: list[tuple[_native.Batch, NDArray[np.int64]]] = []
        local_bytes = 0
        if local is not None and len(good):
            local_bytes = int(local.lengths.reshape(local.samples, -1)[good].sum())
        again = np.setdiff1d(np.arange(len(near.positions)), good)
        if far is not None:
            assert pending.rest is not None
            parts.append((self._take_far(far, local_bytes), pending.rest))
        if len(again):
            with self._lock:
                self._read_again += len(again)
            batch = self._below.submit(indices[near.positions[again]]).take()
            self._offer(batch)
            parts.append((batch, near.positions[again]))
        if local is not None and len(good):
            if len(again):  # the good samples, without the failures
                local = self._below.gather([(local, int(k), int(k) + 1) for k in good])
            parts.append((local, near.positions[good]))
        return self._counted(self._assembler.assemble(indices, parts), local_bytes)

    def _take_far(self, far: PendingReads, local_bytes: int) -> _native.Batch:
        """What the source gave beside the cache's `local_bytes`; it goes into the cache as well."""
        waited = not far.done
        batch = far.take()
        source_bytes = int(batch.lengths.sum())
        self.writer.note_batch(source_bytes + local_bytes, source_bytes, waited=waited)
        self._offer(batch)
        return batch

    def _take_near(self, near: _Near) -> tuple[_native.Batch | None, NDArray[np.int64]]:
        """What the local disk gave, and which of its samples are good."""
        every = np.arange(len(near.positions))
        try:
            batch = near.job.take()
        except VolumeTimeout:
            raise
        except HeadraceError as e:
            _log.warning("cache %s: %s It is read from the source.", self.cache.folder, e)
            return None, every[:0]
        batch.came_from(_DISK)
        if not batch.failed:
            return batch, every
        failures = near.local.store.catalog.failures(batch)
        for failure in failures:
            index = int(near.places[failure["slot"] // batch.parts])
            error = near.local.store.failure_error(index, failure)
            if self.cache.distrust(near.local.store, index):
                _log.warning("cache: %s Its segment is read from the source from now on.", error)
        return batch, np.setdiff1d(every, _native.failed_samples(batch))

    def _offer(self, batch: _native.Batch) -> None:
        if self.writer.why_stopped or not batch.samples:
            return
        missing = np.flatnonzero(self.cache.places[batch.indices] == 0)
        if not len(missing):
            return
        if batch.failed:
            missing = np.setdiff1d(missing, _native.failed_samples(batch))
        # A sampler may ask for one sample twice in a batch.
        _, first = np.unique(batch.indices[missing], return_index=True)
        self.writer.offer(batch, missing[np.sort(first)])

    def _counted(self, batch: _native.Batch, local_bytes: int) -> _native.Batch:
        with self._lock:
            self._samples += batch.samples
            self._bytes += int(batch.lengths.sum())
            self._local_bytes += local_bytes
        return batch

    def _reader(self, store: Store) -> _Local:
        """A reader of this state of the cache."""
        local = self._local
        if local is None or local.store is not store:
            names = list(store.parts)
            numbers = [names.index(part) for part in self.cache.part_names]
            options = self._options
            # Both tiers together keep to the budget: a whole one for a whole cache, else half.
            if not self.cache.complete:
                options = replace(options, budget_bytes=max(1 << 20, options.budget_bytes // 2))
            # Batches under way keep the reader before this one until they are taken.
            reader = BatchReader(store.catalog, numbers, options, shared=self._shared)
            local = self._local = _Local(store, reader)
        return local


@dataclass(frozen=True, slots=True)
class _Near:
    """The half of a batch that is cached."""

    local: _Local
    positions: NDArray[np.int64]
    places: NDArray[np.int64]
    job: PendingReads


@dataclass(frozen=True, slots=True)
class _Pending:
    """A batch from two tiers."""

    tier: DiskTier
    indices: NDArray[np.int64]
    near: _Near | None
    far: PendingReads | None
    rest: NDArray[np.int64] | None = None
    """Where in the batch those are that the source reads, if the cache reads some."""

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        near = self.near is None or self.near.job.done
        return near and (self.far is None or self.far.done)

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        return self.tier.join(self)
