"""indexed_binary and mmap_indexed_binary: samples end to end, beside two files of uint64.

`<file>.off.idx` has the samples' offsets, `<file>.sz.idx` their sizes. Unlike DLIO's own generator, which
starts again from 0 at each of its buffers, offsets are right in files of any size.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.content import Layout, Run, noise, write_layout
from headrace.bench.formats.base import Reader, SampleExtents, bad_file
from headrace.store.output_file import OutputFile, WriteBuffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob

__all__ = ["file_bytes", "layout", "open_reader", "sample_extents", "write", "write_indices"]

_OFFSETS, _SIZES = ".off.idx", ".sz.idx"
_PART = 1 << 18
"""Numbers of an index that are made at a time."""


def layout(spec: DatasetSpec, shape: tuple[int, ...]) -> Layout:
    """What a file consists of."""
    size = math.prod(shape) * spec.dtype.itemsize * spec.num_samples_per_file
    return Layout((Run(1, (noise(size),)),))


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    write_layout(out, layout(job.spec, job.shape), job.stream())


def write_indices(job: FileJob) -> None:
    """Writes a file's two indices; they are there before it is."""
    buffer = WriteBuffer()
    for suffix in (_OFFSETS, _SIZES):
        with OutputFile(job.path + suffix, buffer) as index:
            for first in range(0, job.samples, _PART):
                numbers = np.arange(first, min(first + _PART, job.samples), dtype=np.uint64)
                if suffix == _OFFSETS:
                    numbers *= np.uint64(job.sample_bytes)
                else:
                    numbers[:] = job.sample_bytes
                index.write(numbers)


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
    """Size of the finished file."""
    return layout(spec, shape).nbytes


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """Where the samples of a file lie, of its indices."""
    samples = spec.num_samples_per_file
    offsets, sizes = (np.fromfile(path + suffix, np.uint64) for suffix in (_OFFSETS, _SIZES))
    for suffix, found in ((_OFFSETS, offsets), (_SIZES, sizes)):
        if len(found) != samples:
            raise bad_file(path + suffix, "the number of samples", len(found), samples)
    end, size = int((offsets + sizes).max()), os.stat(path).st_size
    if end > size:
        raise bad_file(path, "the file's size", size, f"{end:,}, the end of its last sample")
    return SampleExtents.each(offsets, sizes)


class _MappedReader:
    def __init__(self, path: str, extents: SampleExtents, dtype: np.dtype[Any]) -> None:
        self._data = np.memmap(path, np.uint8, "r") if Path(path).stat().st_size else np.empty(0)
        self._extents, self._dtype = extents, dtype

    def sample(self, index: int) -> NDArray[Any]:
        """A copy of a sample: the pages are really read."""
        offset, length = int(self._extents.offset[index]), int(self._extents.length[index])
        return np.array(self._data[offset : offset + length]).view(self._dtype)

    def close(self) -> None:
        """Unmaps the file when the last sample is gone."""
        del self._data


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Maps the file."""
    return _MappedReader(path, sample_extents(path, spec), spec.dtype)
