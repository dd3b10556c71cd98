"""headrace's engines: whole files by path, samples by their extents, and emulated preprocessing of both.

A batch of whole files reads each file it touches once, whatever the number of its samples. In files of many
samples each is read where it lies: the extents become a sample directory in memory over the data set's own
files, and batches are read through it as a store's are: sorted, coalesced, by io_uring or threads. Samples that
can only be had together, as the rows of a Parquet row group or the slices of an npz, are read once for a batch.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
import time
from collections import deque
from dataclasses import replace
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.bench.dataset_files import AT_REST_S
from headrace.bench.engines.base import Delivered, Engine, batches_ahead
from headrace.bench.formats import format_of
from headrace.config import ReaderOptions
from headrace.errors import BenchError
from headrace.io.batch_reader import BatchReader
from headrace.io.simulation import simulation_of
from headrace.machine.host import available_memory
from headrace.store.directory import DirectoryColumns, write_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.engines.base import EngineContext, Source
    from headrace.bench.schema import TimeDistribution
    from headrace.io.batch_reader import PendingBatch


_READS_IN_FLIGHT_MAX = 1024
_BUFFER_BYTES_LEAST = 64 << 20

_TRIES_AGAIN = 3
"""How often a batch is read again because a file changed while it was read."""


class FilesEngine(Engine):
    """Whole files by path.

    Raises:
        BenchError: batches that are read ahead do not fit into memory.
    """

    name = "headrace"
    ahead = True

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        data, reader = context.workload.dataset, context.workload.reader
        self._ahead = batches_ahead(reader.read_threads, reader.prefetch_size)
        batch = max(plan.batch for plan in context.plans.values())
        held = int(data.nominal_bytes * data.num_samples_per_file * batch * (self._ahead + 1))
        needed = held * context.accelerators
        available = available_memory()
        if needed > available:
            raise BenchError(
                f"{context.accelerators} accelerators x {self._ahead + 1} batches in memory take "
                f"{needed / 1e9:.1f} GB, there are {available / 1e9:.1f} GB.",
                next_step="Lower reader.prefetch_size, reader.read_threads or the accelerators.",
            )
        simulate = context.simulate
        model = getattr(simulate, "model", None) if simulate is not None else None
        if simulate is not None and not isinstance(model, _native.SlowModel):
            model = simulation_of(simulate).model()
        self._reader = _native.FileReader(
            reads_in_flight=min(
                _READS_IN_FLIGHT_MAX, max(1, reader.read_threads) * context.accelerators
            ),
            buffer_bytes=max(_BUFFER_BYTES_LEAST, int(needed * 1.25)),
            cold="direct" if reader.odirect else "fill",
            simulate=model,
            simulated_roots=[] if model is None else [os.path.realpath(data.data_folder)],
        )

    def open(self, split: str, epoch: int, accelerator: int) -> _FilesSource:
        """Begin to read an epoch."""
        return _FilesSource(self._reader, self._context, (split, epoch, accelerator), self._ahead)

    def figures(self) -> dict[str, Any]:
        """The native reader's own figures."""
        stats = self._reader.stats()
        return {
            name: stats[name]
            for name in ("reads", "bytes", "failures", "busy_s", "bytes_by_tier", "latency_us")
        }

    def close(self) -> None:
        """End the threads."""
        self._reader.close()


