"""Grain and JAX: a random-access source, and whole batches as a checkpointable `IterDataset`.

`Source` is for Grain's own samplers and workers. `Dataset` gives whole batches in headrace's order: arrays in
a dict, under `data`, `labels` and `indices`. numpy arrays lie over headrace's buffer without a copy, and JAX's
CPU arrays lie over those without another: `jax.device_put` shares memory that is aligned to 64 bytes.

Iterators know where they stand, as Grain's own do (`get_state`, `set_state`), and are saved
with Orbax or by hand. `mp_prefetch` cuts the data set into one share of batches per worker.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, get_args

import grain
import numpy as np

from headrace import api
from headrace.base.job import RankDecision
from headrace.config import reader_options
from headrace.errors import DecodeError, OrderError
from headrace.frameworks.view import (
    check_form,
    check_pixels,
    decode_error,
    pixels_of,
    rows_of,
    sample_data,
)
from headrace.plane.batch import Skipped
from headrace.plane.images import Images
from headrace.plane.pipeline import Pipeline
from headrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from os import PathLike

    from headrace.api import OrderName
    from headrace.order import Order
    from headrace.plane import Batch, Loader
    from headrace.plane.batch import OnError
    from headrace.plane.batch_trace import BatchTrace
    from headrace.plane.loader import Pass
    from headrace.plane.pipeline import Delivery, Fetched


Form = Literal["rows", "buffer"]
"""`rows`: `data` is uint8, shape (samples, length), for samples of equal length; no copy where they
lie one after the other. `buffer`: `data` is uint8, shape (bytes,), and `offsets` and `lengths` say
where the samples lie in it; never a copy."""


THREADS = 2
"""That call a decode function, unless told otherwise."""


def arrays_of(batch: Batch, form: Form, images: Images | None = None) -> dict[str, Any]:
    """Return a batch as numpy arrays, see `Form`; `data` is pixels where pictures were decoded.

    Raises:
        ValueError: `rows` of samples that differ in length.
    """
    common = {"labels": batch.labels, "indices": batch.indices}
    if images is not None:
        return {"data": pixels_of(batch, images), **common}
    if form == "rows":
        return {"data": rows_of(batch, "give decode=, or take 'buffer'"), **common}
    return {"data": batch.data, "offsets": batch.offsets, "lengths": batch.lengths, **common}


class StackingDecoder:
    """Decodes the samples of a batch in threads and stacks the results.

    Args:
        function: `decode(data)`; data is a read-only memoryview of the sample's bytes (a dict of
            them by part, where several parts are read). Returns an array, or a dict or tuple of
            arrays, of the same shapes for all samples.
        threads: how many samples are decoded at a time; 0 decodes in the caller's thread.
        names: the store's names, for errors.
        on_error: what to do with a sample that cannot be decoded.
        skipped: takes what was left out.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        threads: int,
        names: Sequence[str],
        on_error: OnError,
        skipped: list[Skipped],
    ) -> None:
        self._function = function
        self._names = names
        self._on_error = on_error
        self._skipped = skipped
        self._pool = ThreadPoolExecutor(threads, "headrace-decode") if threads else None

    def __call__(self, batch: Batch, trace: BatchTrace) -> dict[str, Any]:
        """Return the decoded batch, and stamp its trace.

        Raises:
            DecodeError: the function failed; names the sample.
            ValueError: no sample is left.
        """
        places = range(len(batch))
        one_by_one = self._pool.map if self._pool else map
        trace.decoding_s = time.perf_counter()
        timed = list(one_by_one(lambda i: self._timed(batch, i), places))
        trace.decoded_s = time.perf_counter()
        trace.work_s, trace.cpu_s = sum(each[1] for each in timed), sum(each[2] for each in timed)
        results = [each[0] for each in timed]
        for result in results:
            if not isinstance(result, DecodeError):
                continue
            if self._on_error == "raise":
                raise result
            trace.left_out.append(Skipped(result.index, result.name, result.message))
            self._skipped.append(trace.left_out[-1])
        kept = [i for i in places if not isinstance(results[i], DecodeError)]
        if not kept:
            raise ValueError(
                "a batch has no samples: all were skipped; see `skipped` of the iterator",
            )
        element = {
            "data": _stacked([results[i] for i in kept]),
            "labels": batch.labels[kept],
            "indices": batch.indices[kept],
        }
        trace.collated_s = time.perf_counter()
        return element

    def empty(self, one: Batch) -> dict[str, Any]:
        """Return a batch without samples, shaped like a batch of the one sample that is given.

        Raises:
            DecodeError: the function failed on it.
        """
        sample = self._decode(one, 0)
        if isinstance(sample, DecodeError):
            raise sample
        return {
            "data": _stacked([sample], 0),
            "labels": one.labels[:0],
            "indices": one.indices[:0],
        }

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, batch: Batch, i: int) -> tuple[Any, float, float]:
        """A decoded sample, and the seconds and the processor seconds that it took."""
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        result = self._decode(batch, i)
        return result, time.perf_counter() - began_s, time.thread_time() - cpu_s

    def _decode(self, batch: Batch, i: int) -> Any:
        try:
            return self._function(sample_data(batch, i))
        except Exception as e:  # noqa: BLE001 - it is raised, or recorded, where the batch is made
            index = int(batch.indices[i])
            error = decode_error(index, self._names[index], f"{type(e).__name__}: {e}")
            error.__cause__ = e
            return error


