"""headrace's engines: whole files by path, samples by their extents, or objects, perhaps with preprocessing.

A batch of whole files reads each file it touches once, whatever the number of its samples. In files of many
samples each is read where it lies: the extents become a sample directory in memory over the data set's own
files, and batches are read through it as a store's are: sorted, coalesced, by io_uring or threads. Samples that
can only be had together, as the rows of a Parquet row group or the slices of an npz, are read once for a batch.

Objects are read as a whole, large ones in ranges side by side: a sample of npy or npz can only be had so.

One reader serves all accelerators of the process; `read_threads` reads are in flight for each of them.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace import _native
from headrace.bench.dataset import replay_of
from headrace.bench.dataset_files import AT_REST_S
from headrace.bench.engines import Delivered, Engine, batches_ahead
from headrace.bench.engines.replay import ReplayEngine
from headrace.bench.formats import SampleExtents, format_of
from headrace.bench.objects import RANGE_BYTES, ObjectFolder
from headrace.config import ReaderOptions
from headrace.errors import BenchError
from headrace.io.batch_reader import BatchReader
from headrace.io.objects.faults import Failure
from headrace.io.simulation import simulation_of
from headrace.machine.host import available_memory
from headrace.store.segment import catalog_of_files

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from headrace.bench.engines import BatchSource, EngineContext
    from headrace.bench.values import TimeDistribution
    from headrace.io.objects.engine import ObjectEngine

_READS_IN_FLIGHT_MAX: Final = 1024
_MEMORY_BYTES_LEAST: Final = 64 << 20

_TRIES_AGAIN: Final = 3
"""How often a batch is read again because a file changed while it was read."""

_GROUPS_MAX: Final = 100_000_000
"""Above, the directory of extents alone takes gigabytes."""


def native_engine(context: EngineContext) -> Engine:
    """Whole files by path, or samples by their extents where files hold many.

    Raises:
        BenchError: batches that are read ahead do not fit into memory, or the samples are too many.
        SourceError: a file is not of its format.
    """
    if context.workload.storage.is_objects:
        return _ObjectsEngine(context)
    data = context.workload.dataset
    whole = data.num_samples_per_file == 1
    if data.requests is not None:
        recorded = replay_of(data.requests).recorded
        whole = recorded.is_whole_files
        if not (recorded.traced or context.simulate or context.workload.reader.odirect):
            return ReplayEngine(context)  # headrace's own loader reads as the engines here do
    return _FilesEngine(context) if whole else _ExtentsEngine(context)


class _NativeEngine(Engine):
    """Batches that are submitted to a native reader some steps ahead."""

    name = "headrace"
    ahead = True

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        reader, data = context.workload.reader, context.workload.dataset
        self.batches_ahead = batches_ahead(reader.read_threads, reader.prefetch_size)
        self.reads_in_flight = max(1, reader.read_threads) * context.accelerators
        batch = max(plan.batch for plan in context.plans.values()) * (self.batches_ahead + 1)
        self.sample_memory_bytes = int(data.nominal_bytes * batch) * context.accelerators

    def whole_files_bytes(self) -> int:
        """Memory of batches of whole files. Raises BenchError if there is not so much."""
        needed = self.sample_memory_bytes * self.context.workload.dataset.num_samples_per_file
        if needed > (available := available_memory()):
            raise BenchError(
                f"{self.context.accelerators} accelerators x {self.batches_ahead + 1} batches in memory "
                f"take {needed / 1e9:.1f} GB, there are {available / 1e9:.1f} GB.",
                next_step="Lower reader.prefetch_size, reader.read_threads or the accelerators.",
            )
        return needed

    def open(self, split: str, epoch: int, accelerator: int) -> BatchSource:
        source = _ReadAheadSource(self, split, epoch, accelerator)
        reader, plan = self.context.workload.reader, self.context.plans[split]
        if not reader.preprocess_time.mean_s:
            return source
        random = np.random.default_rng((plan.seed, epoch, accelerator, 1))
        workers = max(1, reader.read_threads)
        return _Preprocessed(source, plan.steps, workers, reader.preprocess_time, random)

    @abstractmethod
    def submit(
        self, split: str, indices: NDArray[np.int64], accelerator: int
    ) -> tuple[Any, list[bytes]]:
        """Begin to read a batch: its job, and the files that it reads where the reader goes by path."""

    @abstractmethod
    def take(self, split: str, job: Any, paths: list[bytes], accelerator: int) -> tuple[Any, int]:
        """Wait for a batch: it holds its memory as long as it lives; and when it was there, in ns, or 0."""

    def forget(self, job: Any, paths: list[bytes]) -> None:
        """Nobody will take a batch."""


class _ReadAheadSource:
    """One accelerator's epoch."""

    def __init__(self, engine: _NativeEngine, split: str, epoch: int, accelerator: int) -> None:
        self._engine, self._split = engine, split
        self._epoch, self._accelerator = epoch, accelerator
        self._plan = engine.context.plans[split]
        self._submitted = 0
        self._pending: deque[tuple[Any, list[bytes]]] = deque()
        self._batch: Any = None

    def ask(self) -> bool:
        if len(self._pending) == self._engine.batches_ahead or self._submitted == self._plan.steps:
            return False
        indices = self._plan.indices(self._epoch, self._accelerator, self._submitted)
        self._pending.append(self._engine.submit(self._split, indices, self._accelerator))
        self._submitted += 1
        return True

    def _fill(self) -> None:
        self._batch = None  # the accelerator is done with it: its buffer is used again
        while self.ask():
            pass

    def poll(self) -> Delivered | None:
        self._fill()
        return self.next() if self._pending[0][0].done else None

    def next(self) -> Delivered:
        self._fill()
        job, paths = self._pending.popleft()
        self._batch, ready_ns = self._engine.take(self._split, job, paths, self._accelerator)
        nbytes = int(self._batch.lengths.sum())
        # The steady clock is that of time.perf_counter.
        return Delivered(self._plan.batch, nbytes, ready_ns / 1e9 if ready_ns else None)

    def close(self) -> None:
        self._batch = None
        for job, paths in self._pending:
            self._engine.forget(job, paths)
        self._pending.clear()


