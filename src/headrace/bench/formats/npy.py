"""npy: one array, its last axis the samples, as DLIO writes it.

The samples of a file are interleaved byte by byte, so that one of them can only be had with all others.
"""

from __future__ import annotations

import io
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from headrace.bench.content import Layout, Run, noise, text, write_layout
from headrace.bench.formats.base import Reader, SampleExtents, bad_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = [
    "ArrayReader",
    "check_shape",
    "file_bytes",
    "header",
    "layout",
    "open_reader",
    "read_header",
    "sample_extents",
    "write",
]


def header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of an array in C order."""
    text = io.BytesIO()
    npy_format.write_array_header_1_0(
        text, {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return text.getvalue()


def layout(spec: DatasetSpec, shape: tuple[int, ...]) -> Layout:
    """What a file consists of."""
    samples = spec.num_samples_per_file
    data = math.prod(shape) * spec.dtype.itemsize * samples
    head = header((*shape, samples), spec.dtype)
    return Layout((Run(1, (text(head), noise(data))),))


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    write_layout(out, layout(job.spec, job.shape), job.stream())


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
    """Size of the finished file."""
    return layout(spec, shape).nbytes


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """Where the samples of a file lie, without reading them."""
    with open(path, "rb") as f:
        shape, dtype = read_header(f, path)
        check_shape(path, shape, spec)
        at, size = f.tell(), math.prod(shape) * dtype.itemsize
        if os.fstat(f.fileno()).st_size < at + size:
            raise bad_file(path, "the file's size", os.fstat(f.fileno()).st_size, at + size)
    return SampleExtents.shared(spec.num_samples_per_file, at, size)


def read_header(f: Any, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array whose header the file is at."""
    try:
        version = npy_format.read_magic(f)
        if version not in ((1, 0), (2, 0)):
            raise bad_file(path, "the npy version", version, "1.0 or 2.0")
        read = (
            npy_format.read_array_header_1_0
            if version == (1, 0)
            else npy_format.read_array_header_2_0
        )
        shape, fortran, dtype = read(f)
    except ValueError as e:
        raise bad_file(path, "the npy header", e, "one that numpy.save writes") from e
    if fortran and len(shape) > 1:
        raise bad_file(path, "the array", "in Fortran order", "C order")
    if dtype.hasobject:
        raise bad_file(path, "the array's type", "object", "a plain type")
    return shape, dtype


def check_shape(path: str, shape: tuple[int, ...], spec: DatasetSpec) -> None:
    """Refuses an array of another number of samples."""
    if not shape or shape[-1] != spec.num_samples_per_file:
        raise bad_file(
            path,
            "the array's shape",
            shape,
            f"{spec.num_samples_per_file} samples on the last axis",
        )


class ArrayReader:
    """Samples of an array in memory.

    Args:
        array: the samples.
        axis: which axis they are on.
    """

    def __init__(self, array: NDArray[Any], axis: int = -1) -> None:
        self._array = np.moveaxis(array, axis, 0)

    def sample(self, index: int) -> NDArray[Any]:
        """A decoded sample."""
        found: NDArray[Any] = self._array[index]
        return found

    def close(self) -> None:
        """Nothing is open."""


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Reads the file."""
    with open(path, "rb") as f:
        shape, dtype = read_header(f, path)
        check_shape(path, shape, spec)
        data = np.fromfile(f, dtype)
    if data.size != math.prod(shape):
        raise bad_file(path, "the number of elements", data.size, math.prod(shape))
    return ArrayReader(data.reshape(shape))