def _stacked(samples: list[Any], count: int | None = None) -> Any:
    """Of `samples`, the first `count`: shapes are known where none is wanted."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: _stacked([sample[key] for sample in samples], count) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked(list(each), count) for each in zip(*samples, strict=True))
    return np.stack(samples)[:count]


def on_device(element: dict[str, Any], place: Any) -> dict[str, Any]:
    """Return a batch as JAX arrays; `indices` stay with the host, which counts with them.

    `place` is a `jax.Device`, or a `jax.sharding.Sharding` whose first axis is the batch: then the result is
    the global array of which this process holds its share.
    """
    import jax

    def put(array: Any) -> Any:
        if isinstance(place, jax.sharding.Sharding):
            return jax.make_array_from_process_local_data(place, array)
        return jax.device_put(array, place)

    return {k: v if k == "indices" else jax.tree.map(put, v) for k, v in element.items()}


class Source:
    """A store for Grain: item i is a dict of `data` (uint8) and `label` (int64, -1: none).

    Where several parts are read, `data` is a dict of them by part.

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...).
        parts: parts to read of samples that have several; all if empty.
        options: fields of `headrace.config.ReaderOptions`.

    Raises:
        ValueError: an unknown part or option.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        *,
        parts: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.store = store if isinstance(store, Store) else api.open(store)
        self._parts = tuple(parts)
        self._options, _ = reader_options(options)
        self._begin()

    def _begin(self) -> None:
        self._reader = Pipeline(self.store, self._options, self._parts)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample.

        Raises:
            IndexError: there is no such sample.
            HeadraceError: it cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index is {index}, expected 0 to {len(self) - 1}")
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples at `indices`; one native read for all. Grain calls it by this name.

        Raises:
            SampleNotFound: an index lies outside the store.
            HeadraceError: a sample cannot be read.
        """
        wanted = np.asarray([int(i) for i in indices], np.int64)
        with self._lock:  # the native reader is made with the first read
            reader = self._reader
            _ = reader.engine
        batch = reader.fetch(wanted).batch
        return [_sample(batch, i) for i in range(len(batch))]

    def __repr__(self) -> str:
        """Tell this data from other data: Grain compares it when it restores a checkpoint."""
        parts = f", parts={self._parts}" if self._parts else ""
        return f"headrace.grain.Source({self.store.fingerprint!r}{parts})"

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "_parts": self._parts, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _sample(batch: Batch, i: int) -> dict[str, Any]:
    data = sample_data(batch, i)
    if isinstance(data, dict):
        arrays: Any = {name: np.frombuffer(part, np.uint8) for name, part in data.items()}
    else:
        arrays = np.frombuffer(data, np.uint8)
    return {"data": arrays, "label": batch.labels[i]}


# Grain is not typed where it counts, so for the type checker these are subclasses of Any.
class Dataset(grain.IterDataset):  # type: ignore[misc]
    """Whole batches of a store, in exact headrace order, for Grain and JAX.

    An element is a dict of `data`, `labels`, `indices` and, for `elements="buffer"`, `offsets` and
    `lengths`. As Grain has it, each `iter()` begins anew; an iterator's `get_state()` and
    `set_state()` resume exactly, with another world size too.

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...).
        batch_size: samples per batch and process.
        order: `shuffled`, `sequential`, `blocked`, `balanced` or an `Order`; see `headrace.loader`.
        seed: another seed, another sequence of epochs.
        elements: `rows` or `buffer`: what `data` is without `decode`; see the how-to page.
        decode: `decode(bytes)` gives an array, or a dict or tuple of arrays, of a sample; `data` is
            then their stack. Or `headrace.Images`: `data` is pixels, which native threads decode.
        threads: threads that decode; None: 2, and the tuner's choice with `Images`.
        epochs: epochs that an iterator goes through; None: for ever.
        device: where the arrays go, a `jax.Device` or a `jax.sharding.Sharding` over the batch axis;
            None: numpy arrays.
        rank: this process's place among `world_size`; not given, found out by the first iterator: from
            JAX where its processes are joined, else as torchrun, MPI or Slurm say; see `headrace.loader`.
        world_size: processes that share the samples.
        tail: `exact`, `pad` or `drop`; see `headrace.loader`.
        parts: parts to read of samples that have several; all if empty.
        on_error: `raise`, or `skip` samples that cannot be read or decoded: batches get smaller.
        options: fields of `headrace.config.ReaderOptions`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        ValueError: an unknown order, part, option or form of elements.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        batch_size: int,
        *,
        order: OrderName | Order = "shuffled",
        seed: int = 0,
        elements: Form = "buffer",
        decode: Callable[[Any], Any] | Images | None = None,
        threads: int | None = None,
        epochs: int | None = 1,
        device: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["drop", "pad", "exact"] | None = None,
        parts: Sequence[str] = (),
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        super().__init__()
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}, expected at least 1, or None")
        images, function = (decode, None) if isinstance(decode, Images) else (None, decode)
        if threads is not None and threads < (images is not None):
            raise ValueError(f"threads is {threads}, expected at least {int(images is not None)}")
        self.store = store if isinstance(store, Store) else api.open(store)
        self._elements = elements
        self._images = images
        self._decode = function
        self._threads = threads
        self._epochs = epochs
        self._device = device
        self._share: tuple[int, int] | None = None
        self._ranks = RankDecision(rank, world_size)
        self._arguments = {
            "batch_size": batch_size,
            "order": order,
            "seed": seed,
            "tail": tail,
            "parts": tuple(parts),
            "on_error": on_error,
            "decode": images,
            "decode_threads": None if images is None else threads,
            **options,
        }
        loader = self._new_loader()
        check_form(elements, get_args(Form), loader.reader.part_names if decode is None else ("",))
        if images is not None:
            check_pixels(elements, "buffer", images)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of this process in an epoch."""
        return len(self._new_loader())

    def __iter__(self) -> Batches:
        self._ranks.decide()
        if self._share is None:
            return Batches(self, self._new_loader())
        return ShareOfBatches(self, self._new_loader(), *self._share)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Take every n-th batch only: Grain calls it on the copies that its workers get.

        Raises:
            ValueError: a sequential slice, which would deliver batches out of order, or JAX arrays,
                which do not pass from process to process.
        """
        if self._device is not None:
            raise ValueError("device is given, but Grain's workers cannot hand on JAX arrays")
        if sequential_slice:
            raise ValueError("sequential_slice=True would change the order; leave it out")
        self._share = (sl.start or 0, sl.step or 1)

    def __str__(self) -> str:
        return f"headrace.grain.Dataset({self.store.path!s})"

    def _new_loader(self) -> Loader:
        loader = api.loader(self.store, **self._arguments)
        loader.share.ranks = self._ranks  # one answer for all iterators, here and in workers
        return loader

    def _decoder_over(self, loader: Loader) -> StackingDecoder | None:
        if self._decode is None:
            return None
        on_error = self._arguments["on_error"]
        return StackingDecoder(
            self._decode, THREADS if self._threads is None else self._threads, self.store.names,
            on_error, loader.skipped,
        )  # fmt: skip


