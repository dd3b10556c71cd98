"""TensorFlow's tf.data as the engine, as training scripts and DLIO build it.

TFRecord files are read by tf.data itself: files in the epoch's order, `read_threads` side by side in pieces of
`transfer_size`, samples shuffled in a window of `shuffle_size`, parsed by `computation_threads`. Other formats
have no reader there: their samples are read by Python, `read_threads` at a time, in the order of the plan. A
tensor of the size that the workload asks for, made before, is handed on, as DLIO does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.emulate.engines.base import Delivered, Engine
from headrace.bench.formats import format_of
from headrace.errors import BenchError

if TYPE_CHECKING:
    from headrace.bench.emulate.engines.base import EngineContext

__all__ = ["TensorFlowEngine"]


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