class _FilesEngine(_NativeEngine):
    """Whole files by path.

    A reader for each accelerator: one reader gives memory in the order of submission, so that a file that opens
    slowly would hold up the batches of all others, as no rank holds up another's.
    """

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        needed = self.whole_files_bytes()
        simulate = context.simulate
        model = getattr(simulate, "model", None)
        if simulate is not None and not isinstance(model, _native.SlowModel):
            model = simulation_of(simulate).model()
        count = context.accelerators
        folder = os.path.realpath(context.workload.dataset.data_folder)
        self._readers = [
            _native.FileReader(
                reads_in_flight=min(_READS_IN_FLIGHT_MAX, self.reads_in_flight // count),
                buffer_bytes=max(_MEMORY_BYTES_LEAST, int(needed * 1.25) // count), simulate=model,
                cold="direct" if context.workload.reader.odirect else "fill",
                simulated_roots=[] if model is None else [folder],
            )
            for _ in range(count)
        ]  # fmt: skip

    def _reader_of(self, accelerator: int) -> _native.FileReader:
        return self._readers[accelerator % len(self._readers)]

    def submit(
        self, split: str, indices: NDArray[np.int64], accelerator: int
    ) -> tuple[Any, list[bytes]]:
        paths = self.context.paths(split, indices)
        return self._reader_of(accelerator).submit(paths), paths

    def take(self, split: str, job: Any, paths: list[bytes], accelerator: int) -> tuple[Any, int]:  # noqa: ARG002
        """Wait for a batch; one whose files changed meanwhile is read again."""
        batch = self._wait(paths, job)
        for _ in range(_TRIES_AGAIN):
            if not (batch.errors == errno.ESTALE).any():
                break
            # Such as those that somebody writes beside this run.
            time.sleep(AT_REST_S)
            batch = self._wait(paths, self._reader_of(accelerator).submit(paths))
        if batch.errors.any():
            at = int(batch.errors.argmax())
            error, path = int(batch.errors[at]), os.fsdecode(paths[at])
            step = "generate it again (++workload.workflow.generate_data=True)"
            raise BenchError(
                f"{path} cannot be read: {os.strerror(error)}.", path=path,
                next_step=f"The data set is not whole: {step}.",
            )  # fmt: skip
        return batch, batch.ready_ns

    def _wait(self, paths: list[bytes], job: _native.FileJob) -> _native.FileBatch:
        until = time.monotonic() + self.context.deadline_s
        while (batch := job.wait(min(1.0, max(0.0, until - time.monotonic())))) is None:
            if time.monotonic() >= until:
                files = f"{len(paths)} files, the first of them {os.fsdecode(paths[0])}"
                limit = f"{self.context.deadline_s:g} s"
                raise BenchError(f"a batch of {files}, was not read within {limit}.")
        return batch

    def forget(self, job: _native.FileJob, paths: list[bytes]) -> None:
        """Reads that have not begun are left out."""
        for number in range(len(paths)):
            job.forget(number)

    def figures(self) -> dict[str, Any]:
        """Of all accelerators' readers together."""
        each = [reader.stats() for reader in self._readers]
        names = ("reads", "bytes", "failures", "busy_s")
        figures = {name: sum(stats[name] for stats in each) for name in names}
        tiers = each[0]["bytes_by_tier"]
        figures["bytes_by_tier"] = {t: sum(s["bytes_by_tier"][t] for s in each) for t in tiers}
        figures["latency_us"] = tuple(map(sum, zip(*(s["latency_us"] for s in each), strict=True)))
        return figures

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class _ObjectsJob:
    """A batch of objects that are read; as its own batch, too, it holds their memory."""

    def __init__(self, engine: ObjectEngine, sizes: dict[str, int]) -> None:
        self.lengths = np.array(list(sizes.values()), np.int64)
        self.ready_ns = 0
        self._memory = [np.empty(size, np.uint8) for size in sizes.values()]
        self._running = engine.start([
            (url, at, memory.data[at : at + RANGE_BYTES])
            for url, memory in zip(sizes, self._memory, strict=True)
            for at in range(0, len(memory), RANGE_BYTES)
        ])  # fmt: skip
        for each in self._running:
            each.add_done_callback(self._note)

    def _note(self, _: Future[Any]) -> None:
        self.ready_ns = time.perf_counter_ns()

    @property
    def done(self) -> bool:
        return all(each.done() for each in self._running)

    def failure(self, deadline_s: float) -> Failure | None:
        """Wait, and say what could not be read. Raises TimeoutError."""
        until = time.monotonic() + deadline_s
        results = [each.result(max(0.0, until - time.monotonic())) for each in self._running]
        return next((each for each in results if isinstance(each, Failure)), None)


class _ObjectsEngine(_NativeEngine):
    """Whole objects, which have to be those that were listed."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.whole_files_bytes()
        self._folder = ObjectFolder(context.workload.storage)
        self._reader = self._folder.engine
        objects = self._folder.objects(context.workload.dataset.data_folder)
        self._reader.register(objects)
        self._reader.turn(min(_READS_IN_FLIGHT_MAX, self.reads_in_flight))
        self._sizes = {each.url: each.size for each in objects}

    def submit(
        self, split: str, indices: NDArray[np.int64], accelerator: int  # noqa: ARG002
    ) -> tuple[Any, list[bytes]]:  # fmt: skip
        paths = self.context.paths(split, indices)
        urls = [os.fsdecode(path) for path in paths]
        return _ObjectsJob(self._reader, {url: self._sizes[url] for url in urls}), paths

    def take(
        self, split: str, job: _ObjectsJob, paths: list[bytes], accelerator: int  # noqa: ARG002
    ) -> tuple[Any, int]:  # fmt: skip
        try:
            failure = job.failure(limit := self.context.deadline_s)
        except TimeoutError as e:
            batch = f"a batch of {len(paths)} objects, the first of them {os.fsdecode(paths[0])}"
            raise BenchError(
                f"{self._folder.endpoint}: {batch}, was not read within {limit:g} s."
            ) from e
        if failure is None:
            return job, job.ready_ns
        error = self._folder.refused(failure.to_error(), failure.url)
        raise BenchError(error.message, path=failure.url, next_step=error.next_step) from error

    def figures(self) -> dict[str, Any]:
        stats = self._reader.stats()
        names = ("reads", "bytes", "failures", "requests", "retries", "latency_us")
        figures = {name: getattr(stats, name) for name in names}
        return figures | {"endpoint": self._folder.endpoint, "bucket": self._folder.bucket}

    def close(self) -> None:
        self._folder.close()


class _ExtentsEngine(_NativeEngine):
    """Samples by their extents."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._options = ReaderOptions(
            direct="always" if context.workload.reader.odirect else "auto",
            reads_in_flight=self.reads_in_flight, deadline_s=context.deadline_s,
            budget_bytes=max(_MEMORY_BYTES_LEAST, int(self.sample_memory_bytes * 1.25)),
            verify=False,  # foreign files have no checksums of ours
            simulate=context.simulate,
        )  # fmt: skip
        self._readers = {split: self._open(split) for split in context.plans}

    def _open(self, split: str) -> tuple[BatchReader, _native.Catalog, NDArray[np.int64]]:
        """A split's reader, and each sample's group: what can only be had together is one."""
        data, paths = self.context.workload.dataset, self.context.files[split]
        each, groups, total = list[SampleExtents](), [], 0
        for path in paths:
            each.append(format_of(data).sample_extents(path, data))
            groups.append(each[-1].group + total)
            total += len(each[-1].first) - 1
            if total > _GROUPS_MAX:
                raise BenchError(
                    f"the data set has more than {_GROUPS_MAX:,} samples, too many for the engine "
                    "headrace.",
                    next_step="Use fewer files.",
                )
        offset, length = (
            np.concatenate([getattr(e, n) for e in each]) for n in ("offset", "length")
        )
        catalog = catalog_of_files(
            paths, np.repeat(np.arange(len(each)), [len(e.offset) for e in each]), offset, length,
            "the extents of a benchmark's samples",
            first=np.cumsum(np.concatenate([[0], *(np.diff(e.first) for e in each)])),
        )  # fmt: skip
        reader = BatchReader(catalog, range(len(catalog.part_names)), self._options)
        return reader, catalog, np.concatenate(groups)

    def submit(
        self, split: str, indices: NDArray[np.int64], accelerator: int  # noqa: ARG002
    ) -> tuple[Any, list[bytes]]:  # fmt: skip
        """Begin to read the groups of samples, each once."""
        reader, _, group_of = self._readers[split]
        return reader.submit(np.unique(group_of[indices])), []

    def take(
        self, split: str, job: Any, paths: list[bytes], accelerator: int  # noqa: ARG002
    ) -> tuple[Any, int]:  # fmt: skip
        batch = job.take()
        if not batch.failed:
            return batch, batch.ready_ns
        failure = self._readers[split][1].failures(batch)[0]
        path = self.context.files[split][int(failure["volume"])] if "volume" in failure else ""
        known = {key: value for key, value in failure.items() if value not in (None, "")}
        raise BenchError(
            f"a sample{' of ' + path if path else ''} cannot be read: {known}.",
            path=path or None,
            next_step="The data set is not whole: generate it again.",
        )

    def figures(self) -> dict[str, Any]:
        names, figures = ("reads", "read_bytes", "busy_s", "bytes_by_tier", "latency_us"), {}
        for split, (reader, _, _) in self._readers.items():
            stats = reader.stats() | {"engine": reader.engine[0]}
            figures[split] = {name: stats[name] for name in (*names, "engine") if name in stats}
        return figures

    def close(self) -> None:
        for reader, _, _ in self._readers.values():
            reader.close()


class _Preprocessed:
    """One accelerator's batches of one epoch, whose samples are preprocessed between reading and training.

    As a framework's loader does it: each of `read_threads` workers takes a batch when it is free, works on its
    samples one after the other, and batches are handed on in order. The work is waiting, as in DLIO; one thread
    takes the batches from the source.
    """

    def __init__(
        self, source: BatchSource, steps: int, workers: int, times: TimeDistribution,
        random: np.random.Generator,
    ) -> None:  # fmt: skip
        self._source, self._steps, self._workers = source, steps, workers
        self._times, self._random = times, random
        self._done: SimpleQueue[tuple[float, Delivered | BaseException]] = SimpleQueue()
        self._permits, self._stop = threading.Semaphore(workers), threading.Event()
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
                seconds = float(self._times.draw(self._random, batch.samples).sum())
                ready_s = time.perf_counter() + seconds
                heapq.heapreplace(free, ready_s)
                self._permits.acquire()  # before it is handed on: no more lie there than workers
                self._done.put((ready_s, batch))
        except BaseException as e:  # noqa: BLE001 - raised where the batch is waited for
            self._done.put((0.0, e))

    def next(self) -> Delivered:
        ready_s, batch = self._done.get()  # the thread ends with an error or the last batch
        self._permits.release()
        if isinstance(batch, BaseException):
            raise batch
        time.sleep(max(0.0, ready_s - time.perf_counter()))
        return replace(batch, at_s=None)  # it is there now, not when it was read

    def close(self) -> None:
        self._stop.set()
        self._permits.release()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._source.close()
