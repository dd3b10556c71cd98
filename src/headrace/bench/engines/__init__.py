"""Engines under test: what reads the batches of emulated accelerators, and which one a workload is run with.

An engine opens an epoch for an accelerator, and gives batch after batch.

headrace's own is in `native`. PyTorch's DataLoader and tf.data decode each sample as a training script does,
and hand on a tensor of the size that the workload asks for, made before, as DLIO does: what is measured is
reading and decoding, not resizing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from headrace.base.extras import import_extra
from headrace.bench.formats import format_of
from headrace.errors import BenchError, HeadraceError, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.bench.config import LoadedWorkload
    from headrace.bench.dataset import StepPlan
    from headrace.bench.schema import Workload


@dataclass(frozen=True, slots=True)
class Delivered:
    """A batch that is there.

    Attributes:
        nbytes: bytes that were read for it; 0 where the engine cannot tell.
        at_s: when it was there, of `time.perf_counter`, where the engine knows: who waits for it is woken
            later, on a busy host much later, and that is not the storage's fault. None: when `next` returns.
    """

    samples: int
    nbytes: int
    at_s: float | None = None


class BatchSource(Protocol):
    """One accelerator's batches of one epoch, in order.

    One that reads ahead may have `ask() -> bool`: ask for one batch more of those that are read ahead; False
    when all are asked for. At an epoch's begin the accelerators ask in turns, so that the first step does not
    wait until the first accelerator's fourth batch is read.

    It may also have `poll() -> Delivered | None`: as `next`, but None where that would wait. What is there
    already then costs no thread its turn, for which it waits long on a busy host.
    """

    def next(self) -> Delivered:
        """Wait for the next batch. Raises BenchError, with the file's name, if it cannot be read."""
        ...

    def close(self) -> None:
        """Give back what the epoch needed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine reads for: plans, and paths in the order that samples are counted in, by split."""

    workload: Workload
    plans: Mapping[str, StepPlan]
    files: Mapping[str, Sequence[str]]
    accelerators: int
    simulate: Any = None
    deadline_s: float = 300.0

    def paths(self, split: str, indices: NDArray[np.int64]) -> list[bytes]:
        """The files that samples lie in, each once, in the order of the samples."""
        files = dict.fromkeys((indices // self.plans[split].samples_per_file).tolist())
        return [os.fsencode(self.files[split][file]) for file in files]


class Engine(ABC):
    """A way to read batches. One for all accelerators of a process.

    Attributes:
        name: for reports.
        ahead: whether the next batch may be waited for while the one before is computed upon. Engines
            that prefetch by themselves as their framework does are asked when the accelerator is idle.
    """

    name: str
    ahead: bool

    @abstractmethod
    def open(self, split: str, epoch: int, accelerator: int) -> BatchSource:
        """Begin an epoch for an accelerator, whose number counts over all processes."""

    def figures(self) -> dict[str, Any]:
        """What the engine says about itself, ready for JSON."""
        return {}

    def close(self) -> None:  # noqa: B027 - many have nothing to give back
        """Give back everything."""


class _NullEngine(Engine):
    """Batches are there at once. What is lost with it, the harness loses."""

    name = "null"
    ahead = True

    def __init__(self, context: EngineContext) -> None:
        self._plans = context.plans

    def open(self, split: str, epoch: int, accelerator: int) -> BatchSource:  # noqa: ARG002
        return _NullSource(Delivered(self._plans[split].batch, 0))


class _NullSource:
    def __init__(self, batch: Delivered) -> None:
        self.next = self.poll = lambda: batch

    def close(self) -> None:
        pass


def batches_ahead(read_threads: int, prefetch_size: int) -> int:
    """Batches of an accelerator that are read ahead: PyTorch's workers times DLIO's prefetch factor."""
    workers = max(1, read_threads)
    factor = -(-prefetch_size // workers) if prefetch_size > 0 else 2
    return workers * factor


# -- frameworks ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of somebody else's code become one that names the code."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as e:  # of whose many kinds none is special here
        raise BenchError(f"{name} failed: {type(e).__name__}: {e}") from e


class _IteratorSource:
    """Batches of somebody else's iterator."""

    def __init__(
        self, batches: Iterator[Any], batch: int, name: str,
        nbytes: Callable[[Any], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        self._batches: Iterator[Any] | None = batches
        self._batch, self._name, self._nbytes = batch, name, nbytes

    def next(self) -> Delivered:
        assert self._batches is not None
        with _named(self._name):
            batch = next(self._batches, self)
        if batch is self:
            step = "It must give plan.steps batches."
            raise BenchError(f"{self._name} ended before the epoch did.", next_step=step)
        return Delivered(self._batch, self._nbytes(batch))

    def close(self) -> None:
        self._batches = None  # ends a framework's workers


def _tensor(context: EngineContext) -> np.ndarray[Any, Any]:
    """What is handed on for each sample."""
    reader = context.workload.reader
    shape = reader.transformed_record_dims or context.workload.dataset.resized_shape
    return np.zeros(shape, reader.transformed_record_element_type)


def _read_sample(context: EngineContext, split: str, index: int) -> np.ndarray[Any, Any]:
    """Opens a sample's file, decodes the sample and closes the file."""
    file, sample = divmod(index, context.plans[split].samples_per_file)
    data = context.workload.dataset
    return format_of(data).read_sample(context.files[split][file], data, sample)


class _TorchEngine(Engine):
    """A DataLoader for each accelerator and epoch: worker processes, prefetch factor, pinning as DLIO's."""

    name = "torch"
    ahead = False

    def __init__(self, context: EngineContext) -> None:
        self._torch = import_extra("torch.utils.data", "the engine torch")
        self._context = context

    def open(self, split: str, epoch: int, accelerator: int) -> _IteratorSource:
        reader, plan = self._context.workload.reader, self._context.plans[split]
        workers = reader.read_threads
        options: dict[str, Any] = {}
        if workers:
            ahead = batches_ahead(workers, reader.prefetch_size)
            options = {
                "prefetch_factor": ahead // workers, "timeout": self._context.deadline_s,
                "multiprocessing_context": reader.multiprocessing_context,
            }  # fmt: skip
        steps = range(plan.steps)
        loader = self._torch.DataLoader(
            DecodedSamples(self._context, split), num_workers=workers, **options,
            batch_sampler=(plan.indices(epoch, accelerator, step).tolist() for step in steps),
            pin_memory=reader.pin_memory and importlib.import_module("torch.cuda").is_available(),
        )  # fmt: skip
        return _IteratorSource(iter(loader), plan.batch, "the DataLoader")


class DecodedSamples:
    """A map-style data set over the workload's files; goes to workers by fork or by pickling."""

    def __init__(self, context: EngineContext, split: str) -> None:
        self._context, self._split = context, split
        self._preprocess = context.workload.reader.preprocess_time
        self._random: np.random.Generator | None = None
        self._tensor = _tensor(context)

    def __len__(self) -> int:
        return self._context.plans[self._split].samples

    def __getitem__(self, index: int) -> Any:
        _read_sample(self._context, self._split, index)
        if self._preprocess.mean_s:
            if self._random is None:
                self._random = np.random.default_rng()
            time.sleep(float(self._preprocess.draw(self._random, 1)[0]))
        return self._tensor


class _TensorFlowEngine(Engine):
    """A tf.data.Dataset for each accelerator and epoch, as training scripts and DLIO build it.

    TFRecord files are read by tf.data itself: files in the epoch's order, `read_threads` side by side in pieces
    of `transfer_size`, samples shuffled in a window of `shuffle_size`, parsed by `computation_threads`. Other
    formats have no reader there: Python reads their samples, `read_threads` at a time, in the plan's order.
    """

    name = "tensorflow"
    ahead = False

    def __init__(self, context: EngineContext) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its log of CPU features on every start
        self._tf = import_extra("tensorflow", "the engine tensorflow")
        with contextlib.suppress(RuntimeError):  # somebody computes on it already
            self._tf.config.set_visible_devices([], "GPU")  # else it takes all of its memory
        self._context = context
        self._tensor = _tensor(context)

    def open(self, split: str, epoch: int, accelerator: int) -> _IteratorSource:
        plan, reader = self._context.plans[split], self._context.workload.reader
        records = self._context.workload.dataset.format == "tfrecord"
        lengths = self._records if records else self._samples
        tensor = self._tf.constant(self._tensor)
        sleep = self._preprocess(epoch, accelerator)
        dataset = lengths(split, epoch, accelerator).map(
            lambda length: (tensor, sleep(length)),
            num_parallel_calls=max(1, reader.computation_threads), deterministic=True,
        )  # fmt: skip
        dataset = dataset.batch(plan.batch, drop_remainder=True)
        if reader.prefetch_size:
            dataset = dataset.prefetch(reader.prefetch_size)
        return _IteratorSource(
            iter(dataset), plan.batch, "tf.data", lambda batch: int(batch[1].numpy().sum())
        )

    def _records(self, split: str, epoch: int, accelerator: int) -> Any:
        """Lengths of samples as tf.data reads them from this accelerator's TFRecord files, without end."""
        tf, reader = self._tf, self._context.workload.reader
        plan, paths = self._context.plans[split], list(self._context.files[split])
        key = (plan.seed, epoch if plan.new_order else 0)
        if reader.file_shuffle != "off":
            np.random.default_rng(key).shuffle(paths)
        shared = len(paths) < plan.accelerators  # then each reads every file, and keeps its part
        own = paths if shared else paths[accelerator :: plan.accelerators]
        threads = max(1, min(reader.read_threads, len(own)))
        dataset = tf.data.Dataset.from_tensor_slices(own).interleave(
            lambda path: tf.data.TFRecordDataset(path, buffer_size=reader.transfer_size),
            cycle_length=threads, num_parallel_calls=threads, deterministic=True,
        )  # fmt: skip
        if shared:
            dataset = dataset.shard(plan.accelerators, accelerator)
        if reader.sample_shuffle != "off":
            dataset = dataset.shuffle(reader.shuffle_size, seed=key[0] * 1000 + key[1])
        fields = {"image": tf.io.FixedLenFeature([], tf.string)}
        return dataset.repeat().map(
            lambda record: tf.strings.length(tf.io.parse_single_example(record, fields)["image"]),
            num_parallel_calls=max(1, reader.computation_threads), deterministic=True,
        )  # fmt: skip

    def _samples(self, split: str, epoch: int, accelerator: int) -> Any:
        """Lengths of the samples that the plan gives this accelerator, read by Python."""
        tf, plan = self._tf, self._context.plans[split]

        def indices(step: int) -> Any:
            return plan.indices(epoch, accelerator, int(step))

        def read(index: int) -> Any:
            return np.int32(_read_sample(self._context, split, int(index)).nbytes)

        def ordered(step: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(indices, [step], tf.int64), [plan.batch])

        def length(index: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(read, [index], tf.int32), [])

        threads = max(1, self._context.workload.reader.read_threads)
        dataset = tf.data.Dataset.range(plan.steps).map(ordered).unbatch()
        return dataset.map(length, num_parallel_calls=threads, deterministic=True)

    def _preprocess(self, epoch: int, accelerator: int) -> Any:
        """What is done to each sample: nothing, or sleeping."""
        times = self._context.workload.reader.preprocess_time
        if not times.mean_s:
            return lambda length: length
        random = np.random.default_rng((epoch, accelerator))

        def sleep(length: Any) -> Any:
            time.sleep(float(times.draw(random, 1)[0]))
            return length

        tf = self._tf
        return lambda length: tf.ensure_shape(tf.numpy_function(sleep, [length], tf.int32), [])


class _CustomEngine(Engine):
    """custom:MODULE:CLASS: a class that the user names.

    class MyEngine:
        def __init__(self, context): ...                      # an EngineContext
        def open(self, split, epoch, accelerator):            # an iterator of batches
            for step in range(context.plans[split].steps):
                indices = context.plans[split].indices(epoch, accelerator, step)
                yield read(context.paths(split, indices))     # a batch; its `nbytes`, if it has any
        def close(self): ...                                  # may be missing
    """

    ahead = False

    def __init__(self, context: EngineContext, named: str) -> None:
        self.name = f"custom:{named}"
        self._context = context
        module, _, name = named.partition(":")
        if not module or not name:
            raise BenchError(f"reader.engine is custom:{named}, expected custom:MODULE:CLASS.")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as e:
            raise BenchError(
                f"the engine custom:{named} cannot be imported: {e}.",
                next_step="Its folder must be in PYTHONPATH.",
            ) from e
        with _named(f"the engine {self.name}"):
            self._engine = kind(context)

    def open(self, split: str, epoch: int, accelerator: int) -> _IteratorSource:
        with _named(f"the engine {self.name}"):
            batches = iter(self._engine.open(split, epoch, accelerator))
        return _IteratorSource(
            batches, self._context.plans[split].batch, f"the engine {self.name}",
            lambda batch: int(getattr(batch, "nbytes", 0)),
        )  # fmt: skip

    def close(self) -> None:
        if hasattr(self._engine, "close"):
            with _named(f"the engine {self.name}"):
                self._engine.close()


# -- by name ---------------------------------------------------------------------------------------

_ENGINES: Final = ("headrace", "torch", "tensorflow", "null")


def engine_name(loaded: LoadedWorkload) -> str:
    """The engine's name, checked against what it can do.

    Raises:
        WorkloadError: there is no such engine, or it cannot do what the workload asks for.
    """
    reader = loaded.workload.reader
    if reader.engine.startswith("custom:"):
        return reader.engine
    if reader.engine not in _ENGINES:
        raise WorkloadError(
            f"{loaded.at('reader.engine')} is {reader.engine!r}, expected one of "
            f"{', '.join(_ENGINES)} or custom:MODULE:CLASS."
        )
    if reader.data_loader == "synthetic":
        return "null"
    of_framework = reader.engine in ("torch", "tensorflow")
    ours = "++workload.reader.engine=headrace"
    if loaded.workload.dataset.requests is not None and of_framework:
        raise WorkloadError(
            f"{loaded.at('reader.engine')} is {reader.engine}: recorded files are read, not decoded.",
            next_step=f"Give {ours}, or leave out the exact requests: ++workload.dataset.requests=null.",
        )
    if reader.odirect and of_framework:
        raise WorkloadError(
            f"{loaded.at('reader.odirect')} is not done by the engine {reader.engine}.",
            next_step=f"Give {ours}.",
        )
    return reader.engine


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make an engine.

    Raises:
        MissingPackage: its framework is not installed.
        BenchError: its class is not there, or memory does not suffice.
    """
    if name == "headrace":
        from headrace.bench.engines.native import native_engine

        return native_engine(context)
    kinds: dict[str, Callable[[EngineContext], Engine]] = {
        "null": _NullEngine, "torch": _TorchEngine, "tensorflow": _TensorFlowEngine,
    }  # fmt: skip
    own = partial(_CustomEngine, named=name.removeprefix("custom:"))
    return kinds.get(name, own)(context)