class _FilesSource:
    def __init__(
        self,
        reader: _native.FileReader,
        context: EngineContext,
        what: tuple[str, int, int],
        ahead: int,
    ) -> None:
        self._reader = reader
        self._context = context
        self._split, self._epoch, self._accelerator = what
        self._plan = context.plans[self._split]
        self._submitted = 0
        self._jobs: deque[tuple[list[bytes], _native.FileJob]] = deque()
        self._ahead = ahead
        self._batch: _native.FileBatch | None = None

    def ask(self) -> bool:
        if len(self._jobs) == self._ahead or self._submitted == self._plan.steps:
            return False
        indices = self._plan.indices(self._epoch, self._accelerator, self._submitted)
        paths = self._context.paths(self._split, indices)
        self._jobs.append((paths, self._reader.submit(paths)))
        self._submitted += 1
        return True

    def poll(self) -> Delivered | None:
        self._batch = None
        while self.ask():
            pass
        return self.next() if self._jobs[0][1].done else None

    def next(self) -> Delivered:
        self._batch = None  # the accelerator is done with it: its buffer is used again
        while self.ask():
            pass
        paths, job = self._jobs.popleft()
        batch = self._wait(paths, job)
        for _ in range(_TRIES_AGAIN):
            if not (batch.errors == errno.ESTALE).any():
                break
            # Such as those that somebody writes beside this run.
            time.sleep(AT_REST_S)
            batch = self._wait(paths, self._reader.submit(paths))
        if batch.errors.any():
            at = int(batch.errors.argmax())
            error, path = int(batch.errors[at]), os.fsdecode(paths[at])
            raise BenchError(
                f"{path} cannot be read: {os.strerror(error)}.",
                path=path,
                next_step="The data set is not whole: generate it again "
                "(++workload.workflow.generate_data=True).",
            )
        self._batch = batch
        # The steady clock is that of time.perf_counter.
        at_s = batch.ready_ns / 1e9 if batch.ready_ns else None
        return Delivered(self._plan.batch, int(batch.lengths.sum()), at_s)

    def _wait(self, paths: list[bytes], job: _native.FileJob) -> _native.FileBatch:
        until = time.monotonic() + self._context.deadline_s
        while (batch := job.wait(min(1.0, max(0.0, until - time.monotonic())))) is None:
            if time.monotonic() >= until:
                raise BenchError(
                    f"a batch of {len(paths)} files, the first of them {os.fsdecode(paths[0])}, was not "
                    f"read within {self._context.deadline_s:g} s."
                )
        return batch

    def close(self) -> None:
        self._batch = None
        for paths, job in self._jobs:
            for number in range(len(paths)):
                job.forget(number)
        self._jobs.clear()


_GROUPS_MAX: Final = 100_000_000
"""Above, the directory of places alone takes gigabytes."""


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


_LOOKS_S = 0.2
"""How often a waiting thread looks whether it is to end."""


class PreprocessingEngine(Engine):
    """Another engine, whose samples are preprocessed.

    Args:
        engine: what reads.
        context: what for.
    """

    ahead = True

    def __init__(self, engine: Engine, context: EngineContext) -> None:
        self.name = engine.name
        self._engine, self._context = engine, context

    def open(self, split: str, epoch: int, accelerator: int) -> _Preprocessed:
        """Begin to read and to preprocess an epoch."""
        reader = self._context.workload.reader
        plan = self._context.plans[split]
        source = self._engine.open(split, epoch, accelerator)
        random = np.random.default_rng((plan.seed, epoch, accelerator, 1))
        workers = max(1, reader.read_threads)
        return _Preprocessed(source, plan.steps, workers, reader.preprocess_time, random)

    def figures(self) -> dict[str, Any]:
        """The engine's own."""
        return self._engine.figures()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class _Preprocessed:
    """One accelerator's batches of one epoch, taken from the source by a thread of their own."""

    def __init__(
        self,
        source: Source,
        steps: int,
        workers: int,
        times: TimeDistribution,
        random: np.random.Generator,
    ) -> None:
        self._source, self._steps, self._workers = source, steps, workers
        self._times, self._random = times, random
        self._done: Queue[tuple[float, Delivered | BaseException]] = Queue(workers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="headrace-preprocess", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        free = [0.0] * self._workers
        """When each worker is free: a heap."""
        try:
            for _ in range(self._steps):
                if self._stop.wait(max(0.0, free[0] - time.perf_counter())):
                    return
                batch = self._source.next()
                ready_s = time.perf_counter() + float(
                    self._times.draw(self._random, batch.samples).sum()
                )
                heapq.heapreplace(free, ready_s)
                if not self._put(ready_s, batch):
                    return
        except BaseException as e:  # noqa: BLE001 - raised where the batch is waited for
            self._put(0.0, e)

    def _put(self, ready_s: float, batch: Delivered | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._done.put((ready_s, batch), timeout=_LOOKS_S)
            except Full:
                continue
            return True
        return False

    def next(self) -> Delivered:
        while True:
            try:
                ready_s, batch = self._done.get(timeout=_LOOKS_S)
                break
            except Empty:
                continue
        if isinstance(batch, BaseException):
            raise batch
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        return replace(batch, at_s=None)  # it is there now, not when it was read

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._source.close()
