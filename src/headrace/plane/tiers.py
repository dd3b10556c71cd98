"""Tiers: stages that keep samples nearer than the source, in memory and on the local disk.

Both split a batch by a look into an array, read what they lack from below, and put the batch together in one
native call; a batch that lies whole in one tier is not copied.

`MemoryTier` keeps samples within a quota. A placement is kept, not churned: when the quota is full, the rest
goes on being read below. With `auto`, memory is given back when the machine or the job's cgroup runs short.

`DiskTier` reads cached samples from the local disk, the rest from the source at the same time, and caches
those. A cached sample that cannot be read is read from the source instead, reported, and its segment is not
trusted any more.
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
from headrace.machine.host import available_memory
from headrace.plane.stage import TIERS, ReadStage, StageStats, own_knobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.config import ReaderOptions
    from headrace.plane.cache_writer import CacheWriter
    from headrace.plane.disk_cache import DiskCache
    from headrace.plane.stage import BatchReads, PendingReads
    from headrace.store.store import Store


_PRESSURE_CHECK_S = 1.0

_GIB = 1 << 30
_MIB = 1 << 20

RAM_SHARE = 0.5  # of the memory that is available: the training program needs the rest
MEMORY_RESERVE_BYTES = 2 * _GIB  # memory that is left alone, however much there is


def memory_quota(
    given: int | str | None, *, far: bool, data_bytes: int, available_bytes: int
) -> int:
    """Bytes of the RAM tier; 0 for none.

    Args:
        given: a quota, `auto`, or None for the default: `auto` where the source is far, else none.
            Local volumes have the page cache, and a copy of it would take the memory twice.
        far: the source is remote, or behaves so.
        data_bytes: of all samples.
        available_bytes: memory that can be taken.
    """
    if isinstance(given, int):
        return given
    if given is None and not far:
        return 0
    room = min(RAM_SHARE * available_bytes, available_bytes - MEMORY_RESERVE_BYTES)
    # An eighth more than the data: slabs are not filled to the last byte.
    return max(0, min(int(room), data_bytes + data_bytes // 8 + 4 * _MIB))


class MemoryTier(ReadStage):
    """Keeps samples in memory: as many as the quota allows, not counting batches under way.

    `shared`: it is memory that other processes may map.
    """

    name = "ram"

    def __init__(
        self,
        below: BatchReads,
        samples: int,
        parts: int,
        quota_bytes: int,
        *,
        yielding: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(below)
        self._cache = _native.SampleCache(
            samples=samples, parts=parts, quota_bytes=quota_bytes, shared=shared
        )
        self._yielding = yielding  # give memory back when it runs short
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()
        self._samples = self._bytes = self._hit_bytes = 0
        self._busy_s = 0.0

    def _own_bytes(self) -> int:
        return self._cache.mapped_bytes + self._cache.delivered_bytes

    @property
    def cache(self) -> _native.SampleCache:
        """The held samples; other processes may map them where they are shared."""
        return self._cache

    @property
    def held_bytes(self) -> int:
        """Memory of held samples and their index: at most the quota."""
        return self._cache.mapped_bytes

    @property
    def held_samples(self) -> int:
        """How many samples are held."""
        return self._cache.held_samples

    def missing(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the indices that are not held."""
        return indices[self._cache.look_up(indices).missing]

    def submit(self, indices: NDArray[np.int64]) -> MemoryPending:
        """Ask for one batch; what is not held is read below."""
        hits = self._cache.look_up(indices)
        missing = hits.missing
        if not len(missing) and len(indices):
            return MemoryPending(self, hits, None)
        return MemoryPending(self, hits, self._below.submit(indices[missing]))

    def close(self) -> None:
        """Give all memory back, and close what is below."""
        self._cache.set_quota(0)
        self._below.close()

    def stats(self) -> StageStats:
        """What passed, how much of it from memory, and what is held."""
        with self._lock:
            return StageStats(
                name=self.name,
                busy_s=self._busy_s,
                samples=self._samples,
                bytes=self._bytes,
                buffered_bytes=self._cache.mapped_bytes,
                bytes_by_tier={"ram": self._hit_bytes},
            )

    def knobs(self) -> Mapping[str, int]:
        """The quota."""
        return {"cache_bytes": self._cache.quota_bytes}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set `cache_bytes`. Less gives memory back at once; more is filled as samples come.

        Raises ValueError if the quota is not positive.
        """
        for quota in own_knobs(knobs, {"cache_bytes"}).values():
            self._cache.set_quota(quota)

    def keep(self, read: _native.Batch) -> None:
        """Hold what was read, as far as there is room."""
        began = time.perf_counter()
        self._yield_memory()
        self._cache.insert(read)
        with self._lock:
            self._busy_s += time.perf_counter() - began

    def join(self, hits: _native.Hits, read: _native.Batch | None) -> _native.Batch:
        """Put a batch together of what is held and what was read."""
        began = time.perf_counter()
        if read is not None and len(hits.missing) == len(hits.indices):
            batch = read
        else:
            batch = self._cache.gather(hits, read)
            batch.made_of(read, hits.bytes)
        with self._lock:
            self._busy_s += time.perf_counter() - began
            self._samples += batch.samples
            self._hit_bytes += hits.bytes
            self._bytes += hits.bytes + (0 if read is None else int(read.lengths.sum()))
        return batch

    def _yield_memory(self) -> None:
        """Shrink where less than the reserve is left: training must not be killed for a cache."""
        now = time.monotonic()
        if not self._yielding or now - self._looked_at < _PRESSURE_CHECK_S:
            return
        self._looked_at = now
        short = MEMORY_RESERVE_BYTES // 2 - available_memory()
        if short > 0:
            self._cache.set_quota(max(0, self._cache.mapped_bytes - short))


@dataclass(eq=False, slots=True)
class MemoryPending:
    """A batch of which some is held and the rest is being read."""

    tier: MemoryTier
    hits: _native.Hits
    job: PendingReads | None
    read: _native.Batch | None = None  # what was read, while it is not kept

    @property
    def ram_bytes(self) -> int:
        """Bytes of the batch that are held."""
        return self.hits.bytes

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        return self.job is None or self.job.done

    @property
    def waits_for(self) -> str:
        """What it waits for now, for messages."""
        return "nothing" if self.job is None else self.job.waits_for

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        batch = self.hand_over()
        self.keep()
        return batch

    def hand_over(self) -> _native.Batch:
        """The same for who is in a hurry, and calls `keep` afterwards."""
        self.read = None if self.job is None else self.job.take()
        return self.tier.join(self.hits, self.read)

    def keep(self) -> None:
        """Hold what was read."""
        read, self.read = self.read, None
        if read is not None:
            self.tier.keep(read)


_log = logging.getLogger("headrace")

_DISK = TIERS.index("disk")

_REFRESH_S = 5.0  # how often others' publications are looked for within an epoch
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
    """Reads from the local disk what is there."""

    name = "disk"

    def __init__(
        self,
        below: BatchReads,
        cache: DiskCache,
        options: ReaderOptions,
        writer: CacheWriter,
        *,
        shared: bool = False,
        done_fd: int = -1,
    ) -> None:
        super().__init__(below)
        self.cache = cache
        self.writer = writer
        self._options = replace(options, simulate=None)  # which stands for the source alone
        self._assembler = _native.Assembler(min(_RETAINED_BYTES, options.budget_bytes), shared)
        self._shared, self._done_fd = shared, done_fd
        self._local: _Local | None = None
        self._whole: BatchReader | None = None
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()
        self._samples = self._bytes = self._local_bytes = self._read_again = 0

    def _own_bytes(self) -> int:
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
            return _DiskPending(self, indices, None, self._below.submit(indices))
        local = self._reader(store)
        rest = np.flatnonzero(places <= 0)
        near = local.reader.submit(places[held] - 1)
        far = self._below.submit(indices[rest]) if len(rest) else None
        return _DiskPending(self, indices, _Near(local, held, places[held] - 1, near), far, rest)

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

        Raises ValueError if the quota is not positive.
        """
        for quota in own_knobs(knobs, {"cache_bytes"}).values():
            self.cache.directory.quota_bytes = quota

    # -- for pending batches ----------------------------------------------------------------------

    def join(self, pending: _DiskPending) -> _native.Batch:
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
            reader = BatchReader(
                store.catalog, numbers, options, shared=self._shared, done_fd=self._done_fd
            )
            local = self._local = _Local(store, reader)
        return local


@dataclass(frozen=True, slots=True)
class _Near:
    """The half of a batch that is cached."""

    local: _Local
    positions: NDArray[np.int64]
    places: NDArray[np.int64]
    job: PendingReads


@dataclass(eq=False, frozen=True, slots=True)
class _DiskPending:
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

    @property
    def waits_for(self) -> str:
        """What it waits for now, for messages."""
        if self.near is not None and not self.near.job.done:
            return f"the cache on the local disk: {self.near.job.waits_for}"
        return "nothing" if self.far is None else self.far.waits_for

    def take(self) -> _native.Batch:
        """Wait for the batch."""
        return self.tier.join(self)
