"""hdf5: data sets `records_0`, `records_1`, ... of (samples, *shape), and `labels`, as DLIO writes them.

Contiguous data sets are allocated by HDF5 and written past it, at the disk's speed. `records` is a link to
`records_0`: DLIO's releases before 2025 read that name.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.formats.base import Reader, SampleExtents, bad_file, extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "open_reader", "sample_extents", "write"]

_ALIGNED_FROM = 64 << 10
"""Data of so many bytes begin at a whole disk block."""

_SLAB_BYTES = 8 << 20
"""Samples of chunked data sets are handed to HDF5 about so many bytes at a time."""


def _piece_shape(spec: DatasetSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a sample in one of the data sets it is spread over."""
    first, *rest = shape
    first //= spec.hdf5.num_dset_per_record
    return tuple(rest) if spec.record_dims and first == 1 else (first, *rest)


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    h5py = extra("h5py", "writing hdf5", "bench")
    shape = (job.samples, *_piece_shape(job.spec, job.shape))
    contiguous = not (job.spec.hdf5.chunk_dims or job.spec.hdf5.max_shape)
    contiguous = contiguous and job.spec.compression == "none"
    # HDF5 writes by itself, under the name that the file has until it is whole.
    with h5py.File(
        out.temporary,
        "w",
        libver="latest",
        alignment_threshold=_ALIGNED_FROM,
        alignment_interval=4096,
    ) as f:
        for number in range(job.spec.hdf5.num_dset_per_record):
            name = f"records_{number}"
            if contiguous:
                _allocate(h5py, f, name, shape, job.spec.dtype)
            else:
                _write_chunked(f, name, shape, job)
        if job.spec.hdf5.num_dset_per_record == 1:
            f["records"] = h5py.SoftLink("/records_0")
        f.create_dataset("labels", data=np.zeros(job.samples, np.int64))
        places = [
            f[f"records_{n}"].id.get_offset() for n in range(job.spec.hdf5.num_dset_per_record)
        ]
    out.adopt()
    if contiguous:
        for number, place in enumerate(places):
            size = math.prod(shape) * job.spec.dtype.itemsize
            out.fill(place, _stream(job, number).blocks(size))


def _stream(job: FileJob, number: int) -> Any:
    """The content of one of the data sets."""
    return job.content.stream(job.number + (number << 48))


def _allocate(h5py: Any, f: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """A contiguous data set whose bytes have their place, and nothing in it yet."""
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)  # the same command writes the same bytes at any time
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(f.id, name.encode(), h5py.h5t.py_create(dtype), space, dcpl=how)


def _write_chunked(f: Any, name: str, shape: tuple[int, ...], job: FileJob) -> None:
    spec = job.spec
    options: dict[str, Any] = {}
    if spec.hdf5.chunk_dims:
        options["chunks"] = spec.hdf5.chunk_dims
    if spec.hdf5.max_shape:
        options["maxshape"] = (shape[0], *spec.hdf5.max_shape)
    if spec.compression != "none":
        options["compression"] = spec.compression
        if spec.compression == "gzip":
            options["compression_opts"] = min(spec.compression_level, 9)
    try:
        records = f.create_dataset(name, shape, dtype=spec.dtype, **options)
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"dataset.hdf5 chunk_dims {spec.hdf5.chunk_dims} and max_shape {spec.hdf5.max_shape} "
            f"do not fit the data set's shape {shape}: {e}"
        ) from e
    stream = _stream(job, int(name.rpartition("_")[2]))
    row_bytes = math.prod(shape[1:]) * spec.dtype.itemsize
    chunk_rows = records.chunks[0]
    at_once = max(1, _SLAB_BYTES // max(1, row_bytes * chunk_rows)) * chunk_rows
    for first in range(0, shape[0], at_once):
        count = min(at_once, shape[0] - first)
        data = stream.take(count * row_bytes).view(spec.dtype).reshape(count, *shape[1:])
        records[first : first + count] = data


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return None


def _records(f: Any, path: str, spec: DatasetSpec) -> list[Any]:
    count = spec.hdf5.num_dset_per_record
    names = [f"records_{n}" for n in range(count)]
    if count == 1 and "records_0" not in f:
        names = ["records"]
    for name in names:
        if name not in f:
            raise bad_file(path, "its data sets", sorted(f), name)
        if not f[name].shape or f[name].shape[0] != spec.num_samples_per_file:
            raise bad_file(
                path,
                f"the shape of {name}",
                f[name].shape,
                f"{spec.num_samples_per_file} samples first",
            )
    return [f[name] for name in names]


def _open(path: str) -> Any:
    h5py = extra("h5py", "reading hdf5", "bench")
    try:
        return h5py.File(path, "r")
    except OSError as e:
        os.stat(path)  # a missing file is that error
        raise bad_file(path, "the file", e, "an HDF5 file") from e


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """Where the samples of a file lie: a piece of each contiguous data set, or the chunks it is in."""
    with _open(path) as f:
        pieces = [_pieces_of(d) for d in _records(f, path, spec)]
    first, offsets, lengths = [0], [], []
    for sample in range(spec.num_samples_per_file):
        for piece in pieces:
            for offset, length in piece[sample]:
                offsets.append(offset)
                lengths.append(length)
        first.append(len(offsets))
    return SampleExtents(
        np.arange(spec.num_samples_per_file),
        np.array(first, np.int64),
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
    )


def _pieces_of(records: Any) -> list[list[tuple[int, int]]]:
    """For each sample the extents of a data set that hold it."""
    samples = records.shape[0]
    if records.chunks is None:
        start, size = records.id.get_offset(), records.nbytes // samples
        return [[(start + i * size, size)] for i in range(samples)]
    found: list[list[tuple[int, int]]] = [[] for _ in range(samples)]
    for number in range(records.id.get_num_chunks()):
        chunk = records.id.get_chunk_info(number)
        begin = chunk.chunk_offset[0]
        for sample in range(begin, min(begin + records.chunks[0], samples)):
            found[sample].append((chunk.byte_offset, chunk.size))
    return found


class _Hdf5Reader:
    def __init__(self, path: str, spec: DatasetSpec) -> None:
        self._file = _open(path)
        self._records = _records(self._file, path, spec)

    def sample(self, index: int) -> NDArray[Any]:
        """A sample, its pieces joined along the first axis."""
        pieces = [records[index] for records in self._records]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Opens the file."""
    return _Hdf5Reader(path, spec)
