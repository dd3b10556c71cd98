"""The formats of data sets: how a file is written, where a sample's bytes lie in it, and how it is decoded.

* arrays: npy, npz, csv, indexed_binary, jpeg, png, recorded and synthetic files
* records: tfrecord, parquet and hdf5
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from headrace.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.bench.content import ByteStream, Content, FileLayout
    from headrace.bench.dataset import DatasetSpec, Split
    from headrace.store.output_file import OutputFile


@dataclass(frozen=True)
class FileJob:
    """A file to be written."""

    spec: DatasetSpec
    split: Split
    index: int
    shape: tuple[int, ...]
    """Of each sample."""
    content: Content

    @cached_property
    def path(self) -> str:
        """Where it goes."""
        return self.spec.path(self.split, self.index)

    @property
    def number(self) -> int:
        """Its number among all files."""
        return self.spec.number(self.split, self.index)

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return self.spec.num_samples_per_file

    @property
    def sample_bytes(self) -> int:
        """Of one sample, as an array."""
        return math.prod(self.shape) * self.spec.dtype.itemsize

    def stream(self, part: int = 0) -> ByteStream:
        """Its content from the beginning; each part of a file has other bytes."""
        return self.content.stream(self.number + (part << 48))


class GeneratedFile(NamedTuple):
    """A file of a generated data set, which `sample_extents` has no objection to."""

    path: str
    begin: bytes
    """Its first bytes."""
    spec: DatasetSpec
    """The workload's data set."""
    sample_bytes: int
    """Of each of its samples, as an array, by that."""


@dataclass(frozen=True, slots=True)
class SampleExtents:
    """Where the bytes of a file's samples lie.

    Samples that can only be had together, as the rows of a Parquet row group, are of one group.
    """

    group: NDArray[np.int64]
    """(samples,): the group of each sample."""
    first: NDArray[np.int64]
    """(groups + 1,): where each group's extents begin in the next two."""
    offset: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def of_groups(cls, group: Any, first: Any, offset: Any, length: Any) -> SampleExtents:
        """From sequences of numbers."""
        return cls(*(np.asarray(values, np.int64) for values in (group, first, offset, length)))

    @classmethod
    def each(cls, offset: Any, length: Any) -> SampleExtents:
        """One extent for each sample."""
        count = len(offset)
        return cls.of_groups(np.arange(count), np.arange(count + 1), offset, length)

    @classmethod
    def shared(cls, samples: int, offset: int, length: int) -> SampleExtents:
        """One extent for all samples."""
        return cls.of_groups(np.zeros(samples), [0, 1], [offset], [length])


class DatasetFormat(ABC):
    """A format of data sets. Optional libraries are imported on use."""

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout | None:  # noqa: ARG002
        """As `layout_of`, of an uncompressed file; without one `write` writes the file."""
        return None

    def write(self, out: OutputFile, job: FileJob) -> None:
        """Writes a file that has no layout for native code."""
        raise NotImplementedError

    def write_indices(self, job: FileJob) -> None:  # noqa: B027 - most have nothing there
        """Writes what lies beside a file; it is there before the file is."""

    def file_bytes(self, spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
        """Size of the finished file; None where only writing it can tell."""
        layout = self.layout(spec, shape) if spec.compression == "none" else None
        return None if layout is None else layout.nbytes

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """Where the samples of a file lie, without reading them: all of the file, for each of them."""
        return SampleExtents.shared(spec.num_samples_per_file, 0, os.stat(path).st_size)

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:  # noqa: ARG002
        """What a file says of itself, beside its size: (key, as it is, as the workload has it).

        Raises:
            SourceError: the file is not of the format.
        """
        return iter(())

    @abstractmethod
    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        """Opens a file, decodes one of its samples and closes the file.

        Raises:
            SourceError: the file is not of the format, or has another number of samples.
        """


@cache
def _formats() -> dict[str, DatasetFormat]:
    from headrace.bench.formats import arrays, records

    return arrays.FORMATS | records.FORMATS


def format_of(spec: DatasetSpec) -> DatasetFormat:
    """What writes and reads a data set's files."""
    return _formats()["recorded" if spec.requests is not None else spec.format]


def layout_of(spec: DatasetSpec, shape: tuple[int, ...]) -> _native.FileLayout | None:
    """What a file consists of, for native code; None where only a library can write it.

    Raises:
        SourceError: the format cannot hold such samples.
    """
    plain = spec.compression == "none" or spec.requests is not None
    layout = format_of(spec).layout(spec, shape) if plain else None
    return None if layout is None else layout.native()


def bad_file(
    path: str, what: str, actual: object, expected: object, offset: int = 0
) -> SourceError:
    """The error for a file of the data set that is not as it should be."""
    return SourceError(
        f"{path}: {what} is {actual}, expected {expected} (offset {offset:,}).", path=path,
        offset_bytes=offset,
        next_step="Generate the data set again, or correct the workload's dataset section.",
    )  # fmt: skip


def no_seek(out: OutputFile) -> IO[bytes]:
    """A file for zipfile that cannot go back: sizes are then written behind the data."""
    return cast("IO[bytes]", SimpleNamespace(write=out.write, flush=out.flush))
