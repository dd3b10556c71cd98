"""headrace's engine for files of many samples: reads each sample where it lies, at random.

The places of all samples become a sample directory in memory, over the data set's own files, and batches are
read through it as a store's are: sorted, coalesced, by io_uring or threads. Samples that can only be had
together, as the rows of a Parquet row group or the slices of an npz, are read once for a batch.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.bench.emulate.engines.base import Delivered, Engine, batches_ahead
from headrace.bench.formats import format_of
from headrace.config import ReaderOptions
from headrace.errors import BenchError
from headrace.io.batch_reader import BatchReader
from headrace.store.directory import DirectoryColumns, write_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.emulate.engines.base import EngineContext
    from headrace.io.batch_reader import PendingBatch

__all__ = ["ExtentsEngine"]

_GROUPS_MAX: Final = 100_000_000
"""Above, the directory of places alone takes gigabytes."""

_BUFFER_BYTES_LEAST: Final = 64 << 20


class _Places:
    """Where the samples of a split lie, and what reads them."""

    def __init__(self, context: EngineContext, split: str, options: ReaderOptions) -> None:
        self._paths = context.files[split]
        columns, self.group_of = self._columns(context)
        fd = os.memfd_create("headrace-bench", os.MFD_CLOEXEC)
        try:
            write_directory(columns, fd)
            directory = _native.Directory.from_fd(fd, f"the places of {split} samples")
        finally:
            os.close(fd)
        volumes = [("file", os.fsencode(path), os.stat(path).st_size, -1) for path in self._paths]
        self._catalog = _native.Catalog([(directory, volumes)])
        parts = range(len(self._catalog.part_names))
        self.reader = BatchReader(self._catalog, parts, options)

    def failure(self, batch: _native.Batch) -> BenchError:
        """What went wrong with a batch."""
        first = self._catalog.failures(batch)[0]
        path = self._paths[int(first.get("volume", 0))] if "volume" in first else ""
        told = {key: value for key, value in first.items() if value not in (None, "")}
        return BenchError(
            f"a sample{' of ' + path if path else ''} cannot be read: {told}.",
            path=path or None,
            next_step="The data set is not whole: generate it again.",
        )

    def _columns(self, context: EngineContext) -> tuple[DirectoryColumns, NDArray[np.int64]]:
        """The directory of groups, and each sample's group."""
        module, data = format_of(context.workload.dataset), context.workload.dataset
        groups, volume, offset, length, counts = [], [], [], [], []
        total = 0
        for number, path in enumerate(self._paths):
            found = module.sample_extents(path, data)
            groups.append(found.group + total)
            sizes = np.diff(found.first)
            total += len(sizes)
            if total > _GROUPS_MAX:
                raise BenchError(
                    f"the data set has more than {_GROUPS_MAX:,} samples, too many for the engine "
                    "headrace.",
                    next_step="Use fewer files.",
                )
            counts.append(sizes)
            volume.append(np.full(len(found.offset), number, np.uint32))
            offset.append(found.offset)
            length.append(found.length)
        firsts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        extents = int(firsts[-1])
        parts = np.arange(extents) - np.repeat(firsts[:-1], np.diff(firsts))
        names = np.char.mod("%010d", np.arange(total)).astype("S10")
        most = int(parts.max(initial=0)) + 1
        columns = DirectoryColumns(
            names=names.view(np.uint8).reshape(-1),
            name_offsets=np.arange(total + 1, dtype=np.uint64) * 10,
            volume=np.concatenate(volume), offset=np.concatenate(offset).astype(np.uint64),
            length=np.concatenate(length).astype(np.uint64),
            first_extent=None if most == 1 else firsts.astype(np.uint64),
            part=None if most == 1 else parts.astype(np.uint32),
            part_names=tuple(b"%d" % i for i in range(most)) if most > 1 else (b"",),
        )  # fmt: skip
        return columns, np.concatenate(groups)


class ExtentsEngine(Engine):
    """Samples by their places.

    Raises:
        BenchError: the places are too many.
        SourceError: a file is not of its format.
    """

    name = "headrace"
    ahead = True

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        reader, data = context.workload.reader, context.workload.dataset
        self._ahead = batches_ahead(reader.read_threads, reader.prefetch_size)
        batch = max(plan.batch for plan in context.plans.values())
        held = int(data.nominal_bytes * batch * (self._ahead + 1)) * context.accelerators
        options = ReaderOptions(
            direct="always" if reader.odirect else "auto",
            reads_in_flight=max(1, reader.read_threads) * context.accelerators,
            budget_bytes=max(_BUFFER_BYTES_LEAST, int(held * 1.25)),
            verify=False,  # foreign files have no checksums of ours
            deadline_s=context.deadline_s,
            simulate=context.simulate,
        )
        self._places = {split: _Places(context, split, options) for split in context.plans}

    def open(self, split: str, epoch: int, accelerator: int) -> _ExtentsSource:
        """Begin to read an epoch."""
        places = self._places[split]
        return _ExtentsSource(places, self._context, (split, epoch, accelerator), self._ahead)

    def figures(self) -> dict[str, Any]:
        """The native readers' own figures, by split."""
        return {
            split: {
                name: value
                for name, value in places.reader.stats().items()
                if name in ("reads", "read_bytes", "busy_s", "bytes_by_tier", "latency_us")
            }
            | {"engine": places.reader.engine[0]}
            for split, places in self._places.items()
        }

    def close(self) -> None:
        """End the threads."""
        for places in self._places.values():
            places.reader.close()


class _ExtentsSource:
    def __init__(
        self, places: _Places, context: EngineContext, what: tuple[str, int, int], ahead: int
    ) -> None:
        self._places = places
        split, self._epoch, self._accelerator = what
        self._plan = context.plans[split]
        self._ahead = ahead
        self._submitted = 0
        self._pending: deque[PendingBatch] = deque()
        self._batch: _native.Batch | None = None

    def ask(self) -> bool:
        if len(self._pending) == self._ahead or self._submitted == self._plan.steps:
            return False
        indices = self._plan.indices(self._epoch, self._accelerator, self._submitted)
        groups = np.unique(self._places.group_of[indices])
        self._pending.append(self._places.reader.submit(groups))
        self._submitted += 1
        return True

    def poll(self) -> Delivered | None:
        self._batch = None
        while self.ask():
            pass
        return self.next() if self._pending[0].done else None

    def next(self) -> Delivered:
        self._batch = None  # the accelerator is done with it: its buffer is used again
        while self.ask():
            pass
        batch = self._pending.popleft().take()
        if batch.failed:
            raise self._places.failure(batch)
        self._batch = batch
        # The steady clock is that of time.perf_counter.
        return Delivered(self._plan.batch, int(batch.lengths.sum()), batch.ready_ns / 1e9)

    def close(self) -> None:
        self._batch = None
        self._pending.clear()
