"""Threads: decodes coming batches in a pool of threads, and delivers them in order.

For decoders that let go of the GIL (PIL, most native ones) this beats worker processes: nothing is
pickled, nothing is copied between processes, and one process holds the memory.

The consumer's own thread reads and submits, so there is no feeder to shut down. A batch is cut into
pieces, which the pool decodes in any order; whoever finishes the last piece collates. At most
`batches_ahead` batches are decoded or wait at a time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils.pin_memory import pin_memory as pinned

from headrace.frameworks.torch.delivery import Collate, Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from headrace.frameworks.torch.decode import Decoded, Decoder
    from headrace.plane import Loader
    from headrace.plane.batch_trace import Interruption
    from headrace.plane.cursor import Pass
    from headrace.plane.pipeline import Fetched

__all__ = ["ThreadOptions", "ThreadedDecoding"]

PIECES_PER_THREAD = 4
"""A batch is cut into this many pieces per thread: samples differ in cost, and the last piece of a
batch should not keep the others waiting."""

SUBMITS_PER_BATCH = 2
"""Batches submitted for each that is delivered while the look-ahead grows. One would never grow it;
filling it at once would delay the first batch by the reading of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadOptions:
    """How batches are decoded in threads."""

    threads: int
    """0 decodes in the consumer's thread, when a batch is asked for."""

    batches_ahead: int
    """Batches that are decoded or wait to be taken."""

    pin_memory: bool
    """Copy each batch into page-locked memory."""

    def __post_init__(self) -> None:
        for name, low in (("threads", 0), ("batches_ahead", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {low}")


class ThreadedDecoding:
    """Decodes batches ahead.

    Args:
        loader: gives order and reader.
        decoder: decodes samples.
        collate: puts them together.
        options: threads, look-ahead and memory.
    """

    def __init__(
        self,
        loader: Loader,
        decoder: Decoder,
        collate: Collate,
        options: ThreadOptions,
    ) -> None:
        self._loader = loader
        self._decoder = decoder
        self._collate = collate
        self._threads = options.threads
        self._batches_ahead = options.batches_ahead if options.threads else 1
        self._pin_memory = options.pin_memory
        self._ended: list[Executor] = []

    def deliveries(self, this: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order."""
        self.close()
        fetched = self._loader.reader.stream(self._loader.order, this.epoch, this.spans())
        # A pool per pass: its threads cost 0.1 ms, and none is ever left behind by a fork.
        pool = ThreadPoolExecutor(self._threads, "headrace-decode") if self._threads else _Inline()
        try:
            yield from self._in_order(fetched, pool)
        finally:
            # Not waited for here: the collector may drop this in any thread, which may hold any lock, those
            # of `threading` too, and without them no thread ends.
            pool.shutdown(wait=False, cancel_futures=True)
            self._ended.append(pool)
            fetched.close()

    def close(self) -> None:
        """Wait for the threads of passes that have ended."""
        while self._ended:
            self._ended.pop().shutdown(wait=True)

    def _in_order(
        self,
        fetched: Generator[Fetched, None, None],
        pool: Executor,
    ) -> Generator[Delivery, None, None]:
        pending: deque[Future[Delivery]] = deque()
        more = True
        while True:
            submitted = 0
            detours: list[Interruption] = []
            while more and self._wants_more(pending, submitted):
                future, more = self._submit_next(fetched, pool, detours)
                if future is not None:
                    pending.append(future)
                    submitted += 1
            if not pending:
                return
            delivery = pending.popleft().result()
            delivery.way.detours = detours
            yield delivery

    def _wants_more(self, pending: deque[Future[Delivery]], submitted: int) -> bool:
        if len(pending) >= self._batches_ahead:
            return False
        return not pending or submitted < SUBMITS_PER_BATCH or not pending[0].done()

    def _submit_next(
        self,
        fetched: Generator[Fetched, None, None],
        pool: Executor,
        detours: list[Interruption],
    ) -> tuple[Future[Delivery] | None, bool]:
        """Return the next batch, and whether more may come; note how long it was waited for."""
        try:
            one = next(fetched)
        except StopIteration:
            return None, False
        except Exception as e:  # noqa: BLE001 - it is raised when its turn comes
            failed: Future[Delivery] = Future()
            failed.set_exception(e)
            return failed, False
        detours.append((time.perf_counter(), one.way.read))
        pieces = max(1, min(len(one.batch), PIECES_PER_THREAD * self._threads))
        job = _Job(one, pieces, self._decode, self._finish)
        for piece in range(pieces):
            pool.submit(job.run, piece)
        return job.future, True

    def _decode(self, one: Fetched, span: slice) -> list[Decoded]:
        skipped = self._loader.skipped
        return self._decoder.decode(one.batch, self._loader.source.names, skipped, span)

    def _finish(self, one: Fetched, samples: list[Decoded]) -> Delivery:
        way = one.way
        way.decoded_s = time.perf_counter()
        value = self._collate(samples, len(one.asked))
        way.collated_s = time.perf_counter()
        if self._pin_memory:
            value = pinned(value)  # type: ignore[no-untyped-call]
            way.moved_s = time.perf_counter()
        return Delivery.of(one, value, len(samples))


class _Job:
    """One batch in the pool. The thread that ends its last piece finishes the batch."""

    def __init__(
        self,
        one: Fetched,
        pieces: int,
        decode: Callable[[Fetched, slice], list[Decoded]],
        finish: Callable[[Fetched, list[Decoded]], Delivery],
    ) -> None:
        self.future: Future[Delivery] = Future()
        self._one = one
        self._decode = decode
        self._finish = finish
        self._decoded: list[list[Decoded]] = [[] for _ in range(pieces)]
        self._left = pieces
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, piece: int) -> None:
        """Decode one piece."""
        pieces, samples = len(self._decoded), len(self._one.batch)
        span = slice(piece * samples // pieces, (piece + 1) * samples // pieces)
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            if self._error is None:
                self._decoded[piece] = self._decode(self._one, span)
        except BaseException as e:  # noqa: BLE001 - it is raised where the batch is delivered
            self._error = e
        work_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        with self._lock:
            way = self._one.way
            way.decoding_s = min(way.decoding_s or began_s, began_s)
            way.work_s += work_s
            way.cpu_s += cpu_s
            self._left -= 1
            last = self._left == 0
        if last:
            self._complete()

    def _complete(self) -> None:
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        try:
            delivery = self._finish(self._one, list(chain.from_iterable(self._decoded)))
        except BaseException as e:  # noqa: BLE001 - the same
            self.future.set_exception(e)
        else:
            self.future.set_result(delivery)


class _Inline(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function; its own errors are its own affair."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
