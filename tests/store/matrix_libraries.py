"""The rest of the matrix: data sets of libraries that are too large to be among the tests' packages.

Where such a library is installed, its lines are held, too; else they are skipped by name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .matrix import COUNT, PICTURES, ROWS, TOKENS, shards, source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .matrix import Sample


def read_tfrecord(root: Path) -> list[Sample]:
    import tensorflow as tf

    paths = [str(path) for path in sorted(root.iterdir())]
    return [(bytes(record.numpy()), -1) for record in tf.data.TFRecordDataset(paths)]


@source("TFRecord", "tensorflow", read=read_tfrecord)
def tfrecord(root: Path) -> Path:
    import tensorflow as tf

    (root / "set").mkdir()
    for k, numbers in enumerate(shards()):
        with tf.io.TFRecordWriter(str(root / "set" / f"{k}.tfrecord")) as writer:
            for i in numbers:
                writer.write(PICTURES[i])
    return root / "set"


def read_array_record(path: Path) -> list[Sample]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path))
    return [(bytes(data), -1) for data in reader.read_all()]


@source("ArrayRecord", "array_record", in_place=False, counted=False, read=read_array_record)
def array_record(root: Path) -> Path:
    from array_record.python.array_record_module import ArrayRecordWriter

    path = root / "set.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for data in PICTURES:
        writer.write(data)
    writer.close()
    return path


def read_mds(convert: Callable[[Any], Any]) -> Callable[[Any], list[Sample]]:
    def read(root: Path) -> list[Sample]:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        rows = StreamingDataset(local=str(root), shuffle=False, batch_size=1)
        return [(convert(rows[i]), int(rows[i].get("label", -1))) for i in range(len(rows))]

    return read


def write_mds(root: Path, columns: dict[str, str], rows: Iterator[dict[str, Any]]) -> Path:
    from streaming import MDSWriter

    with MDSWriter(out=str(root / "set"), columns=columns, size_limit=8192) as out:
        for row in rows:
            out.write(row)
    return root / "set"


@source("MDS", "streaming", read=read_mds(lambda row: {"image": row["image"]}))
def mds(root: Path) -> Path:
    rows = ({"image": PICTURES[i], "label": i % 5} for i in range(COUNT))
    return write_mds(root, {"image": "bytes", "label": "int"}, rows)


@source("MDS, tokens", "streaming", read=read_mds(lambda row: {"tokens": row["tokens"].tobytes()}))
def mds_tokens(root: Path) -> Path:
    rows = ({"tokens": tokens.astype(np.uint16)} for tokens in TOKENS)
    return write_mds(root, {"tokens": "ndarray:uint16"}, rows)


def write_litdata(root: Path, items: Iterator[Any], **options: Any) -> Path:
    from litdata.streaming.writer import BinaryWriter

    (root / "set").mkdir()
    writer = BinaryWriter(str(root / "set"), chunk_bytes=8192, **options)
    for i, item in enumerate(items):
        writer[i] = item
    writer.done()
    writer.merge()
    return root / "set"


def read_litdata(convert: Callable[[Any], Sample]) -> Callable[[Any], list[Sample]]:
    def read(root: Path) -> list[Sample]:
        from litdata import StreamingDataset

        rows = StreamingDataset(str(root), shuffle=False)
        return [convert(rows[i]) for i in range(len(rows))]

    return read


@source(
    "LitData, rows in Arrow", "litdata", read=read_litdata(lambda row: (row["image"], row["label"]))
)
def litdata_rows(root: Path) -> Path:
    return write_litdata(root, ({"image": PICTURES[i], "label": i % 5} for i in range(COUNT)))


@source("LitData, bytes", "litdata", read=read_litdata(lambda data: (bytes(data), -1)))
def litdata_bytes(root: Path) -> Path:
    return write_litdata(root, iter(PICTURES))


def numbers_of(row: Any) -> Sample:
    return {"x": row["x"].numpy().tobytes()}, int(row["label"])


@source("LitData, tensors", "litdata", read=read_litdata(numbers_of))
def litdata_tensors(root: Path) -> Path:
    import torch

    rows = ROWS.reshape(COUNT, -1)
    items = ({"x": torch.from_numpy(rows[i]), "label": i % 5} for i in range(COUNT))
    return write_litdata(root, items)


def read_litdata_tokens(root: Path) -> list[Sample]:
    """LitData reads blocks over the borders of documents: all of a chunk's tokens are compared."""
    from litdata import StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    rows = StreamingDataset(str(root), item_loader=TokensLoader(block_size=1), shuffle=False)
    tokens = np.array([int(rows[i][0]) for i in range(len(rows))], np.int32)
    bounds = np.cumsum([0, *map(len, TOKENS)])
    return [(tokens[a:b].tobytes(), -1) for a, b in pairwise(bounds)]


@source("LitData, tokens", "litdata", read=read_litdata_tokens)
def litdata_tokens(root: Path) -> Path:
    import torch
    from litdata.streaming.item_loader import TokensLoader

    items = (torch.from_numpy(tokens.astype(np.int32)) for tokens in TOKENS)
    return write_litdata(root, items, item_loader=TokensLoader())


def read_megatron(path: Path) -> list[Sample]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    rows = IndexedDataset(str(path.with_suffix("")), mmap=False)
    samples = [(rows[i].tobytes(), -1) for i in range(len(rows))]
    # The index stays open: its class keeps the last ones in a cache. Where it ends, it closes its mapping while
    # its own arrays look into it, which is an error; so its mapping ends with the arrays.
    del rows.index.bin_buffer_mmap
    type(rows.index).__getitem__.cache_clear()
    return samples


@source("Megatron's .bin and .idx", "megatron.core", read=read_megatron)
def megatron(root: Path) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(root / "set.bin"), dtype=np.uint16)
    for tokens in TOKENS:
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(root / "set.idx"))
    return root / "set.bin"
