"""Data sets: a DLIO workload's `dataset` section, and which samples each accelerator reads when.

Names, folders and sizes are DLIO's to the byte: a data set that DLIO generated is found and read from the
same spec, and the other way round. Nothing here touches a disk but a record.

DLIO knows two kinds of sample. Without `record_dims` a sample is a matrix whose sides are drawn for each
file, around the root of `record_length_bytes`; the draw is seeded, so it needs all files before. With
`record_dims` all samples have that shape.

With `dataset.requests` files, sizes and order are those of a recorded job: the files have the recorded names
and sizes, whatever their format; generated ones hold noise, and the recorded folder itself is as good. Each
epoch asks for the recorded samples in the recorded order; where a run is longer than the record, it begins
again. Decoding and computing take their recorded times, one by one, unless the workload is given others.

A plan says which samples each accelerator reads in each step: a pure function of epoch, accelerator and step.
Shuffles are real: of all samples when samples are shuffled, of files when only files are. Without a shuffle
each accelerator reads a contiguous part, as DLIO does.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from headrace.bench.values import (
    NO_TIME,
    TimeDistribution,
    boolean,
    check_fields,
    choice,
    integer,
    integers,
    key,
    keys_of,
    number,
    optional,
    text,
)
from headrace.errors import RecordError, WorkloadError
from headrace.order import Shuffled
from headrace.trace.recorded import SPLITS, read_recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.config import LoadedWorkload
    from headrace.trace.recorded import Recorded


@dataclass(frozen=True, slots=True)
class RecordedOrder:
    """The order of a split's samples.

    Attributes:
        places: int64 (reads,): samples, counted over the files in name order and their offsets.
        starts: int64 (epochs + 1,): where each epoch begins.
        work_s: float64 (reads,): what who read did after each, as decoding; empty: as the workload says.
        compute_s: float64 (steps,): of each step in turn, epoch after epoch; likewise.
        opens: bool (reads,): whether the file was opened for each; of evaluation it is not known: empty.
        extents: int64 (3, samples): each sample's file, offset and bytes.
    """

    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    extents: NDArray[np.int64]
    opens: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    work_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    compute_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def reads(self) -> int:
        """Of an epoch: the first one's."""
        return int(self.starts[1]) if len(self.starts) > 1 else 0

    def slice(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The samples of reads `start` to `stop` of an epoch, from 1; its last step may be shorter."""
        return self.places[self.at(epoch, start, stop)]

    def at(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Where these reads stand among all of the record."""
        number = (epoch - 1) % (len(self.starts) - 1)
        first, length = int(self.starts[number]), int(np.diff(self.starts)[number])
        # An epoch that is shorter than the first begins again: all have as many steps.
        reads: NDArray[np.int64] = first + np.arange(start, min(stop, self.reads)) % max(1, length)
        return reads


class Replay:
    """A record as a benchmark's data set."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self._files = {split: recorded.files_of(split) for split in SPLITS}
        self._of_name = {name: i for i, name in enumerate(recorded.names)}

    def names(self, split: str) -> list[str]:
        """A split's files, in the order in which they are counted."""
        return [self.recorded.names[i] for i in self._files[split].tolist()]

    def name(self, split: str, index: int) -> str:
        """The name of one of them."""
        return self.recorded.names[int(self._files[split][index])]

    def folders(self, split: str) -> list[str]:
        """Where they lie, relative to the data folder."""
        return sorted({os.path.dirname(name) for name in self.names(split)})

    def file_bytes(self) -> NDArray[np.int64]:
        """Sizes of all files, training's first: int64 (files,)."""
        order = np.concatenate([self._files[split] for split in SPLITS])
        sizes: NDArray[np.int64] = self.recorded.file_bytes[order]
        return sizes

    def has(self, name: str) -> bool:
        """Whether a file is of the record."""
        return name in self._of_name

    def extents(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and lengths of a file's samples, in the order of offsets."""
        recorded = self.recorded
        rows = np.flatnonzero(recorded.sample_file == self._of_name[name])
        rows = rows[np.argsort(recorded.sample_offset[rows], kind="stable")]
        return recorded.sample_offset[rows], recorded.sample_bytes[rows]

    def order(
        self, split: str, work: TimeDistribution = NO_TIME, computing: TimeDistribution = NO_TIME
    ) -> RecordedOrder:
        """What each epoch reads, with training's recorded times where the workload still has their means."""
        recorded = self.recorded
        rank = np.full(len(recorded.names), -1, np.int64)
        rank[self._files[split]] = np.arange(len(self._files[split]))
        file = rank[recorded.sample_file]
        by_place = np.lexsort((recorded.sample_offset, file))
        by_place = by_place[file[by_place] >= 0]
        place = np.full(len(recorded.sample_file), -1, np.int64)
        place[by_place] = np.arange(len(by_place))
        extents = np.stack([file, recorded.sample_offset, recorded.sample_bytes])[:, by_place]
        if split != "train":
            return RecordedOrder(place[recorded.valid_order], recorded.valid_starts, extents)
        order = RecordedOrder(
            place[recorded.order], recorded.epoch_starts, extents, recorded.open_s > 0
        )
        if _of_mean(recorded.decode_s, work):
            order = replace(order, work_s=self._work_s())
        if _of_mean(recorded.compute_s, computing):
            order = replace(order, compute_s=self._compute_s())
        return order

    def _work_s(self) -> NDArray[np.float64]:
        """From the end of each read to the begin of the batch's next; a batch's last has the usual time."""
        recorded = self.recorded
        if not len(recorded.begin_s) or not recorded.batch:
            return np.zeros(0)
        each = np.diff(recorded.begin_s, append=0.0) - recorded.call_s
        place = np.arange(len(each)) - np.repeat(
            recorded.epoch_starts[:-1], np.diff(recorded.epoch_starts)
        )
        last = place % recorded.batch == recorded.batch - 1
        last[recorded.epoch_starts[1:] - 1] = True
        each[last] = recorded.collate_s + (
            np.median(each[~last]) if (~last).any() else recorded.decode_s.mean()
        )
        return np.maximum(each, 0.0)

    def _compute_s(self) -> NDArray[np.float64]:
        """Of each step; nobody sees how long the last of an epoch computes: it has the usual time."""
        recorded = self.recorded
        seen = recorded.compute_s.astype(float)
        steps = -(-np.diff(recorded.epoch_starts) // max(1, recorded.batch))
        if len(seen) != (steps - 1).sum():  # others were left out, too: which is not known
            return seen
        return np.insert(seen, np.cumsum(steps - 1), np.median(seen))


def _of_mean(recorded: NDArray[np.float32], times: TimeDistribution) -> bool:
    """Whether a workload's times are those of its record: nobody has given others."""
    return bool(len(recorded)) and math.isclose(recorded.mean(), times.mean_s, rel_tol=1e-4)


@lru_cache(maxsize=4)
def _read(path: str, changed_ns: int) -> Replay:  # noqa: ARG001 - another file is read again
    return Replay(read_recorded(Path(path)))


def replay_of(requests: str) -> Replay:
    """The record of a workload. Raises WorkloadError if the file is not there, or damaged."""
    try:
        changed_ns = os.stat(requests).st_mtime_ns if os.path.exists(requests) else 0
        return _read(requests, changed_ns)
    except RecordError as e:
        raise WorkloadError(
            f"dataset.requests: {e.message}", path=requests, next_step=e.next_step
        ) from e


Shuffle = Literal["samples", "files", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A split's epochs: each accelerator takes `steps` steps of `batch` samples in every one of them.

    What does not fill a step of all accelerators is left out. A recorded job's order is instead of a shuffle.
    """

    split: Literal["train", "valid"]
    files: int
    samples_per_file: int
    batch: int
    accelerators: int
    steps: int
    shuffle: Shuffle
    seed: int
    new_order: bool = True
    recorded: RecordedOrder | None = None

    @property
    def samples(self) -> int:
        """Samples of the split."""
        return self.files * self.samples_per_file

    def indices(self, epoch: int, accelerator: int, step: int) -> NDArray[np.int64]:
        """The samples of a step: int64, shape (batch,); sample i lies in file i // samples_per_file.

        Of a recorded job the last step of an epoch may have fewer.
        """
        if self.recorded is not None:
            start = (step * self.accelerators + accelerator) * self.batch
            return self.recorded.slice(epoch, start, start + self.batch)
        key = epoch if self.new_order else 0
        if self.shuffle == "none":
            start = (accelerator * self.steps + step) * self.batch
            return np.arange(start, start + self.batch, dtype=np.int64)
        start = (step * self.accelerators + accelerator) * self.batch
        stop = start + self.batch
        if self.shuffle == "samples":
            return Shuffled(self.samples, self.seed).indices(key, start, stop)
        positions, each = np.arange(start, stop, dtype=np.int64), self.samples_per_file
        first, last = start // each, (stop - 1) // each
        files = Shuffled(self.files, self.seed).indices(key, first, last + 1)
        file, place = files[positions // each - first], positions % each
        samples: NDArray[np.int64] = file * each + place
        return samples


def plan_of(
    loaded: LoadedWorkload, split: Literal["train", "valid"], accelerators: int, seed: int
) -> StepPlan:
    """The plan of a workload's training or evaluation.

    Of a recorded job one accelerator reads all of its order, several what is whole.

    Raises:
        WorkloadError: the data set is too small for a single step.
    """
    data, reader, train = loaded.workload.dataset, loaded.workload.reader, loaded.workload.train
    of_train = split == "train"
    key = "dataset.num_files_train" if of_train else "dataset.num_files_eval"
    files, per_file = data.num_files(split), data.num_samples_per_file
    batch = reader.batch_size if of_train else reader.batch_size_eval
    # An upper bound, as in DLIO.
    most = train.total_training_steps if of_train and train.total_training_steps > 0 else math.inf
    each, order = batch * accelerators, None
    step = f"{accelerators:,} accelerators x {batch:,} samples"
    if data.requests is not None:
        replay = replay_of(data.requests)
        recorded = len(replay.names(split))
        if recorded != files:
            raise WorkloadError(
                f"{loaded.at(key)} is {files:,}, but {data.requests} has {recorded:,}.",
                next_step="A recorded job has as many files as were recorded; to change that leave out "
                "the exact requests: ++workload.dataset.requests=null.",
            )
        order = replay.order(split, reader.preprocess_time, train.computation_time)
        steps = -(-order.reads // each) if accelerators == 1 else order.reads // each
        seed, there, takes = (
            train.seed,
            f"{data.requests}: {order.reads:,} reads of an epoch",
            "It takes",
        )
    else:
        steps = files * per_file // each
        there = f"{loaded.at(key)}: {files:,} files of {per_file:,} samples"
        takes = f"It takes at least {-(-each // per_file):,} files, or"
    if not steps:
        raise WorkloadError(
            f"{there} are 0 steps of {step}, expected at least 1.",
            next_step=f"{takes} fewer accelerators, or a smaller batch.",
        )
    files_alone: Shuffle = "files" if reader.file_shuffle != "off" else "none"
    shuffle: Shuffle = "samples" if reader.sample_shuffle != "off" else files_alone
    return StepPlan(
        split=split, files=files, samples_per_file=per_file, batch=batch,
        accelerators=accelerators, steps=int(min(steps, most)), shuffle=shuffle, seed=seed,
        new_order=train.seed_change_epoch, recorded=order,
    )  # fmt: skip


Format = Literal[
    "tfrecord", "hdf5", "csv", "npz", "npy", "jpeg", "png", "indexed_binary", "mmap_indexed_binary",
    "parquet", "synthetic",
]  # fmt: skip
Compression = Literal["none", "gzip", "zip", "bz2", "xz", "lzf", "snappy", "lz4", "zstd"]
Split = Literal["train", "valid"]

COMPRESSIONS: dict[str, tuple[str, ...]] = {
    "npz": ("none", "zip"),
    "hdf5": ("none", "gzip", "lzf"),
    "csv": ("none", "gzip", "zip", "bz2", "xz"),
    "parquet": ("none", "snappy", "gzip", "lz4", "zstd"),
}
"""What each format can be compressed with; the others cannot."""

_SIZES_SEED = 10
"""DLIO draws the sizes of all files from this seed, whatever the workload's."""

_BYTES_MAX = 1 << 48

NO_TENSOR = "no tensor is made of samples"
"""Why engines that do not decode leave a key alone."""


def _format(value: Any) -> str:
    if value == "hdf5_opt":
        raise ValueError("hdf5: DLIO has a name hdf5_opt, and neither writes nor reads it")
    name: str = choice(*get_args(Format))(value)
    return name


def _folder(value: Any) -> str:
    if "\0" in text(value):
        raise ValueError("a folder's name")
    return text(value).rstrip("/") or "/"


def _prefix(value: Any) -> str:
    if "\0" in text(value) or "/" in text(value):
        raise ValueError("a name without /")
    return text(value)


def _element_type(value: Any) -> str:
    with contextlib.suppress(TypeError):
        if np.dtype(text(value)).kind in "iufc":
            return text(value)
    raise ValueError("a numpy number type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hdf5Spec:
    """`dataset.hdf5`."""

    chunk_dims: tuple[int, ...] = key((), integers(1))
    """Shape of the chunks, with the samples' axis; empty for contiguous data."""
    num_dset_per_record: int = key(1, integer(1))
    """A record is spread over so many data sets, along its first dimension."""
    max_shape: tuple[int, ...] = key((), integers(1))
    """To what a record's shape could grow; empty for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of `dataset.parquet.columns`. Raises ValueError if a value makes no sense."""

    name: str = key("data", text)
    dtype: str = key("float32", choice(
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "list", "string", "binary", "bool",
    ))  # fmt: skip
    """A numpy number type, or list (of float32), string, binary, bool."""
    size: int = key(1, integer(1))
    """Elements of a row: above 1 a list of fixed length; bytes of a `binary` row."""
    read: bool = key(True, boolean)
    """Whether training reads the column."""

    def __post_init__(self) -> None:
        check_fields(self, f"parquet.columns.{self.name}")


def _columns(value: Any) -> tuple[Column, ...]:
    """Columns of mappings, or of names alone."""
    columns = []
    for given in value:
        if isinstance(given, dict):
            if unknown := given.keys() - keys_of(Column).keys():
                known = f"expected one of {sorted(keys_of(Column))}"
                raise ValueError(f"dataset.parquet.columns.{min(unknown)} is unknown, {known}")
            columns.append(Column(**given))
        else:
            columns.append(given if isinstance(given, Column) else Column(name=given))
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise ValueError("columns of names that differ")
    return tuple(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSpec:
    """`dataset.parquet`."""

    columns: tuple[Column, ...] = key((), _columns)
    """Empty: one column `data` that holds a sample's bytes as a list."""
    row_group_size: int = key(1024, integer(1))
    """Rows of a row group."""
    partition_by: str | None = key(
        None, optional(text), only=(None,), reason="files would be named anew"
    )
    """DLIO's Hive-style folders."""
    generation_batch_size: int = key(0, integer(0))
    """Rows that are generated at a time; 0: a row group's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A data set: how many files, samples and bytes, in which format and where.

    Raises:
        ValueError: a value makes no sense; says the field, what was found and what was expected.
    """

    data_folder: str = key("./data", _folder)
    """`train/` and `valid/` lie in it."""
    format: Format = key("tfrecord", _format)  # noqa: RUF009 - a field
    num_files_train: int = key(8, integer(0))
    num_files_eval: int = key(0, integer(0))
    num_samples_per_file: int = key(1, integer(1))
    record_length_bytes: float = key(65536, number(1, _BYTES_MAX))
    """Bytes of a sample, about: a square matrix of bytes with the root of this as its side."""
    record_length_bytes_stdev: float = key(0, number(0, _BYTES_MAX))
    """Standard deviation of `record_length_bytes` from file to file."""
    record_length_bytes_resize: float = key(
        0, number(0, _BYTES_MAX), unused=NO_TENSOR, engines=("torch", "tensorflow")
    )
    """Bytes of what is handed to the trainer; 0: as `record_length_bytes`."""
    record_dims: tuple[int, ...] = key((), integers(1))
    """The shape of all samples, instead of `record_length_bytes`."""
    record_element_type: str = key("uint8", _element_type)
    """numpy's name of the elements' type."""
    num_subfolders_train: int = key(0, integer(0))
    num_subfolders_eval: int = key(0, integer(0))
    file_prefix: str = key("img", _prefix)
    compression: Compression = key("none", choice(*get_args(Compression)))  # noqa: RUF009 - a field
    compression_level: int = key(4, integer(0))
    hdf5: Hdf5Spec = field(default_factory=Hdf5Spec)
    parquet: ParquetSpec = field(default_factory=ParquetSpec)
    generation_buffer_size: int = key(
        2 << 30, integer(1), unused="files of any size are streamed from small buffers"
    )
    """DLIO's buffer."""
    keep_files: bool = key(True, boolean)
    """Whether the data set stays when the run is over."""
    seed: int = 123
    """Of the samples' content. Sizes do not depend on it, as in DLIO."""
    requests: str | None = key(None, optional(text))
    """A recorded job's exact requests: the files have its names and sizes, and it says the order."""

    def __post_init__(self) -> None:
        check_fields(self, "dataset")
        compressions = COMPRESSIONS.get(self.format, ("none",))
        stdev, dims = self.record_length_bytes_stdev, self.record_dims
        expected = {
            "compression": (self.compression in compressions, f"one of {', '.join(compressions)}"),
            "record_length_bytes_stdev": (not (dims and stdev), "0 with record_dims"),
        }
        if self.requests is None and (image := self.format) in ("jpeg", "png"):
            if len(dims) > 2:  # DLIO's words
                count = len(dims)
                raise ValueError(
                    f"dataset.record_dims: {image} format does not support more than 2 dimensions, but got "
                    f"{count} dimensions."
                )
            expected |= {
                "num_samples_per_file": (self.num_samples_per_file == 1, f"1: a {image} is one sample"),
                "record_dims": (len(dims) in (0, 2), f"2 dimensions for {image}"),
            }  # fmt: skip
            object.__setattr__(self, "record_element_type", "uint8")  # as DLIO makes them
        pieces = self.hdf5.num_dset_per_record
        if self.requests is None and pieces > 1:
            fits = bool(dims) and dims[0] % pieces == 0
            expected["hdf5.num_dset_per_record"] = fits, f"a divisor of record_dims[0] {dims[:1]}"
        for name, (right, what) in expected.items():
            if not right:
                value = attrgetter(name)(self)
                raise ValueError(f"dataset.{name} is {value!r}, expected {what}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The samples' element type."""
        return np.dtype(self.record_element_type)

    @property
    def extension(self) -> str:
        """What the files' names end with, without the dot."""
        if self.format == "csv" and self.compression != "none":
            return "csv." + {"gzip": "gz"}.get(self.compression, self.compression)
        return self.format

    @property
    def nominal_bytes(self) -> float:
        """Bytes of a sample as DLIO counts them in MB/s: not what a file really holds."""
        if self.record_dims:
            return math.prod(self.record_dims) * self.dtype.itemsize
        return self.record_length_bytes

    @property
    def resized_shape(self) -> tuple[int, int]:
        """Shape of the uint8 matrix that is handed to the trainer for each sample."""
        side = max(1, int(math.sqrt(self.record_length_bytes_resize or self.nominal_bytes)))
        return side, side

    def num_files(self, split: Split) -> int:
        """Files of a split."""
        return self.num_files_train if split == "train" else self.num_files_eval

    def num_samples(self, split: Split) -> int:
        """Samples of a split."""
        return self.num_files(split) * self.num_samples_per_file

    @property
    def total_files(self) -> int:
        """Files of both splits."""
        return self.num_files_train + self.num_files_eval

    def subfolders(self, split: Split) -> tuple[str, ...]:
        """Folders of a split's files, relative to `data_folder`; one is the split itself."""
        if self.requests is not None:
            return tuple(replay_of(self.requests).folders(split))
        count = self.num_subfolders_train if split == "train" else self.num_subfolders_eval
        if count <= 1:
            return (split,)
        digits = len(str(count))
        return tuple(f"{split}/{i:0{digits}}" for i in range(count))

    def file_name(self, split: Split, index: int) -> str:
        """Path of a split's file, relative to `data_folder`."""
        count = self.num_files(split)
        if not 0 <= index < count:
            raise IndexError(f"{split} file {index} of {count}")
        if self.requests is not None:
            return replay_of(self.requests).name(split, index)
        folders = self.num_subfolders_train if split == "train" else self.num_subfolders_eval
        folder = f"{split}/{index % folders:0{len(str(folders))}}" if folders > 1 else split
        return f"{folder}/{self.file_prefix}_{index:0{len(str(count))}}_of_{count}.{self.extension}"

    def path(self, split: Split, index: int) -> str:
        """Path of a split's file."""
        return os.path.join(self.data_folder, self.file_name(split, index))

    def files(self) -> Iterator[tuple[Split, int]]:
        """All files, in the order in which DLIO numbers them: training, then evaluation."""
        splits: tuple[Split, ...] = get_args(Split)
        for split in splits:
            for index in range(self.num_files(split)):
                yield split, index

    def number(self, split: Split, index: int) -> int:
        """A file's number among all files."""
        return index if split == "train" else self.num_files_train + index

    def sample_shapes(self) -> NDArray[np.int64]:
        """The shapes of all files' samples, without the axis of the samples.

        Returns:
            int64 (files, dimensions). The draw depends on the number of all files, as in DLIO: a
            shorter data set is not the beginning of a longer one. Of a recorded job's files: (files, 1),
            of the whole file.
        """
        if self.requests is not None:
            return replay_of(self.requests).file_bytes().reshape(-1, 1)
        if self.record_dims:
            return np.tile(np.array(self.record_dims, np.int64), (self.total_files, 1))
        side = int(math.sqrt(self.record_length_bytes))
        stdev = self.record_length_bytes_stdev / 2.0 / math.sqrt(self.record_length_bytes)
        if not stdev:
            return np.full((self.total_files, 2), side, np.int64)
        # The legacy generator is the one whose numbers DLIO's files have.
        drawn = np.random.RandomState(_SIZES_SEED).normal(side, stdev, 2 * self.total_files)
        # DLIO's int() cuts towards zero, as does the cast.
        return np.maximum(drawn.astype(np.int64), 1).reshape(-1, 2)

    def sample_bytes(self) -> NDArray[np.int64]:
        """Bytes of one sample of each file, as an array of its type; int64 (files,)."""
        sizes: NDArray[np.int64] = self.sample_shapes().prod(axis=1) * self.dtype.itemsize
        return sizes if self.requests is None else sizes // self.num_samples_per_file
