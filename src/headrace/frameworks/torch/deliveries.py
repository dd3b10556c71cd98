"""Deliveries: batches whole, decoded in threads, or decoded in worker processes.

Each has `deliveries(a_pass)`: a generator of one `Delivery` for each span of a pass, in order, that cleans
up when it is closed. The loader counts them; none of them changes which sample comes when.

Threads suit decoders that let go of the GIL (PIL, most native ones): nothing is pickled or copied between
processes. The consumer's own thread reads and submits, so there is no feeder to shut down. A batch is cut
into pieces, which the pool decodes in any order; whoever finishes the last piece collates.

Worker processes suit decoders that hold the GIL. Torch's own DataLoader starts, feeds, watches and ends
them; headrace says which samples a batch has, and each worker reads them with its own native reader.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import data as torch_data
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from headrace.errors import HeadraceError
from headrace.frameworks.torch.dataset import TensorBatch, labelled_pixels, pixel_tensors
from headrace.plane.augment import MixedLabels
from headrace.plane.images import ImageBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from headrace.frameworks.torch.dataset import Dataset, Decoded, Decoder
    from headrace.frameworks.torch.device import CudaTransfer, ToDevice
    from headrace.plane import Loader
    from headrace.plane.batch import Skipped
    from headrace.plane.batch_trace import Interruption
    from headrace.plane.loader import Pass
    from headrace.plane.pipeline import Delivery, Fetched


class Collate:
    """Puts decoded samples together; pickled to workers if the user's function is.

    Args:
        function: torch's `collate_fn`; None: `torch.utils.data.default_collate`.
        one: gives any sample, decoded: what an empty batch is shaped like.
    """

    def __init__(
        self, function: Callable[[list[Decoded]], Any] | None, one: Callable[[], Decoded]
    ) -> None:
        self.function = function
        self._one = one

    def __call__(self, samples: list[Decoded], asked: int) -> Any:
        """Return the batch. Where several ranks share an exact tail of fewer samples, it may be empty.

        Args:
            samples: decoded.
            asked: how many there would be if none had been skipped.

        Raises:
            ValueError: all samples were skipped, and there is no function of the user's that might accept
                that.
        """
        if self.function is not None:
            return self.function(samples)
        if samples:
            return default_collate(samples)
        if asked:
            raise ValueError(
                f"a batch has no samples: all {asked} were skipped; see `loader.skipped`, or give a "
                "collate_fn that accepts an empty list",
            )
        return _emptied(default_collate([self._one()]))


def _emptied(batch: Any) -> Any:
    """A batch of the same shapes without samples."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(each) for key, each in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    if all(isinstance(each, (str, bytes)) for each in batch):  # default_collate leaves them a list
        return []
    parts = [_emptied(each) for each in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else parts


class WholeBatches:
    """Delivers `TensorBatch`, or pictures that native threads decoded and their labels.

    Args:
        loader: gives order and reader.
        pin_memory: copy each batch into page-locked memory.
        collate_fn: makes a batch of a list of (pixels, label); None: there is nothing to do.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        pin_memory: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._loader = loader
        self._pin_memory = pin_memory
        self._collate_fn = collate_fn

    @property
    def threads(self) -> int:
        """That decode; 0 where bytes are delivered."""
        stage = self._loader.decoding
        return 0 if stage is None else stage.knobs()["decode_threads"]

    def deliveries(self, a_pass: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order."""
        fetched = self._loader.reader.stream(self._loader.order, a_pass.epoch, a_pass.spans())
        try:
            for one in fetched:
                value = self._tensors(one)
                if self._pin_memory:
                    one.trace.collated_s = time.perf_counter()
                    value = pinned(value)  # type: ignore[no-untyped-call]
                    one.trace.moved_s = time.perf_counter()
                yield one.delivery(value)
        finally:
            fetched.close()

    def _tensors(self, one: Fetched) -> Any:
        stage = self._loader.decoding
        if stage is None or not isinstance(one.batch, ImageBatch):
            return TensorBatch.over(one.batch)
        if self._collate_fn is None:
            return pixel_tensors(one.batch, stage.images)
        value = self._collate_fn(labelled_pixels(one.batch, stage.images))
        one.trace.collated_s = time.perf_counter()
        return value

    def close(self) -> None:
        """There is nothing to let go of."""


class DeviceBatches:
    """Delivers pixels and labels on a device, sent there ahead of the consumer by one batch.

    The next batch is taken ahead only if the last one did not have to be waited for: who decodes more slowly
    than the consumer learns gets each batch as soon as it is there.

    Args:
        loader: gives order and reader.
        to_device: sends batches.
    """

    def __init__(self, loader: Loader, to_device: ToDevice) -> None:
        assert loader.decoding is not None, "whoever sends pixels decodes them"
        self._loader = loader
        self.to_device = to_device
        self._stage = loader.decoding
        self._stage.keeps_buffers = True

    @property
    def threads(self) -> int:
        """That decode."""
        return self._stage.knobs()["decode_threads"]

    def deliveries(self, a_pass: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order."""
        fetched = self._loader.reader.stream(self._loader.order, a_pass.epoch, a_pass.spans())
        ahead: deque[tuple[Delivery, CudaTransfer, MixedLabels | None]] = deque()
        try:
            while True:
                while len(ahead) < 1 + self._loader.reader.was_ready:
                    if (one := next(fetched, None)) is None:
                        break
                    ahead.append(self._sent(one))
                if not ahead:
                    return
                delivery, transfer, mixed = ahead.popleft()
                tensors: list[Any] = transfer.take()
                if mixed is not None:
                    pixels, labels = tensors
                    tensors = [pixels, MixedLabels(labels[0], labels[1], mixed.lam)]
                yield delivery._replace(value=tensors)
        finally:
            fetched.close()
            self.to_device.wait()

    def _sent(self, one: Fetched) -> tuple[Delivery, CudaTransfer, MixedLabels | None]:
        assert isinstance(one.batch, ImageBatch)
        one.trace.collated_s = time.perf_counter()
        transfer = self.to_device.send(one.batch, self._stage)
        one.trace.moved_s = time.perf_counter()
        return one.delivery(None), transfer, one.batch.mixed

    def close(self) -> None:
        """Wait for copies that are under way, and unlock all memory."""
        self.to_device.close()


PIECES_PER_THREAD = 4
"""A batch is cut into this many pieces per thread: samples differ in cost, and the last piece of a
batch should not keep the others waiting."""

SUBMITS_PER_BATCH = 2
"""Batches submitted for each that is delivered while the look-ahead grows. One would never grow it;
filling it at once would delay the first batch by the reading of all others."""


class ThreadedDecoding:
    """Decodes batches ahead.

    Args:
        loader: gives order and reader.
        decoder: decodes samples.
        collate: puts them together.
        threads: 0 decodes in the consumer's thread, when a batch is asked for.
        batches_ahead: batches that are decoded or wait to be taken.
        pin_memory: copy each batch into page-locked memory.
    """

    def __init__(
        self,
        loader: Loader,
        decoder: Decoder,
        collate: Collate,
        *,
        threads: int,
        batches_ahead: int,
        pin_memory: bool,
    ) -> None:
        _check_bounds(threads=(threads, 0), batches_ahead=(batches_ahead, 1))
        self._loader = loader
        self._decoder = decoder
        self._collate = collate
        self.threads = threads
        self._batches_ahead = batches_ahead if threads else 1
        self._pin_memory = pin_memory
        self._ended: list[Executor] = []

    def deliveries(self, a_pass: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order."""
        self.close()
        fetched = self._loader.reader.stream(self._loader.order, a_pass.epoch, a_pass.spans())
        # A pool per pass: its threads cost 0.1 ms, and none is ever left behind by a fork.
        pool = ThreadPoolExecutor(self.threads, "headrace-decode") if self.threads else _Inline()
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
            interruptions: list[Interruption] = []
            while more and self._wants_more(pending, submitted):
                future, more = self._submit_next(fetched, pool, interruptions)
                if future is not None:
                    pending.append(future)
                    submitted += 1
            if not pending:
                return
            delivery = pending.popleft().result()
            delivery.trace.interruptions = interruptions
            yield delivery

    def _wants_more(self, pending: deque[Future[Delivery]], submitted: int) -> bool:
        if len(pending) >= self._batches_ahead:
            return False
        return not pending or submitted < SUBMITS_PER_BATCH or not pending[0].done()

    def _submit_next(
        self,
        fetched: Generator[Fetched, None, None],
        pool: Executor,
        interruptions: list[Interruption],
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
        interruptions.append((time.perf_counter(), one.trace.read))
        pieces = max(1, min(len(one.batch), PIECES_PER_THREAD * self.threads))
        job = _Job(self, one, pieces)
        for piece in range(pieces):
            pool.submit(job.run, piece)
        return job.future, True

    def decode(self, one: Fetched, span: slice) -> list[Decoded]:
        """Decode some samples of a batch, in any thread."""
        skipped = self._loader.skipped
        return self._decoder.decode(one, self._loader.source.names, skipped, span)

    def finish(self, one: Fetched, samples: list[Decoded]) -> Delivery:
        """Put a batch together, in any thread."""
        trace = one.trace
        trace.decoded_s = time.perf_counter()
        value = self._collate(samples, len(one.asked))
        trace.collated_s = time.perf_counter()
        if self._pin_memory:
            value = pinned(value)  # type: ignore[no-untyped-call]
            trace.moved_s = time.perf_counter()
        return one.delivery(value)


class _Job:
    """One batch in the pool. The thread that ends its last piece finishes the batch."""

    def __init__(self, decoding: ThreadedDecoding, one: Fetched, pieces: int) -> None:
        self.future: Future[Delivery] = Future()
        self._decoding = decoding
        self._one = one
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
                self._decoded[piece] = self._decoding.decode(self._one, span)
        except BaseException as e:  # noqa: BLE001 - it is raised where the batch is delivered
            self._error = e
        work_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        with self._lock:
            trace = self._one.trace
            trace.decoding_s = min(trace.decoding_s or began_s, began_s)
            trace.work_s += work_s
            trace.cpu_s += cpu_s
            self._left -= 1
            if self._left:
                return
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        try:
            delivery = self._decoding.finish(self._one, list(chain.from_iterable(self._decoded)))
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


# Torch loaders and their iterators inherited over a fork. Their workers are the parent's, and are not
# ended here.
_inherited: list[Any] = []


def _check_bounds(**bounds: tuple[float, int]) -> None:
    for name, (value, low) in bounds.items():
        if value < low:
            raise ValueError(f"{name} is {value}, expected at least {low}")


class _Answer(NamedTuple):
    """What a worker sends: a delivery, or the error that came instead."""

    delivery: Delivery | None
    skipped: list[Skipped]
    error: HeadraceError | None = None


@dataclass
class _Requests(torch_data.Sampler[Any]):
    """The batch sampler: the indices of each span of the pass under way."""

    loader: Loader
    a_pass: Pass | None = field(default=None)

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        assert self.a_pass is not None, "a pass is begun before torch asks for indices"
        epoch, order = self.a_pass.epoch, self.loader.order
        for span in self.a_pass.spans():
            yield epoch, order.wrapped(epoch, *span)


class _Answers(torch_data.Dataset[Any]):
    """The data set that lives in each worker: answers one request with one finished batch."""

    def __init__(self, dataset: Dataset, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitems__(self, request: Any) -> _Answer:
        already = len(self._dataset.skipped)
        try:
            epoch, indices = request
            fetched = self._dataset.fetch(indices, epoch)
            trace = fetched.trace
            trace.serial = True  # this process does one batch after the other
            trace.decoding_s, cpu_s = time.perf_counter(), time.thread_time()
            samples: list[Decoded] = self._dataset.decoded(fetched)
        except HeadraceError as e:
            # Torch would rebuild the error from its text and lose its fields.
            return _Answer(None, [], e)
        trace.decoded_s, trace.cpu_s = time.perf_counter(), time.thread_time() - cpu_s
        trace.work_s = trace.decoded_s - trace.decoding_s
        value = self._collate(samples, len(fetched.asked))
        delivery = fetched.delivery(value)
        trace.collated_s = time.perf_counter()
        return _Answer(delivery, self._dataset.skipped[already:])


def _as_it_is(answer: Any) -> Any:
    return answer


class WorkerDecoding:
    """Decodes in worker processes."""

    def __init__(self, loader: Loader, dataset: Dataset, collate: Collate, **options: Any) -> None:
        _check_bounds(
            **{n: (options[n], low) for n, low in (("prefetch_factor", 1), ("timeout", 0))}
        )
        self._loader = loader
        self._answers = _Answers(dataset, collate)
        self._options = options
        self._requests = _Requests(loader)
        self._torch: torch_data.DataLoader[Any] | None = None
        self._pid = -1

    def deliveries(self, a_pass: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order.

        Raises:
            RuntimeError: a worker died; torch says how.
        """
        self._requests.a_pass = a_pass
        iterator: Any = iter(self._torch_loader())
        pid = os.getpid()
        try:
            for answer in iterator:
                self._loader.skipped.extend(answer.skipped)
                delivery, error = answer.delivery, answer.error
                if error is not None:
                    del answer
                    try:
                        raise error
                    finally:
                        del error  # its traceback holds this frame, and with it the workers
                assert delivery is not None
                yield delivery
        except (ConnectionError, EOFError) as e:
            self.close()
            raise RuntimeError(
                "a DataLoader worker died while it sent a batch; the kernel's log may say why "
                "(out of memory?), and num_workers=0 decodes in this process",
            ) from e
        except Exception:
            self.close()  # workers that failed are not asked again
            raise
        finally:
            if os.getpid() != pid:  # dropped here, it would wait for the parent's workers
                _inherited.append(iterator)
            elif not self._options["persistent_workers"]:
                iterator._shutdown_workers()  # noqa: SLF001 - as in `close`

    def close(self) -> None:
        """End the workers."""
        loader, self._torch = self._torch, None
        # An error that somebody keeps holds the iterator. Collected as garbage later, its queues would
        # go first: then torch waits five seconds for each worker, and kills it.
        if loader is not None and self._pid == os.getpid():
            workers = loader._iterator  # noqa: SLF001 - there is no public way
            if workers is not None:
                workers._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001

    def _torch_loader(self) -> torch_data.DataLoader[Any]:
        if self._torch is not None and self._pid != os.getpid():
            _inherited.append(self._torch)
            self._torch = None
        if self._torch is None:
            self._torch = torch_data.DataLoader(
                self._answers,
                batch_sampler=self._requests,
                collate_fn=_as_it_is,
                **self._options,
                # Its own, so that the user's random numbers do not depend on us.
                generator=torch.Generator().manual_seed(self._loader.order.seed),
            )
            self._pid = os.getpid()
        return self._torch


Deliveries = WholeBatches | DeviceBatches | ThreadedDecoding | WorkerDecoding
