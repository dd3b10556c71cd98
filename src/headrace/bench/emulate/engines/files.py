"""headrace's engine: native threads read whole files into recycled buffers, batch by batch.

A batch reads each file it touches once, whatever the number of its samples. One reader serves all
accelerators of the process; `read_threads` reads are in flight for each of them, in order of their batches.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.bench.dataset_files import AT_REST_S
from headrace.bench.emulate.engines.base import Delivered, Engine, batches_ahead
from headrace.errors import BenchError
from headrace.io.simulation import simulation_of
from headrace.machine.host import available_memory

if TYPE_CHECKING:
    from headrace.bench.emulate.engines.base import EngineContext

__all__ = ["FilesEngine"]

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
