"""BatchReader: hands indices to the native reader and takes whole batches back.

Owns the native reader, whose threads belong to the process that made it. A forked child must make
its own: whoever holds a BatchReader asks `usable` first.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.errors import VolumeTimeout
from headrace.io.simulation import simulation_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace.config import ReaderOptions

# How often a wait looks for Ctrl-C.
_SIGNAL_CHECK_S = 0.2

# Native readers inherited over a fork. Their threads do not exist in the child and their locks may be
# held for ever, so they must not be destroyed either.
_inherited: list[Any] = []


class PendingBatch:
    """A batch that is being read."""

    def __init__(self, job: _native.Job, samples: int, deadline_s: float) -> None:
        self._job = job
        self._samples = samples
        self._deadline_s = deadline_s

    @property
    def done(self) -> bool:
        """Whether `take` would return at once."""
        return self._job.done

    @property
    def waits_for(self) -> str:
        """What it waits for now, for messages."""
        return self._job.waiting_for()

    def take(self) -> _native.Batch:
        """Wait for the batch.

        Raises:
            VolumeTimeout: the deadline passed; names what the batch waits for.
            CorruptStore: the directory contradicts itself or its volumes.
            VolumeError: a volume cannot be opened.
        """
        started = time.monotonic()
        while True:
            left = self._deadline_s - (time.monotonic() - started)
            batch = self._job.wait(min(_SIGNAL_CHECK_S, left))
            if batch is not None:
                return batch
            if left <= 0:
                raise VolumeTimeout(
                    f"a batch of {self._samples} samples was not read within "
                    f"{self._deadline_s:g} s: it waits for {self.waits_for}.",
                    next_step="Look at the storage, or give a larger deadline_s.",
                )


class BatchReader:
    """Reads batches of samples ahead of their consumer.

    Args:
        catalog: the store's directories and volumes.
        parts: numbers of the parts to read (`Catalog.part_names`), in this order.
        options: how to read.
        shared: read into memory that other processes may map (`Batch.shared`).
        done_fd: an eventfd that is rung whenever a batch is done, for who waits for many; -1: none.
    """

    def __init__(
        self,
        catalog: _native.Catalog,
        parts: Sequence[int],
        options: ReaderOptions,
        *,
        shared: bool = False,
        done_fd: int = -1,
    ) -> None:
        self._pid = os.getpid()
        self._deadline_s = options.deadline_s
        self._reader = _native.Reader(
            catalog,
            parts=list(parts),
            engine=options.engine,
            direct=options.direct,
            queue_depth=options.queue_depth,
            threads=options.threads,
            workers=options.workers,
            reads_in_flight=options.reads_in_flight or 0,
            budget_bytes=options.budget_bytes,
            verify=options.verify,
            deadline_s=options.deadline_s,
            simulate=_model_of(options.simulate),
            shared=shared,
            done_fd=done_fd,
        )

    @property
    def usable(self) -> bool:
        """False in a forked child of the process that made the reader."""
        return os.getpid() == self._pid

    @property
    def engine(self) -> tuple[str, str]:
        """The engine for bytes that are not resident, and why it is not io_uring (or '')."""
        return self._reader.engine_name, self._reader.engine_reason

    @property
    def mapped_bytes(self) -> int:
        """Memory that batch buffers take, those of delivered batches included."""
        return self._reader.mapped_bytes

    ahead_bytes = 0  # as the knobs say
    attached = False  # to a node daemon

    def submit(
        self,
        indices: NDArray[np.int64],
        ranges: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None,
    ) -> PendingBatch:
        """Queue one batch; returns at once.

        Args:
            indices: int64, shape (samples,).
            ranges: starts and sizes in bytes, each (samples,): what is read of each sample's part, the only
                one of this reader. What is not read whole is not compared with its checksum.

        Raises:
            SampleNotFound: an index lies outside the store.
        """
        job = self._reader.submit(indices, *(ranges or ()))
        return PendingBatch(job, len(indices), self._deadline_s)

    @property
    def batches_ahead(self) -> int:
        """How many batches should be submitted ahead so that no worker runs dry."""
        return self._reader.batches_ahead

    def turn(self, *, reads_in_flight: int | None = None, buffer_bytes: int | None = None) -> None:
        """Set the knobs that are given, while batches are read. Thread-safe.

        A smaller value takes effect as reads and batches finish; nothing is thrown away.

        Args:
            reads_in_flight: reads in flight of all workers together.
            buffer_bytes: memory for batches that are being read or wait to be taken.

        Raises:
            ValueError: `reads_in_flight` is not positive.
        """
        self._reader.turn(reads_in_flight, buffer_bytes)

    def stats(self) -> dict[str, Any]:
        """What the reader did since it was made, and what it holds now. Cheap; thread-safe.

        Returns:
            Seconds summed over workers: `busy_s`, `wait_input_s` (no batch is submitted),
            `wait_output_s` (no memory within the budget); `consumer_wait_s`. Requests to the device:
            `reads`, `read_bytes`, `in_flight` (now), `in_flight_most`, `in_flight_s` (integral over
            time), `latency_us` (64 counts; bucket i holds [2^(i/2), 2^((i+1)/2)) microseconds).
            `delivered_samples`, `delivered_bytes`; now `buffered_bytes` (being read, or ready) and
            `ready_bytes`. Bytes by tier: `bytes_by_tier` of `page_cache` and `source`. The knobs
            `reads_in_flight` and `buffer_bytes`, and `workers` that may work now.
        """
        stats = self._reader.stats()
        stats["bytes_by_tier"] = {
            "page_cache": stats.pop("page_cache_bytes"),
            "source": stats.pop("source_bytes"),
        }
        return stats

    def gather(self, pieces: list[tuple[_native.Batch, int, int]]) -> _native.Batch:
        """Copy samples start to stop - 1 of each (batch, start, stop) into one new batch."""
        return self._reader.gather(pieces)

    def close(self) -> None:
        """End the reader's threads. Batches that were taken stay valid."""
        if self.usable:
            self._reader.close()

    def __del__(self) -> None:
        if not self.usable:
            _inherited.append(self._reader)


def _model_of(given: Any) -> _native.SlowModel | None:
    """The storage that is simulated: a new one, or that of a SlowVolume, which others use too."""
    if given is None:
        return None
    model = getattr(given, "model", None)
    return model if isinstance(model, _native.SlowModel) else simulation_of(given).model()
