"""The engine of a recorded job: reads as the job did, with the same calls, as many at a time, with its pauses.

Each of its workers has a batch to itself, and the next when that one was taken, two at most: it opens the file
where the job did, reads the sample, works on it as long as the job did (by waiting), and reads the next one.
Without workers this happens while training waits for a batch. What is read is thrown away.
"""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.bench.engines import Delivered, Engine, batches_ahead
from headrace.errors import BenchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.engines import EngineContext


_PIECE_BYTES: Final = 8 << 20
"""Of one call, at most."""


class ReplayEngine(Engine):
    """Reads the recorded requests of a job whose plan has them."""

    name = "headrace"
    ahead = False

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._reads = self._bytes = 0

    def open(self, split: str, epoch: int, accelerator: int) -> _ReplaySource:
        """Begin an epoch for an accelerator."""
        return _ReplaySource(self, self._context, split, epoch, accelerator)

    def count(self, reads: int, nbytes: int) -> None:
        """Add what was read."""
        with self._lock:
            self._reads += reads
            self._bytes += nbytes

    def figures(self) -> dict[str, Any]:
        """What was read so far."""
        return {"reads": self._reads, "bytes": self._bytes}


class _ReplaySource:
    """One accelerator's epoch."""

    def __init__(
        self, engine: ReplayEngine, context: EngineContext, split: str, epoch: int, accelerator: int
    ) -> None:  # fmt: skip
        plan, reader = context.plans[split], context.workload.reader
        assert plan.recorded is not None
        self._engine, self._files = engine, context.files[split]
        self._plan, self._order, self._times = plan, plan.recorded, reader.preprocess_time
        self._epoch, self._accelerator, self._step = epoch, accelerator, 0
        self._kept: dict[tuple[int, str], int] = {}
        """Files that the job kept open, of each thread."""
        self._stop = threading.Event()
        workers = reader.read_threads
        ahead = batches_ahead(workers, reader.prefetch_size) // max(1, workers)
        self._permits = [threading.Semaphore(ahead) for _ in range(workers)]
        self._done: list[SimpleQueue[Delivered | BaseException]] = [
            SimpleQueue() for _ in range(workers)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(k,), name=f"headrace-worker-{k}", daemon=True)
            for k in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Delivered:
        step, self._step = self._step, self._step + 1
        if not self._threads:
            return self._read(step)
        worker = step % len(self._threads)
        batch = self._done[worker].get()
        self._permits[worker].release()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def close(self) -> None:
        self._stop.set()
        for permit, thread in zip(self._permits, self._threads, strict=True):
            permit.release()
            thread.join(5.0)
        if not any(thread.is_alive() for thread in self._threads):
            for fd in self._kept.values():
                os.close(fd)
            self._kept.clear()

    def _work(self, worker: int) -> None:
        for step in range(worker, self._plan.steps, len(self._threads)):
            self._permits[worker].acquire()
            if self._stop.is_set():
                return
            try:
                self._done[worker].put(self._read(step))
            except BaseException as e:  # noqa: BLE001 - raised where the batch is waited for
                self._done[worker].put(e)
                return

    def _read(self, step: int) -> Delivered:
        order, plan = self._order, self._plan
        first = (step * plan.accelerators + self._accelerator) * plan.batch
        reads = order.at(self._epoch, first, first + plan.batch)
        opens = order.opens[reads] if len(order.opens) else np.ones(len(reads), bool)
        extents = order.extents[:, order.places[reads]].T
        total, late_s = 0, 0.0
        for (file, offset, nbytes), opened, seconds in zip(
            extents.tolist(), opens.tolist(), self._work_s(step, reads).tolist(), strict=True
        ):
            if self._stop.is_set():
                break
            self._sample(self._files[file], offset, nbytes, opened=opened)
            total += nbytes
            # A wait ends late: the next one is shorter.
            due_s = time.perf_counter() + seconds - late_s
            if (pause_s := due_s - time.perf_counter()) > 0:
                self._stop.wait(pause_s)
            late_s = max(0.0, time.perf_counter() - due_s)
        self._engine.count(len(reads), total)
        return Delivered(plan.batch, total)

    def _work_s(self, step: int, reads: NDArray[np.int64]) -> NDArray[np.float64]:
        """What is done after each read."""
        if len(self._order.work_s):
            return self._order.work_s[reads]
        seed = self._plan.seed, self._epoch, self._accelerator, step
        return self._times.draw(np.random.default_rng(seed), len(reads))

    def _sample(self, path: str, offset: int, nbytes: int, *, opened: bool) -> None:
        key = threading.get_ident(), path
        try:
            fd = -1 if opened else self._kept.get(key, -1)
            if fd < 0:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if not opened:
                    self._kept[key] = fd
            try:
                end, buffer = offset + nbytes, bytearray(min(nbytes, _PIECE_BYTES))
                while count := os.preadv(fd, [memoryview(buffer)[: end - offset]], offset):
                    offset += count
            finally:
                if opened:
                    os.close(fd)
        except OSError as e:
            raise self._wrong(path, f"cannot be read: {e.strerror}") from e
        if offset < end:
            raise self._wrong(path, f"ends at {offset:,}, expected {end:,} bytes at least")

    @staticmethod
    def _wrong(path: str, what: str) -> BenchError:
        step = (
            "The data set is not whole: generate it again (++workload.workflow.generate_data=True)."
        )
        return BenchError(f"{path} {what}.", path=path, next_step=step)