class Batches(grain.DatasetIterator):  # type: ignore[misc]
    """Iterator over a `Dataset`. Its state counts the batches that it delivered.

    Attributes:
        skipped: samples that were left out so far.
    """

    def __init__(self, dataset: Dataset, loader: Loader) -> None:
        super().__init__()
        self._dataset = dataset
        self._loader = loader
        self._decoder = dataset._decoder_over(loader)  # noqa: SLF001 - its own other half
        self._epochs = dataset._epochs  # noqa: SLF001
        # No generator of this object's own: it would refer back, and only the collector of cycles
        # would ever drop an iterator that nobody closed.
        self._under_way: Generator[Fetched, None, None] | None = None
        self._step = 0

    @property
    def skipped(self) -> list[Skipped]:
        """Samples that were left out so far."""
        return self._loader.skipped

    def __next__(self) -> dict[str, Any]:
        """Return the next batch.

        Raises:
            HeadraceError: a sample cannot be read.
            DecodeError: `decode` failed; names the sample.
        """
        self._assert_not_closed()
        self._loader.stats.ask()
        asked_s = time.perf_counter()
        while self._epochs is None or self._loader.epoch < self._epochs:
            if self._under_way is None:
                self._pass = self._loader.begin()
                slices, order = self._loader.slices, self._loader.order
                begin, steps = self._pass.begin, self._steps(self._pass)
                spans = (slices.span(step, begin) for step in steps)
                self._under_way = self._loader.reader.stream(order, self._pass.epoch, spans)
            try:
                one = next(self._under_way, None)
                element = None if one is None else self._element(one)
            except BaseException:
                self.set_state(self.get_state())  # whoever asks again meets the same batch
                raise
            if one is None or element is None:
                self._under_way = None
                self._finished()
                continue
            self._delivered(one.delivery(None), (asked_s, time.perf_counter()))
            return element
        self._loader.stats.rest()
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator stands: plain values, under 300 bytes as JSON."""
        return self._loader.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        self._stop()
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End reading ahead and decoding. Batches stay valid."""
        super().close()
        if hasattr(self, "_under_way"):  # Grain also closes iterators that failed to begin
            self._stop()
            self._loader.close()
            if self._decoder is not None:
                self._decoder.close()

    def __str__(self) -> str:
        return f"Batches({self._dataset})"

    def __del__(self) -> None:
        """Nothing is closed here, where Grain would: what this refers to ends as it is dropped.

        The collector calls this in whatever thread it happens to run, which may hold any lock, those
        of `threading` too: to wait for a decoding thread here would be to wait for ever.
        """

    def _stop(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.close()
            self._loader.stats.rest()

    def _steps(self, a_pass: Pass) -> range:
        """The steps of a pass that this iterator delivers."""
        self._step = 0
        return range(a_pass.steps)

    def _delivered(self, delivery: Delivery, times: tuple[float, float]) -> None:
        """Count it. Where Grain's own threads ask ahead, they are whoever waits: when they have room."""
        self._loader.stats.deliver(self._pass, self._step, delivery, times)
        self._step += 1
        if self._step == self._pass.steps:
            self._pass.finish()

    def _finished(self) -> None:
        """The pass has no more steps for this iterator."""
        self._loader.stats.rest()
        self._loader.stats.ask()

    def _element(self, one: Fetched) -> dict[str, Any]:
        dataset, trace = self._dataset, one.trace
        if self._decoder is None:
            element = arrays_of(one.batch, dataset._elements, dataset._images)  # noqa: SLF001
            trace.collated_s = time.perf_counter()
        elif len(one.asked):
            element = self._decoder(one.batch, trace)
        else:  # of an exact tail that several ranks share, one may have nothing
            element = self._decoder.empty(self._loader.reader.fetch(np.zeros(1, np.int64)).batch)
        if dataset._device is not None:  # noqa: SLF001
            element = on_device(element, dataset._device)  # noqa: SLF001
            trace.moved_s = time.perf_counter()
        return element


class ShareOfBatches(Batches):
    """Iterator over every n-th batch, in one of Grain's worker processes.

    Its place is a step, counted through all epochs: workers take turns across their bounds too.
    """

    def __init__(self, dataset: Dataset, loader: Loader, first: int, stride: int) -> None:
        super().__init__(dataset, loader)
        loader.tuning = loader.stats.rested = None  # in a worker nobody trains, so nobody waits
        if loader.decoding is not None and dataset._threads is None:  # noqa: SLF001
            processors = len(os.sched_getaffinity(0))
            loader.decoding.turn({"decode_threads": max(1, processors // stride)})
        self._first = first
        self._stride = stride
        self._go_to(first)

    def _go_to(self, step: int) -> None:
        self._step = step
        self._loader.set_epoch(step // len(self._loader))

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator stands: plain values."""
        return {**self._loader.state_dict(), "step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by a worker with the same share.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged, or belongs to another share.
        """
        self._stop()
        step = state.get("step")
        if step is None and state.get("epoch") == state.get("position") == 0:
            step = self._first  # Grain asks the whole data set where workers begin
        if not isinstance(step, int) or step < 0 or step % self._stride != self._first:
            raise OrderError(
                f"step is {step!r}, expected one of worker {self._first} of {self._stride}: Grain "
                "resumes with as many workers as there were",
            )
        self._loader.load_state_dict({k: v for k, v in state.items() if k != "step"})
        self._go_to(step)

    def _steps(self, a_pass: Pass) -> range:
        return range(self._step % a_pass.steps, a_pass.steps, self._stride)

    def _delivered(self, delivery: Delivery, times: tuple[float, float]) -> None:
        # The place is a step, however large.
        waited_s = times[1] - times[0]
        self._loader.stats.count(delivery.samples, delivery.nbytes, delivery.reads, waited_s)
        self._loader.stats.steps.warn_once(delivery.trace.left_out)
        self._step += self._stride

    def _finished(self) -> None:
        self._go_to(self._step)


def dataset(store: Store | str | PathLike[str], batch_size: int, **arguments: Any) -> Dataset:
    """Return a `grain.IterDataset` of whole batches; arguments are those of `Dataset`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        ValueError: an unknown order, part, option or form of elements.
    """
    return Dataset(store, batch_size, **arguments)
