"""PyTorch's DataLoader, TensorFlow's tf.data and a class of the user's as engines.

Both frameworks decode each sample as a training script does, and hand on a tensor of the size that the workload
asks for, made before, as DLIO does: what is measured is reading and decoding, not resizing.

custom:MODULE:CLASS names a class such as

class MyEngine:
    def __init__(self, context): ...                      # an EngineContext
    def open(self, split, epoch, accelerator):            # an iterator of batches
        for step in range(context.plans[split].steps):
            indices = context.plans[split].indices(epoch, accelerator, step)
            yield read(context.paths(split, indices))     # a batch; its `nbytes`, if it has any
    def close(self): ...                                  # may be missing
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.engines.base import Delivered, Engine
from headrace.bench.formats import format_of
from headrace.errors import BenchError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.engines.base import EngineContext


class TorchEngine(Engine):
    """A DataLoader for each accelerator and epoch.

    Raises:
        BenchError: torch is not installed.
    """

    name = "torch"
    ahead = False

    def __init__(self, context: EngineContext) -> None:
        try:
            import torch.utils.data
        except ModuleNotFoundError as e:
            raise BenchError(
                "the engine torch needs PyTorch, which is not installed.",
                next_step="pip install 'headrace[torch]'",
            ) from e
        self._torch: Any = torch
        self._context = context

    def open(self, split: str, epoch: int, accelerator: int) -> _LoaderSource:
        """Start the workers."""
        data = torch_utils_data(self._torch)
        reader, plan = self._context.workload.reader, self._context.plans[split]
        workers = reader.read_threads
        options: dict[str, Any] = {}
        if workers:
            factor = -(-reader.prefetch_size // workers) if reader.prefetch_size > 0 else 2
            options = {
                "prefetch_factor": factor, "timeout": self._context.deadline_s,
                "multiprocessing_context": reader.multiprocessing_context,
            }  # fmt: skip
        loader = data.DataLoader(
            Samples(self._context, split),
            batch_sampler=Batches(self._context, split, epoch, accelerator),
            num_workers=workers,
            pin_memory=reader.pin_memory and self._torch.cuda.is_available(),
            **options,
        )
        return _LoaderSource(iter(loader), plan.batch)


def torch_utils_data(torch: Any) -> Any:
    """The module, which importing torch loads."""
    return torch.utils.data


class Samples:
    """A map-style data set over the workload's files; goes to workers by fork or by pickling."""

    def __init__(self, context: EngineContext, split: str) -> None:
        self._data = context.workload.dataset
        self._plan = context.plans[split]
        self._files = context.files[split]
        self._preprocess = context.workload.reader.preprocess_time
        self._random: np.random.Generator | None = None
        reader = context.workload.reader
        shape = reader.transformed_record_dims or self._data.resized_shape
        self._tensor = np.zeros(shape, reader.transformed_record_element_type)

    def __len__(self) -> int:
        return self._plan.samples

    def __getitem__(self, index: int) -> Any:
        from headrace.bench.formats import format_of

        file, sample = divmod(index, self._plan.samples_per_file)
        path = self._files[file]
        reader = format_of(self._data).open_reader(path, self._data)
        try:
            reader.sample(sample)
        finally:
            reader.close()
        self._sleep()
        return self._tensor

    def _sleep(self) -> None:
        if self._preprocess.mean_s:
            import time

            if self._random is None:
                self._random = np.random.default_rng()
            time.sleep(float(self._preprocess.draw(self._random, 1)[0]))


class Batches:
    """A batch sampler over the accelerator's plan."""

    def __init__(self, context: EngineContext, split: str, epoch: int, accelerator: int) -> None:
        self._plan = context.plans[split]
        self._epoch = epoch
        self._accelerator = accelerator

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._plan.steps):
            yield self._plan.indices(self._epoch, self._accelerator, step).tolist()


class _LoaderSource:
    def __init__(self, batches: Any, batch: int) -> None:
        self._batches = batches
        self._delivered = Delivered(batch, 0)

    def next(self) -> Delivered:
        try:
            next(self._batches)
        except StopIteration:
            raise BenchError("the DataLoader ended before the epoch did.") from None
        except (OSError, RuntimeError, ValueError) as e:
            raise BenchError(f"the DataLoader failed: {e}") from e
        return self._delivered

    def close(self) -> None:
        self._batches = None


