"""What a format is: how a file is written, and where a sample's bytes lie in it."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from headrace.errors import SourceError

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from headrace.bench.content import Content, Stream
    from headrace.bench.dataset import DatasetSpec, Split
    from headrace.store.output_file import OutputFile

__all__ = [
    "FileJob",
    "FormatModule",
    "Reader",
    "SampleExtents",
    "bad_file",
    "extra",
    "no_seek",
    "whole_file",
]


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

    def stream(self) -> Stream:
        """Its content, from the beginning."""
        return self.content.stream(self.number)


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
    def each(cls, offset: NDArray[Any], length: NDArray[Any]) -> SampleExtents:
        """One extent for each sample."""
        count = len(offset)
        return cls(
            np.arange(count, dtype=np.int64),
            np.arange(count + 1, dtype=np.int64),
            np.asarray(offset, np.int64),
            np.asarray(length, np.int64),
        )

    @classmethod
    def shared(cls, samples: int, offset: int, length: int) -> SampleExtents:
        """One extent for all samples."""
        return cls(
            np.zeros(samples, np.int64),
            np.array([0, 1], np.int64),
            np.array([offset], np.int64),
            np.array([length], np.int64),
        )

    def of(self, sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and lengths of what must be read for a sample."""
        group = int(self.group[sample])
        part = slice(int(self.first[group]), int(self.first[group + 1]))
        return self.offset[part], self.length[part]


class Reader(Protocol):
    """An open file of samples."""

    def sample(self, index: int) -> NDArray[Any]:
        """A decoded sample."""
        ...

    def close(self) -> None:
        """Gives back what is open."""
        ...


class FormatModule(Protocol):
    """What each module of this package has."""

    def write(self, out: OutputFile, job: FileJob) -> None:
        """Writes a file's bytes.

        Formats whose files are text around noise have a `layout(spec, shape)`, too, from which native
        code writes the same bytes.
        """
        ...

    def file_bytes(self, spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
        """Size of the finished file; None where only writing it can tell."""
        ...

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """Where the samples of a file lie, without reading them."""
        ...

    def open_reader(self, path: str, spec: DatasetSpec) -> Reader:
        """Opens a file to decode samples."""
        ...


def extra(module: str, what: str, extra_name: str) -> ModuleType:
    """Imports an optional library.

    Raises:
        SourceError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        name = module.partition(".")[0]
        raise SourceError(
            f"{what} needs {name}, which is not installed.",
            next_step=f"pip install 'headrace[{extra_name}]'",
        ) from e


def bad_file(path: str, what: str, found: object, expected: object, offset: int = 0) -> SourceError:
    """The error for a file of the data set that is not as it should be."""
    return SourceError(
        f"{path}: {what} is {found}, expected {expected} (offset {offset:,}).",
        path=path,
        offset_bytes=offset,
        next_step="Generate the data set again, or correct the workload's dataset section.",
    )


def whole_file(path: str, spec: DatasetSpec) -> SampleExtents:
    """All of a file, for each of its samples."""
    return SampleExtents.shared(spec.num_samples_per_file, 0, os.stat(path).st_size)


class _NoSeek:
    def __init__(self, out: OutputFile) -> None:
        self.write, self.flush = out.write, out.flush


def no_seek(out: OutputFile) -> IO[bytes]:
    """A file for zipfile that cannot go back: sizes are then written behind the data."""
    return cast("IO[bytes]", _NoSeek(out))
