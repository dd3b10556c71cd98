"""npz: a zip of `x.npy`, the samples on its last axis, and `y.npy`, their labels (0), as DLIO writes it."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
from headrace.bench.formats import npy
from headrace.bench.formats.base import Reader, SampleExtents, bad_file, no_seek, whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "layout", "open_reader", "sample_extents", "write"]

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ZIP64 = struct.Struct("<HH2Q")
_CENTRAL_64 = struct.Struct("<HH3Q")
_FULL = 0xFFFFFFFF
_VERSION = 45
_DATE = 1 << 5 | 1
"""1980-01-01, zip's first day: the same files whenever they are made."""
_LOCAL_CRC_AT, _CENTRAL_CRC_AT = 14, 16
"""Where the CRC is, in a member's local and central header."""


def layout(spec: DatasetSpec, shape: tuple[int, ...]) -> Layout:
    """What a file that is not compressed consists of."""
    samples = spec.num_samples_per_file
    head = npy.header((*shape, samples), spec.dtype)
    size = math.prod(shape) * spec.dtype.itemsize * samples
    zeros = np.zeros(samples, np.int64)
    labels = npy.header(zeros.shape, zeros.dtype) + zeros.tobytes()
    x = _Member(b"x.npy", len(head) + size, 0, 0)
    y = _Member(b"y.npy", len(labels), zlib.crc32(labels), len(x.local()) + x.size)
    directory = y.offset + len(y.local()) + y.size
    pieces = (
        text(x.local()), BEGIN, text(head), noise(size), END,
        text(y.local() + labels + x.central() + y.central() + _end(directory, (x, y))),
    )  # fmt: skip
    patches = (_LOCAL_CRC_AT, directory + _CENTRAL_CRC_AT)
    return Layout((Run(1, pieces),), Checksum.ZIP, patches)


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    if job.spec.compression == "zip":
        head = npy.header((*job.shape, job.samples), job.spec.dtype)
        _write_deflated(out, job, head, np.zeros(job.samples, np.int64))
    else:
        write_layout(out, layout(job.spec, job.shape), job.stream())


@dataclass(frozen=True, slots=True)
class _Member:
    """A stored file of the archive.

    All are in zip64's form, as numpy's are, so that what a file needs beside its data is always the same.
    """

    name: bytes
    size: int
    crc: int
    """0 where it is not known before."""
    offset: int

    def local(self) -> bytes:
        extra = _ZIP64.pack(1, 16, self.size, self.size)
        head = _LOCAL.pack(
            b"PK\x03\x04",
            _VERSION,
            0,
            0,
            0,
            _DATE,
            self.crc,
            _FULL,
            _FULL,
            len(self.name),
            len(extra),
        )
        return head + self.name + extra

    def central(self) -> bytes:
        extra = _CENTRAL_64.pack(1, 24, self.size, self.size, self.offset)
        head = _CENTRAL.pack(
            b"PK\x01\x02", 3 << 8 | _VERSION, _VERSION, 0, 0, 0, _DATE, self.crc, _FULL, _FULL,
            len(self.name), len(extra), 0, 0, 0, 0o600 << 16, _FULL,
        )  # fmt: skip
        return head + self.name + extra


def _end(begin: int, members: tuple[_Member, ...]) -> bytes:
    """What follows the members' directory, which begins at `begin`."""
    size, count = sum(len(m.central()) for m in members), len(members)
    return (
        _END_64.pack(b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, size, begin)
        + _LOCATOR_64.pack(b"PK\x06\x07", 0, begin + size, 1)
        + _END.pack(b"PK\x05\x06", 0, 0, count, count, size, _FULL, 0)
    )


def _write_deflated(out: OutputFile, job: FileJob, head: bytes, labels: Any) -> None:
    level = min(job.spec.compression_level, 9)
    with zipfile.ZipFile(no_seek(out), "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, pieces in (("x.npy", _pieces(head, job)), ("y.npy", iter([_npy(labels)]))):
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as f:
                for piece in pieces:
                    f.write(piece)


def _pieces(head: bytes, job: FileJob) -> Iterator[bytes]:
    yield head
    for data in job.stream().blocks(job.sample_bytes * job.samples):
        yield data.tobytes()


def _npy(array: Any) -> bytes:
    text = io.BytesIO()
    np.save(text, array)
    return text.getvalue()


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
    """Size of the finished file."""
    return layout(spec, shape).nbytes if spec.compression == "none" else None


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """Where the samples of a file lie; of a compressed one all samples are in all of it."""
    with open(path, "rb") as f:
        try:
            with zipfile.ZipFile(f) as archive:
                info = archive.getinfo("x.npy")
        except (zipfile.BadZipFile, KeyError, OSError) as e:
            raise bad_file(path, "the archive", e, "an npz with x.npy") from e
        if info.compress_type != zipfile.ZIP_STORED:
            return whole_file(path, spec)
        f.seek(info.header_offset)
        local = _LOCAL.unpack(f.read(_LOCAL.size))
        f.seek(info.header_offset + _LOCAL.size + local[9] + local[10])
        shape, dtype = npy.read_header(f, path)
        npy.check_shape(path, shape, spec)
        return SampleExtents.shared(
            spec.num_samples_per_file, f.tell(), math.prod(shape) * dtype.itemsize
        )


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Reads the file, and checks its CRC."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            array = archive["x"]
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as e:
        raise bad_file(path, "the archive", e, "an npz with x.npy") from e
    npy.check_shape(path, array.shape, spec)
    return npy.ArrayReader(array)
