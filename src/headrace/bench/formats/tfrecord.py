"""tfrecord: `tf.train.Example`s of an `image` (the sample's bytes) and a `size`, without TensorFlow.

Beside the data set lies `index/<split>/<file>.idx`, a line "offset size" for each record, as DALI's readers
want it. The records of a file have one size.
"""

from __future__ import annotations

import math
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.bench.content import (
    BEGIN,
    END,
    Checksum,
    Layout,
    Run,
    noise,
    text,
    write_layout,
)
from headrace.bench.formats.base import Reader, SampleExtents, bad_file
from headrace.store.output_file import OutputFile, WriteBuffer
from headrace.store.sources.tfrecord import mask, unmask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob

__all__ = [
    "file_bytes",
    "index_path",
    "layout",
    "open_reader",
    "sample_extents",
    "write",
    "write_indices",
]

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes, length: int | None = None) -> bytes:
    """A length-delimited field of a protocol buffer; `length` where data follow later."""
    return _varint(number << 3 | 2) + _varint(len(data) if length is None else length) + data


def _around(sample_bytes: int) -> tuple[bytes, bytes]:
    """What an Example has before and behind the sample's bytes."""
    value = _field(1, b"", sample_bytes)
    feature = _field(1, value, len(value) + sample_bytes)
    entry = _field(1, b"image") + _field(2, feature, len(feature) + sample_bytes)
    image = _field(1, entry, len(entry) + sample_bytes)
    size = _field(3, _field(1, _varint(sample_bytes)))
    behind = _field(1, _field(1, b"size") + _field(2, size))
    return _field(1, image, len(image) + sample_bytes + len(behind)), behind


def index_path(spec: DatasetSpec, path: str) -> str:
    """Where the index of a file lies."""
    split = os.path.relpath(path, spec.data_folder).partition("/")[0]
    return os.path.join(spec.data_folder, "index", split, os.path.basename(path) + ".idx")


def layout(spec: DatasetSpec, shape: tuple[int, ...]) -> Layout:
    """What a file consists of."""
    sample_bytes = math.prod(shape) * spec.dtype.itemsize
    before, behind = _around(sample_bytes)
    number = (len(before) + sample_bytes + len(behind)).to_bytes(8, "little")
    head = number + mask(_native.crc32c(np.frombuffer(number, np.uint8))).to_bytes(4, "little")
    record = (text(head), BEGIN, text(before), noise(sample_bytes), text(behind), END)
    return Layout((Run(spec.num_samples_per_file, record),), Checksum.RECORD)


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    write_layout(out, layout(job.spec, job.shape), job.stream())


def write_indices(job: FileJob) -> None:
    """Writes a file's index; it is there before the file is."""
    size = layout(job.spec, job.shape).nbytes // job.samples
    path = index_path(job.spec, job.path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with OutputFile(path, WriteBuffer()) as index:
        for first in range(0, job.samples, 65536):
            rows = range(first, min(first + 65536, job.samples))
            index.write("".join(f"{i * size} {size}\n" for i in rows).encode())


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
    """Size of the finished file."""
    return layout(spec, shape).nbytes


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """Where the records' messages lie; only what frames them is read."""
    offsets, lengths = [], []
    with open(path, "rb", buffering=0) as f:
        end = os.fstat(f.fileno()).st_size
        at = 0
        while at < end:
            head = os.pread(f.fileno(), _HEADER.size, at)
            length = _length(path, head, at)
            if at + _HEADER.size + length + _FOOTER.size > end:
                raise bad_file(path, "the file's size", end, "a whole last record", at)
            offsets.append(at + _HEADER.size)
            lengths.append(length)
            at += _HEADER.size + length + _FOOTER.size
    if len(offsets) != spec.num_samples_per_file:
        raise bad_file(path, "the number of records", len(offsets), spec.num_samples_per_file)
    return SampleExtents.each(np.array(offsets), np.array(lengths))


def _length(path: str, head: bytes, at: int) -> int:
    """Length of the record that has this header, which its own checksum proves."""
    if len(head) < _HEADER.size:
        raise bad_file(path, "a record's header", f"{len(head)} bytes", _HEADER.size, at)
    length, masked = _HEADER.unpack(head)
    found = _native.crc32c(np.frombuffer(head[:8], np.uint8))
    if found != unmask(masked):
        raise bad_file(
            path, "the checksum of a record's length", f"{unmask(masked):08x}", f"{found:08x}", at
        )
    return int(length)


class _RecordReader:
    def __init__(self, path: str, extents: SampleExtents, dtype: np.dtype[Any]) -> None:
        self._path, self._extents, self._dtype = path, extents, dtype
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()

    def sample(self, index: int) -> NDArray[Any]:
        """The bytes of a record's `image`; the record's checksum is checked."""
        at, length = int(self._extents.offset[index]), int(self._extents.length[index])
        data = os.pread(self._file.fileno(), length + _FOOTER.size, at)
        message, masked = data[:length], _FOOTER.unpack(data[length:])[0]
        found = _native.crc32c(np.frombuffer(message, np.uint8))
        if found != unmask(masked):
            raise bad_file(
                self._path, "a record's checksum", f"{found:08x}", f"{unmask(masked):08x}", at
            )
        return np.frombuffer(_image(message), self._dtype)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        length, at = _read_varint(message, at)
        if tag & 7 != 2 or at + length > len(message):
            raise ValueError("it is no tf.train.Example")
        yield tag >> 3, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("it ends inside a number")


def _image(message: bytes) -> bytes:
    """The bytes of an Example's feature `image`, in whatever order its features are."""
    for _, features in _fields(message):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            if parts.get(1) == b"image":
                for _, values in _fields(parts[2]):
                    return dict(_fields(values))[1]
    raise ValueError("it has no feature 'image'")


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Opens the file and lists its records."""
    return _RecordReader(path, sample_extents(path, spec), spec.dtype)
