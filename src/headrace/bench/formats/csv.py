"""csv: a row for each sample, of its elements as numbers, behind a column of row numbers, as pandas has it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import zipfile
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from headrace.bench.formats.base import Reader, SampleExtents, bad_file, no_seek, whole_file
from headrace.bench.formats.npy import ArrayReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "open_reader", "sample_extents", "write"]

_PART = 1 << 18
"""Elements that are printed at a time."""

_BYTES = [b",%d" % i for i in range(256)]
_TABLE = np.array([list(t.ljust(4, b"\0")) for t in _BYTES], np.uint8)
_USED = np.arange(4) < np.array([len(t) for t in _BYTES])[:, None]


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    with _packed(out, job.spec, os.path.basename(job.path)) as f:
        elements = job.sample_bytes // job.spec.dtype.itemsize
        for first in range(0, elements, _PART):
            columns = range(first, min(first + _PART, elements))
            f.write(("," + ",".join(map(str, columns))).encode())
        stream = job.stream()
        for row in range(job.samples):
            f.write(b"\n%d" % row)
            for data in stream.blocks(job.sample_bytes):
                for at in range(0, data.size, _PART):
                    f.write(_text(data[at : at + _PART].view(job.spec.dtype)))
        f.write(b"\n")


def _text(values: NDArray[Any]) -> bytes:
    """Numbers, each behind a comma; bytes by a table, since they are what DLIO has."""
    if values.dtype == np.uint8:
        text: bytes = _TABLE[values][_USED[values]].tobytes()
        return text
    return ("," + ",".join(map(str, values.tolist()))).encode()


@contextlib.contextmanager
def _packed(out: OutputFile, spec: DatasetSpec, name: str) -> Iterator[IO[bytes]]:
    """A file to write plain text to."""
    file, level = cast("IO[bytes]", out), spec.compression_level
    match spec.compression:
        case "gzip":
            with gzip.GzipFile("", "wb", max(0, min(level, 9)), file, mtime=0) as f:
                yield cast("IO[bytes]", f)
        case "bz2":
            with bz2.BZ2File(file, "wb", compresslevel=max(1, min(level, 9))) as f:
                yield cast("IO[bytes]", f)
        case "xz":
            with lzma.LZMAFile(file, "wb", preset=min(level, 9)) as f:
                yield cast("IO[bytes]", f)
        case "zip":
            info = zipfile.ZipInfo(name.removesuffix(".zip"))
            info.compress_type = zipfile.ZIP_DEFLATED
            with (
                zipfile.ZipFile(no_seek(out), "w", compresslevel=min(level, 9)) as archive,
                archive.open(info, "w", force_zip64=True) as member,
            ):
                yield member
        case _:
            yield file


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return None


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """The rows of a file; of a compressed one all samples are in all of it."""
    if spec.compression != "none":
        return whole_file(path, spec)
    ends: list[NDArray[np.int64]] = []
    at = 0
    with open(path, "rb", buffering=0) as f:
        while data := f.read(1 << 22):
            ends.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + at)
            at += len(data)
    lines = np.concatenate(ends) + 1 if ends else np.empty(0, np.int64)
    if at and (not lines.size or lines[-1] != at):
        raise bad_file(path, "the end of the last row", "missing", "a line feed", at)
    if len(lines) != spec.num_samples_per_file + 1:
        raise bad_file(path, "the number of rows", len(lines) - 1, spec.num_samples_per_file)
    return SampleExtents.each(lines[:-1], np.diff(lines))


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Reads and parses the file."""
    opened: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    if spec.compression == "zip":
        with zipfile.ZipFile(path) as archive:
            lines = archive.read(archive.namelist()[0]).splitlines()
    else:
        with opened.get(spec.compression, open)(path, "rb") as f:
            lines = f.read().splitlines()
    if len(lines) != spec.num_samples_per_file + 1:
        raise bad_file(path, "the number of rows", len(lines) - 1, spec.num_samples_per_file)
    rows = [np.array(line.split(b",")[1:]).astype(spec.dtype) for line in lines[1:]]
    return ArrayReader(np.stack(rows), axis=0)
