"""Chain: the stages of a plane, from the source's reader up.

    source reader -> throttle -> disk tier -> RAM tier -> (order and prefetch)

Made when a process first reads. None of them changes what is delivered: only where from, and when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.io import BatchReader
from headrace.machine.host import available_memory
from headrace.plane.tiers.cache import Cache
from headrace.plane.tiers.disk import DiskTier
from headrace.plane.tiers.policy import ram_quota
from headrace.plane.tiers.ram import RamTier
from headrace.plane.tiers.shelf import Shelf
from headrace.plane.tiers.tee import Tee
from headrace.plane.tiers.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.config import ReaderOptions, TierOptions
    from headrace.plane.stage import Stage
    from headrace.plane.tiers.reads import Reads

__all__ = ["Chain", "build_chain", "bytes_of"]

_LOCAL_KINDS = ("packed", "file", "tree")

_QUEUE_BYTES = 256 << 20
"""Batches that wait to be written to the cache take no more than this, nor than another budget."""

_ROOM = 2
"""Buffers' worth of requests that a throttle lets go: one is read, one waits for its room."""

_IDLE_BYTES = 1 << 20
"""What a source's reader may hold while the cache has every sample."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The stages of one process.

    Attributes:
        source: the source's reader.
        top: what order and prefetch ask for batches.
        stages: the tiers and limits, the lowest first; the source's reader is none of them.
        disk: the disk tier, if there is one.
        ram: the RAM tier, if there is one.
    """

    top: Reads
    source: BatchReader
    stages: tuple[Stage, ...] = ()
    disk: DiskTier | None = None
    ram: RamTier | None = None

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
        """A pass through the data begins.

        Args:
            knobs: where the reader's knobs shall stand, whichever it is now; `buffer_bytes` included.
        """
        if self.disk is None:
            return
        before = self.active
        self.disk.begin()
        if self.active is before:
            return
        if self.active is not self.source:
            self.source.turn(buffer_bytes=_IDLE_BYTES)
        self.active.turn(**knobs)


def build_chain(
    source: Any,
    part_names: Sequence[str],
    part_numbers: Sequence[int],
    options: ReaderOptions,
    tiers: TierOptions,
    *,
    shared: bool = False,
) -> Chain:
    """Make the stages that the options ask for.

    Args:
        source: the store (what each stage needs of it: `SampleSource`, `CacheSource`).
        part_names: the parts that are read.
        part_numbers: their numbers in the source.
        options: how to read.
        tiers: which stages.
        shared: deliver in memory that other processes may map.
    """
    cache = None
    if tiers.cache_dir is not None:
        cache = Cache(Shelf(tiers.cache_dir, tiers.cache_bytes), source, part_names)
    reader = BatchReader(source.catalog, part_numbers, _budgeted(options, cache), shared=shared)
    top: Reads = reader
    stages: list[Stage] = []
    if tiers.bytes_per_s is not None or tiers.reads_per_s is not None:
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
        tee = Tee(cache, min(_QUEUE_BYTES, options.budget_bytes))
        top = disk = DiskTier(top, cache, options, tee, shared=shared)
        stages.append(disk)
    ram = None
    quota = _ram_bytes(source, options, tiers)
    if quota > 0:
        yielding = not isinstance(tiers.ram_bytes, int)
        top = ram = RamTier(
            top, len(source), len(part_numbers), quota, yielding=yielding, shared=shared
        )
        stages.append(ram)
    return Chain(top, reader, tuple(stages), disk, ram)


def bytes_of(store: Any, indices: NDArray[np.int64]) -> int:
    """Bytes of the samples with these indices, all parts counted."""
    total = 0
    for segment in store.segments:
        local = indices - segment.base
        inside = local[(local >= 0) & (local < segment.directory.samples)]
        if len(inside):
            total += int(segment.directory.extents_of(inside)["length"].sum())
    return total


def _budgeted(options: ReaderOptions, cache: Cache | None) -> ReaderOptions:
    """How the source is read beside a cache, which has half of the budget until it is whole.

    While little is cached, hardly anything is read there: the source has the whole budget. A whole
    cache needs nothing of the source's.
    """
    if cache is None or 2 * cache.cached < len(cache.places):
        return options
    share = _IDLE_BYTES if cache.complete else options.budget_bytes // 2
    return replace(options, budget_bytes=max(_IDLE_BYTES, share))


def _ram_bytes(source: Any, options: ReaderOptions, tiers: TierOptions) -> int:
    if isinstance(tiers.ram_bytes, int):
        return tiers.ram_bytes
    kinds = {v.kind for s in getattr(source, "segments", ()) for v in s.entry.volumes}
    far = not kinds <= set(_LOCAL_KINDS) or bool(getattr(options, "simulate", None))
    # What lies on the local disk already is near, once it is there; memory still saves reading it.
    if tiers.ram_bytes is None and (not far or tiers.cache_dir is not None):
        return 0
    return ram_quota(
        tiers.ram_bytes, far=far, data_bytes=source.nbytes, available_bytes=available_memory()
    )