class TensorFlowEngine(Engine):
    """A tf.data.Dataset for each accelerator and epoch.

    Raises:
        BenchError: TensorFlow is not installed.
    """

    name = "tensorflow"
    ahead = False

    def __init__(self, context: EngineContext) -> None:
        os.environ.setdefault(
            "TF_CPP_MIN_LOG_LEVEL", "2"
        )  # its log of CPU features, on every start
        try:
            self._tf: Any = importlib.import_module("tensorflow")
        except ModuleNotFoundError as e:
            raise BenchError(
                "the engine tensorflow needs TensorFlow, which is not installed.",
                next_step="pip install tensorflow",
            ) from e
        with contextlib.suppress(RuntimeError):  # somebody computes on it already
            self._tf.config.set_visible_devices([], "GPU")  # else it takes all of its memory
        self._context = context
        reader, data = context.workload.reader, context.workload.dataset
        shape = reader.transformed_record_dims or data.resized_shape
        self._tensor = np.zeros(shape, reader.transformed_record_element_type)

    def open(self, split: str, epoch: int, accelerator: int) -> _DatasetSource:
        """Start tf.data's threads."""
        plan, reader = self._context.plans[split], self._context.workload.reader
        records = self._context.workload.dataset.format == "tfrecord"
        lengths = self._records if records else self._samples
        dataset = lengths(split, epoch, accelerator)
        tensor = self._tf.constant(self._tensor)
        sleep = self._preprocess(epoch, accelerator)
        parallel = max(1, reader.computation_threads)
        dataset = dataset.map(
            lambda length: (tensor, sleep(length)), num_parallel_calls=parallel, deterministic=True
        )
        dataset = dataset.batch(plan.batch, drop_remainder=True)
        if reader.prefetch_size:
            dataset = dataset.prefetch(reader.prefetch_size)
        return _DatasetSource(iter(dataset), plan.batch)

    def _records(self, split: str, epoch: int, accelerator: int) -> Any:
        """Lengths of samples as tf.data reads them from this accelerator's TFRecord files, without end."""
        tf, reader = self._tf, self._context.workload.reader
        plan, paths = self._context.plans[split], list(self._context.files[split])
        key = (plan.seed, epoch if plan.new_order else 0)
        if reader.file_shuffle != "off":
            np.random.default_rng(key).shuffle(paths)
        mine = paths[accelerator :: plan.accelerators]
        shared = len(paths) < plan.accelerators  # then each reads every file, and keeps its part
        files = tf.data.Dataset.from_tensor_slices(paths if shared else mine)
        threads = max(1, min(reader.read_threads, len(paths if shared else mine)))
        dataset = files.interleave(
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
        data, files = self._context.workload.dataset, self._context.files[split]
        module = format_of(data)

        def indices(step: int) -> Any:
            return plan.indices(epoch, accelerator, int(step))

        def read(index: int) -> Any:
            file, sample = divmod(int(index), plan.samples_per_file)
            reader = module.open_reader(files[file], data)
            try:
                return np.int32(reader.sample(sample).nbytes)
            finally:
                reader.close()

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


class _DatasetSource:
    def __init__(self, batches: Any, batch: int) -> None:
        self._batches = batches
        self._batch = batch

    def next(self) -> Delivered:
        try:
            _, lengths = next(self._batches)
        except StopIteration:
            raise BenchError("tf.data ended before the epoch did.") from None
        except Exception as e:  # tf.errors.OpError, of whose many kinds none is special here
            raise BenchError(f"tf.data failed: {e}") from e
        return Delivered(self._batch, int(lengths.numpy().sum()))

    def close(self) -> None:
        self._batches = None


class CustomEngine(Engine):
    """Runs a class that the user names.

    Raises:
        BenchError: it cannot be imported or made.
    """

    ahead = False

    def __init__(self, context: EngineContext, named: str) -> None:
        self.name = f"custom:{named}"
        self._context = context
        module, _, name = named.partition(":")
        if not module or not name:
            raise BenchError(f"reader.engine is custom:{named}, expected custom:MODULE:CLASS.")
        try:
            made = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as e:
            raise BenchError(
                f"the engine custom:{named} cannot be imported: {e}.",
                next_step="Its folder must be in PYTHONPATH.",
            ) from e
        self._engine = self.call(made, context)

    def open(self, split: str, epoch: int, accelerator: int) -> _IteratorSource:
        """Ask the class for an epoch's batches."""
        batches = iter(self.call(self._engine.open, split, epoch, accelerator))
        return _IteratorSource(self, batches, self._context.plans[split].batch)

    def close(self) -> None:
        """Close the class's object, if it can be."""
        if hasattr(self._engine, "close"):
            self.call(self._engine.close)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call the user's code; what it raises becomes a BenchError that names the engine."""
        try:
            return function(*arguments)
        except (HeadraceError, StopIteration):
            raise
        except Exception as e:
            raise BenchError(f"the engine {self.name} failed: {type(e).__name__}: {e}") from e


class _IteratorSource:
    def __init__(self, engine: CustomEngine, batches: Iterator[Any], batch: int) -> None:
        self._engine = engine
        self._batches = batches
        self._batch = batch

    def next(self) -> Delivered:
        try:
            batch = self._engine.call(next, self._batches)
        except StopIteration:
            raise BenchError(
                f"the engine {self._engine.name} ended before the epoch did.",
                next_step="It must give plan.steps batches.",
            ) from None
        return Delivered(self._batch, int(getattr(batch, "nbytes", 0)))

    def close(self) -> None:
        pass
