"""DatasetSpec: a DLIO workload's `dataset` section, and what follows from it.

Names, folders and sizes are DLIO's to the byte: a data set that DLIO generated is found and read from the
same spec, and the other way round. Nothing here touches a disk.

DLIO knows two kinds of sample. Without `record_dims` a sample is a matrix whose sides are drawn for each
file, around the root of `record_length_bytes`; the draw is seeded, so it needs all files before. With
`record_dims` all samples have that shape.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from headrace.bench.replay import replay_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

Format = Literal[
    "npz", "npy", "hdf5", "tfrecord", "jpeg", "png", "csv",
    "indexed_binary", "mmap_indexed_binary", "parquet", "synthetic",
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

_NUMERIC = (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64",
)  # fmt: skip
_COLUMN_TYPES = (*_NUMERIC, "list", "string", "binary", "bool")


def _refuse(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"dataset.{name} is {value!r}, expected {expected}")


def _whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _refuse(name, value, f"a whole number of at least {low}")


def _dims(name: str, value: object) -> None:
    whole = isinstance(value, tuple) and all(
        isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value
    )
    if not whole:
        raise _refuse(name, value, "positive whole numbers")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _refuse(name, value, f"one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hdf5Spec:
    """`dataset.hdf5`.

    Raises:
        ValueError: a value makes no sense.
    """

    chunk_dims: tuple[int, ...] = ()
    """Shape of the chunks, with the samples' axis; empty for contiguous data."""

    num_dset_per_record: int = 1
    """A record is spread over so many data sets, along its first dimension."""

    max_shape: tuple[int, ...] = ()
    """To what a record's shape could grow; empty for never."""

    def __post_init__(self) -> None:
        _dims("hdf5.chunk_dims", self.chunk_dims)
        _dims("hdf5.max_shape", self.max_shape)
        _whole("hdf5.num_dset_per_record", self.num_dset_per_record, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of `dataset.parquet.columns`.

    Raises:
        ValueError: a value makes no sense.
    """

    name: str = "data"
    dtype: str = "float32"
    """A numpy number type, or list (of float32), string, binary, bool."""
    size: int = 1
    """Elements of a row: above 1 a list of fixed length; bytes of a `binary` row."""
    read: bool = True
    """Whether training reads the column."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise _refuse("parquet.columns.name", self.name, "a name")
        where = f"parquet.columns.{self.name}"
        _one_of(f"{where}.dtype", self.dtype, _COLUMN_TYPES)
        _whole(f"{where}.size", self.size, 1)
        if not isinstance(self.read, bool):
            raise _refuse(f"{where}.read", self.read, "true or false")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSpec:
    """`dataset.parquet`.

    Raises:
        ValueError: a value makes no sense.
    """

    columns: tuple[Column, ...] = ()
    """Empty: one column `data` that holds a sample's bytes as a list."""

    row_group_size: int = 1024
    """Rows of a row group."""

    partition_by: str | None = None
    """DLIO's Hive-style folders. Refused: the files' names would not be the data set's any more."""

    generation_batch_size: int = 0
    """Rows that are generated at a time; 0: a row group's."""

    def __post_init__(self) -> None:
        _whole("parquet.row_group_size", self.row_group_size, 1)
        _whole("parquet.generation_batch_size", self.generation_batch_size, 0)
        names = [c.name for c in self.columns]
        if len(set(names)) < len(names):
            raise _refuse("parquet.columns", names, "names that differ")
        if self.partition_by is not None:
            raise _refuse(
                "parquet.partition_by",
                self.partition_by,
                "none: partitions have file names that no reader of the data set would look for",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """A data set: how many files, samples and bytes, in which format and where.

    Raises:
        ValueError: a value makes no sense; says the field, what was found and what was expected.
    """

    data_folder: str = "./data"
    """`train/` and `valid/` lie in it."""

    format: Format = "tfrecord"
    num_files_train: int = 8
    num_files_eval: int = 0
    num_samples_per_file: int = 1

    record_length_bytes: float = 65536
    """Bytes of a sample, about: a square matrix of bytes with the root of this as its side."""

    record_length_bytes_stdev: float = 0
    """Standard deviation of `record_length_bytes` from file to file."""

    record_length_bytes_resize: float = 0
    """Bytes of what is handed to the trainer; 0: as `record_length_bytes`."""

    record_dims: tuple[int, ...] = ()
    """The shape of all samples, instead of `record_length_bytes`."""

    record_element_type: str = "uint8"
    """numpy's name of the elements' type."""

    num_subfolders_train: int = 0
    num_subfolders_eval: int = 0
    file_prefix: str = "img"
    compression: Compression = "none"
    compression_level: int = 4
    hdf5: Hdf5Spec = field(default_factory=Hdf5Spec)
    parquet: ParquetSpec = field(default_factory=ParquetSpec)

    generation_buffer_size: int = 2 << 30
    """DLIO's buffer. Accepted and not needed: files are written in small pieces."""

    keep_files: bool = True
    """Whether the data set stays when the run is over."""

    seed: int = 123
    """Of the samples' content. Sizes do not depend on it, as in DLIO."""

    requests: str | None = None
    """A recorded job's exact requests: the files have its names and sizes, and it says the order."""

    def __post_init__(self) -> None:
        _one_of("format", self.format, get_args(Format))
        for name, low in _WHOLE.items():
            _whole(name, getattr(self, name), low)
        for name in (
            "record_length_bytes",
            "record_length_bytes_stdev",
            "record_length_bytes_resize",
        ):
            low = 1 if name == "record_length_bytes" else 0
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low <= value < 1 << 48:
                raise _refuse(name, value, f"bytes, from {low} to 2^48")
        _dims("record_dims", self.record_dims)
        self._check_text()
        self._check_elements()
        _one_of("compression", self.compression, COMPRESSIONS.get(self.format, ("none",)))
        if self.requests is None:
            self._check_format()

    def _check_text(self) -> None:
        for name in ("data_folder", "file_prefix"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or "\0" in value:
                raise _refuse(name, value, "a name")
        if "/" in self.file_prefix:
            raise _refuse("file_prefix", self.file_prefix, "a name without /")
        if not isinstance(self.keep_files, bool):
            raise _refuse("keep_files", self.keep_files, "true or false")

    def _check_elements(self) -> None:
        try:
            known = np.dtype(self.record_element_type).kind in "iufc"
        except TypeError:
            known = False
        if not known:
            raise _refuse("record_element_type", self.record_element_type, "a numpy number type")
        if self.record_dims and self.record_length_bytes_stdev:
            raise _refuse(
                "record_length_bytes_stdev", self.record_length_bytes_stdev, "0 with record_dims"
            )

    def _check_format(self) -> None:
        image = self.format in ("jpeg", "png")
        if image and self.record_element_type != "uint8":
            raise _refuse(
                "record_element_type", self.record_element_type, f"uint8 for {self.format}"
            )
        if image and len(self.record_dims) not in (0, 2):
            raise _refuse("record_dims", self.record_dims, f"2 dimensions for {self.format}")
        if image and self.num_samples_per_file != 1:
            raise _refuse(
                "num_samples_per_file",
                self.num_samples_per_file,
                f"1: a {self.format} is one sample",
            )
        pieces = self.hdf5.num_dset_per_record
        if pieces > 1 and (not self.record_dims or self.record_dims[0] % pieces):
            raise _refuse(
                "hdf5.num_dset_per_record",
                pieces,
                f"a divisor of record_dims[0] {self.record_dims[:1]}",
            )

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> DatasetSpec:
        """A spec from a workload's `dataset` section, with DLIO's keys.

        Raises:
            ValueError: an unknown key, or a value that makes no sense.
        """
        values = dict(section)
        for name, part in (("hdf5", Hdf5Spec), ("parquet", ParquetSpec)):
            if isinstance(values.get(name), dict):
                values[name] = _part(name, part, values[name])
        if isinstance(values.get("data_folder"), str):
            values["data_folder"] = values["data_folder"].rstrip("/") or "/"
        spec: DatasetSpec = _part("", cls, values)
        return spec

    @property
    def dtype(self) -> np.dtype[Any]:
        """The samples' element type."""
        return np.dtype(self.record_element_type)

    @property
    def extension(self) -> str:
        """What the files' names end with, without the dot."""
        if self.format == "csv" and self.compression != "none":
            return {"gzip": "csv.gz", "bz2": "csv.bz2", "zip": "csv.zip", "xz": "csv.xz"}[
                self.compression
            ]
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

    def total_bytes(self) -> int:
        """Bytes of all samples, without what formats add or compression takes away."""
        return int(self.sample_bytes().sum()) * self.num_samples_per_file


_WHOLE = {
    "num_files_train": 0,
    "num_files_eval": 0,
    "num_samples_per_file": 1,
    "num_subfolders_train": 0,
    "num_subfolders_eval": 0,
    "compression_level": 0,
    "generation_buffer_size": 1,
    "seed": 0,
}
"""Whole numbers and the least each may be."""


def _part(where: str, cls: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass of a section's values: lists become tuples, unknown keys are refused."""
    prefix = f"{where}." if where else ""
    known = {f.name for f in fields(cls)}
    for key in values:
        if key not in known:
            raise ValueError(f"dataset.{prefix}{key} is unknown, expected one of {sorted(known)}")
    arguments = dict(values)
    for key, value in arguments.items():
        if key == "columns":
            arguments[key] = tuple(_column(v) for v in value)
        elif isinstance(value, list):
            arguments[key] = tuple(value)
    return cls(**arguments)


def _column(value: Any) -> Column:
    if isinstance(value, Column):
        return value
    if isinstance(value, str):
        return Column(name=value)
    column: Column = _part("parquet.columns", Column, value)
    return column
