"""tf.data over files and over TFRecord, and headrace's adapter, all in TensorFlow.

tf.data as its performance guide writes it: parallel maps and prefetch left to AUTOTUNE. TensorFlow
hands out strings, whose stamps are cut out inside TensorFlow: a copy of every byte into Python would
measure Python.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import datasets
from benchmarks.check import FlatBatch, Stamped
from benchmarks.loaders import Plain
from benchmarks.loaders.openread import sample_paths

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.check import Batch
    from benchmarks.datasets import DataSet

SHUFFLE_BUFFER = 2048
"""Records that TFRecord's shuffle holds: 225 MB of data set A."""


class _TensorFlow(Plain):
    """What the engines share: the import, and the stamps of strings."""

    def load(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow as tf

        self._tf: Any = tf
        tf.constant(0)  # starts the runtime, which is not measured

    def _stamped(self, strings: Any) -> Stamped:
        tf = self._tf
        heads = tf.io.decode_raw(tf.strings.substr(strings, 0, 8), tf.int64)
        tails = tf.io.decode_raw(tf.strings.substr(strings, -8, 8), tf.int64)
        return Stamped(
            heads=heads.numpy().reshape(-1).view(np.uint64),
            tails=tails.numpy().reshape(-1).view(np.uint64),
            nbytes=int(tf.reduce_sum(tf.strings.length(strings))),
        )


class Files(_TensorFlow):
    """A shuffled list of paths and `tf.io.read_file`."""

    form = "files"

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._paths = np.array(sample_paths(data, path))

    def batches(self, seed: int) -> Iterator[Batch]:
        tf = self._tf
        order = datasets.epoch_order(self._data, seed)
        read = (
            tf.data.Dataset.from_tensor_slices(self._paths[order])
            .map(tf.io.read_file, num_parallel_calls=tf.data.AUTOTUNE)
            .batch(self._data.batch_size)
            .prefetch(tf.data.AUTOTUNE)
        )
        return map(self._stamped, read)


class Records(_TensorFlow):
    """TFRecord shards, read in parallel, with a shuffle buffer."""

    form = "tfrecord"
    order = f"shards, then a buffer of {SHUFFLE_BUFFER}"

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._shards = sorted(map(str, path.glob("*.tfrecord")))

    def batches(self, seed: int) -> Iterator[Batch]:
        tf = self._tf
        shards = np.random.default_rng(seed).permutation(np.array(self._shards))
        read = (
            tf.data.TFRecordDataset(shards, num_parallel_reads=tf.data.AUTOTUNE)
            .shuffle(SHUFFLE_BUFFER, seed=seed)
            .batch(self._data.batch_size)
            .prefetch(tf.data.AUTOTUNE)
        )
        return map(self._stamped, read)


class Headrace(_TensorFlow):
    """headrace's buffer in TensorFlow."""

    form = "headrace"
    _elements = "buffer"

    def load(self) -> None:
        super().load()
        import headrace as hr
        from headrace.tensorflow import Loader

        self._open, self._loader = hr.open, Loader

    def open(self, data: DataSet, path: Path) -> None:
        self._data = data
        self._store = self._open(path)

    def batches(self, seed: int) -> Iterator[Batch]:
        size = self._data.batch_size
        made = self._loader(self._store, size, seed=seed, elements=self._elements)
        return map(self._checked, made.dataset())

    def _checked(self, batch: Any) -> Batch:
        labelled = self._data.samples >= datasets.CLASSES
        starts = batch["offsets"].numpy()
        return FlatBatch(
            data=np.from_dlpack(batch["data"]),  # no copy
            starts=starts,
            ends=starts + batch["lengths"].numpy(),
            labels=batch["labels"].numpy() if labelled else None,
        )


class HeadraceFiles(Headrace):
    """The same over the folder of files, in place."""

    form = "files"


class HeadraceStrings(Headrace):
    """headrace's samples as TensorFlow's strings."""

    _elements = "strings"

    def _checked(self, batch: Any) -> Batch:
        return self._stamped(batch[0])
