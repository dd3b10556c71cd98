"""Formats of arrays: npy, npz, csv, indexed_binary, jpeg, png; and files of a record, and synthetic ones.

Images are noise, one sample a file, which Pillow decodes. A jpeg has exactly as many bytes as pixels, and no
picture is encoded. The file's Huffman tables make a coefficient of every byte up to 0xfd: a byte that begins
with n ones codes a coefficient of 7 - n bits, which are its other bits. So noise is a valid scan as it is,
64 bytes for 8 x 8 pixels, and cannot be compressed. 0xfe ends a block; 0xff would begin a marker. Blocks at
the end of the image are flat, two bytes each, in exchange for the file's headers.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import math
import os
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib import format as npy_format

from headrace.bench.content import (
    BEGIN,
    BLOCK_BYTES,
    END,
    Checksum,
    FileLayout,
    PieceKind,
    PieceRun,
    noise,
    text,
)
from headrace.bench.dataset import replay_of
from headrace.bench.formats import DatasetFormat, SampleExtents, bad_file, no_seek
from headrace.errors import SourceError
from headrace.store.output_file import OutputFile, WriteBuffer
from headrace.store.sources.npy import read_npy_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats import FileJob, GeneratedFile


def _file_sample_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int:
    """Bytes of all samples of a file."""
    return math.prod(shape) * spec.dtype.itemsize * spec.num_samples_per_file


# -- npy and npz -------------------------------------------------------------------------------------


def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of an array in C order."""
    header = io.BytesIO()
    npy_format.write_array_header_1_0(
        header, {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def _read_npy_header(
    f: IO[bytes], path: str, spec: DatasetSpec
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array whose header the file is at; refuses another number of samples."""
    try:
        shape, fortran, dtype = read_npy_header(f)
    except ValueError as e:
        raise bad_file(path, "the npy header", e, "one that numpy.save writes") from e
    if fortran and len(shape) > 1:
        raise bad_file(path, "the array", "in Fortran order", "C order")
    if dtype.hasobject:
        raise bad_file(path, "the array's type", "object", "a plain type")
    _check_samples(path, shape, spec)
    return shape, dtype


def _check_samples(path: str, shape: tuple[int, ...], spec: DatasetSpec) -> None:
    samples = spec.num_samples_per_file
    if not shape or shape[-1] != samples:
        raise bad_file(path, "the array's shape", shape, f"{samples} samples on the last axis")


class _Npy(DatasetFormat):
    """One array, its last axis the samples, as DLIO writes it.

    The samples of a file are interleaved byte by byte, so that one of them can only be had with all others.
    """

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout:
        head = _npy_header((*shape, spec.num_samples_per_file), spec.dtype)
        return FileLayout((PieceRun(1, (text(head), noise(_file_sample_bytes(spec, shape)))),))

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """All of the array."""
        with open(path, "rb") as f:
            shape, dtype = _read_npy_header(f, path, spec)
            at, size = f.tell(), math.prod(shape) * dtype.itemsize
            if os.fstat(f.fileno()).st_size < at + size:
                raise bad_file(path, "the file's size", os.fstat(f.fileno()).st_size, at + size)
        return SampleExtents.shared(spec.num_samples_per_file, at, size)

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:
        shape, dtype = _read_npy_header(io.BytesIO(file.begin), file.path, file.spec)
        own = math.prod(shape) * dtype.itemsize // file.spec.num_samples_per_file
        yield "sample_bytes", own, file.sample_bytes

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        with open(path, "rb") as f:
            shape, dtype = _read_npy_header(f, path, spec)
            data = np.fromfile(f, dtype)
        if data.size != math.prod(shape):
            raise bad_file(path, "the number of elements", data.size, math.prod(shape))
        sample: NDArray[Any] = data.reshape(shape)[..., index]
        return sample


_LOCAL = struct.Struct("<4s5H3L2H")
_HEADER_BYTES = 1 << 10
"""More than the header of an array has."""
_LOCAL_CRC_AT, _CENTRAL_CRC_AT = 14, 16
"""Where the CRC is, in a member's local and central header."""


def _member(name: str, size: int, crc: int = 0, offset: int = 0) -> zipfile.ZipInfo:
    """A stored file of a zip archive; of zip's first day: the same files whenever they are made."""
    member = zipfile.ZipInfo(name)
    member.file_size = member.compress_size = size
    member.CRC, member.header_offset, member.external_attr = crc, offset, 0o600 << 16
    return member


def _directory(members: list[zipfile.ZipInfo], at: int) -> bytes:
    """What follows an archive's members, which end at `at`."""
    out = bytearray()
    file = SimpleNamespace(write=out.extend, tell=lambda: at + len(out), flush=lambda: None)
    with zipfile.ZipFile(cast("IO[bytes]", file), "w") as archive:
        archive.filelist += members
    return bytes(out)


class _Npz(DatasetFormat):
    """A zip of `x.npy`, the samples on its last axis, and `y.npy`, their labels (0), as DLIO writes it."""

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout:
        head, labels = self._head_and_labels(spec, shape)
        size = _file_sample_bytes(spec, shape)
        x = _member("x.npy", len(head) + size)
        x_local = x.FileHeader(zip64=True)  # as numpy's
        y = _member("y.npy", len(labels), zlib.crc32(labels), len(x_local) + x.file_size)
        y_local = y.FileHeader(zip64=True)
        directory = y.header_offset + len(y_local) + y.file_size
        end = y_local + labels + _directory([x, y], directory)
        pieces = (text(x_local), BEGIN, text(head), noise(size), END, text(end))
        patches = (_LOCAL_CRC_AT, directory + _CENTRAL_CRC_AT)
        return FileLayout((PieceRun(1, pieces),), Checksum.ZIP, patches)

    @staticmethod
    def _head_and_labels(spec: DatasetSpec, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
        zeros = np.zeros(spec.num_samples_per_file, np.int64)
        labels = _npy_header(zeros.shape, zeros.dtype) + zeros.tobytes()
        return _npy_header((*shape, spec.num_samples_per_file), spec.dtype), labels

    def write(self, out: OutputFile, job: FileJob) -> None:
        head, labels = self._head_and_labels(job.spec, job.shape)
        level = min(job.spec.compression_level, 9)
        blocks = job.stream().blocks(job.sample_bytes * job.samples)
        with zipfile.ZipFile(no_seek(out), "w", compresslevel=level) as archive:
            for name, text, rest in (("x.npy", head, blocks), ("y.npy", labels, ())):
                member = zipfile.ZipInfo(name)
                member.compress_type = zipfile.ZIP_DEFLATED
                with archive.open(member, "w", force_zip64=True) as f:
                    f.write(text)
                    for data in rest:
                        f.write(data.tobytes())

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """All of the array; of a compressed one all of the file."""
        with open(path, "rb") as f:
            try:
                with zipfile.ZipFile(f) as archive:
                    info = archive.getinfo("x.npy")
            except (zipfile.BadZipFile, KeyError, OSError) as e:
                raise bad_file(path, "the archive", e, "an npz with x.npy") from e
            if info.compress_type != zipfile.ZIP_STORED:
                return super().sample_extents(path, spec)
            f.seek(info.header_offset)
            local = _LOCAL.unpack(f.read(_LOCAL.size))
            f.seek(info.header_offset + _LOCAL.size + local[9] + local[10])
            shape, dtype = _read_npy_header(f, path, spec)
            size = math.prod(shape) * dtype.itemsize
            return SampleExtents.shared(spec.num_samples_per_file, f.tell(), size)

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:
        """By the first member; of another order of members, or another packing, nothing is known."""
        local = _LOCAL.unpack(file.begin[: _LOCAL.size].ljust(_LOCAL.size, b"\0"))
        method, at = local[3], _LOCAL.size + local[9]
        if file.begin[_LOCAL.size : at] != b"x.npy":
            return
        data = file.begin[at + local[10] :]
        if method == zipfile.ZIP_DEFLATED:
            yield (
                "compression",
                "zip",
                file.spec.compression,
            )  # DLIO stores where it is asked for zip
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, _HEADER_BYTES)
            except zlib.error as e:
                raise bad_file(file.path, "the archive", e, "an npz with x.npy") from e
        yield from _Npy().facts(file._replace(begin=data))

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        """Reads the whole file, and checks its CRC."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                array: NDArray[Any] = archive["x"]
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as e:
            raise bad_file(path, "the archive", e, "an npz with x.npy") from e
        _check_samples(path, array.shape, spec)
        sample: NDArray[Any] = array[..., index]
        return sample


# -- csv -----------------------------------------------------------------------------------------------

_CSV_PART = 1 << 18
"""Elements that are printed at a time."""

_HEADER = b","
"""How a header begins: the column of row numbers has no name."""

_BYTES = [b",%d" % i for i in range(256)]
_TABLE = np.array([list(t.ljust(4, b"\0")) for t in _BYTES], np.uint8)
_USED = np.arange(4) < np.array([len(t) for t in _BYTES])[:, None]


class _Csv(DatasetFormat):
    """A row for each sample, of its elements as numbers. DLIO 2.0 had a header, and a column of row numbers."""

    def write(self, out: OutputFile, job: FileJob) -> None:
        with _compressed(out, job.spec, os.path.basename(job.path)) as f:
            stream = job.stream()
            for _ in range(job.samples):
                begun = 1  # the row's first number has no comma before it
                for data in stream.blocks(job.sample_bytes):
                    for at in range(0, data.size, _CSV_PART):
                        part = _csv_text(data[at : at + _CSV_PART].view(job.spec.dtype))
                        f.write(part[begun:])
                        begun = 0
                f.write(b"\n")

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """The rows of a file; of a compressed one all samples are in all of it."""
        if spec.compression != "none":
            return super().sample_extents(path, spec)
        ends: list[NDArray[np.int64]] = []
        at = header = 0
        with open(path, "rb", buffering=0) as f:
            while data := f.read(1 << 22):
                header = header or int(not at and data.startswith(_HEADER))
                ends.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + at)
                at += len(data)
        lines = np.concatenate(ends) + 1 if ends else np.empty(0, np.int64)
        if at and (not lines.size or lines[-1] != at):
            raise bad_file(path, "the end of the last row", "missing", "a line feed", at)
        self._check_rows(path, len(lines) - header, spec)
        starts = np.concatenate(([0], lines[:-1]))
        return SampleExtents.each(starts[header:], (lines - starts)[header:])

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:
        lines, header = self._lines(file.path, file.spec)
        own = (lines[header].count(b",") + 1 - header) * file.spec.dtype.itemsize
        yield "sample_bytes", own, file.sample_bytes

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        lines, header = self._lines(path, spec)
        return np.array(lines[index + header].split(b",")[header:]).astype(spec.dtype)

    def _lines(self, path: str, spec: DatasetSpec) -> tuple[list[bytes], int]:
        """All lines, and how many of them are a header."""
        opened: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
        if spec.compression == "zip":
            with zipfile.ZipFile(path) as archive:
                lines = archive.read(archive.namelist()[0]).splitlines()
        else:
            with opened.get(spec.compression, open)(path, "rb") as f:
                lines = f.read().splitlines()
        header = int(bool(lines) and lines[0].startswith(_HEADER))
        self._check_rows(path, len(lines) - header, spec)
        return lines, header

    @staticmethod
    def _check_rows(path: str, lines: int, spec: DatasetSpec) -> None:
        if lines != spec.num_samples_per_file:
            raise bad_file(path, "the number of rows", lines, spec.num_samples_per_file)


def _csv_text(values: NDArray[Any]) -> bytes:
    """Numbers, each behind a comma; bytes by a table, since they are what DLIO has."""
    if values.dtype == np.uint8:
        text: bytes = _TABLE[values][_USED[values]].tobytes()
        return text
    return ("," + ",".join(map(str, values.tolist()))).encode()


@contextlib.contextmanager
def _compressed(out: OutputFile, spec: DatasetSpec, name: str) -> Iterator[IO[bytes]]:
    """A file to write plain text to."""
    file, level = cast("IO[bytes]", out), min(spec.compression_level, 9)
    packed: Any = contextlib.nullcontext(file)
    match spec.compression:
        case "gzip":
            packed = gzip.GzipFile("", "wb", level, file, mtime=0)
        case "bz2":
            packed = bz2.BZ2File(file, "wb", compresslevel=max(1, level))
        case "xz":
            packed = lzma.LZMAFile(file, "wb", preset=level)  # noqa: SIM115 - closed below
        case "zip":
            archive = zipfile.ZipFile(no_seek(out), "w", compresslevel=level)
            info = zipfile.ZipInfo(name.removesuffix(".zip"))
            info.compress_type = zipfile.ZIP_DEFLATED
            with archive, archive.open(info, "w", force_zip64=True) as member:
                yield member
            return
    with packed as f:
        yield f


# -- indexed binary --------------------------------------------------------------------------------------

_OFFSETS, _SIZES = ".off.idx", ".sz.idx"
_INDEX_PART = 1 << 18
"""Numbers of an index that are made at a time."""


class _IndexedBinary(DatasetFormat):
    """Samples end to end, beside two files of uint64: offsets (`.off.idx`) and sizes (`.sz.idx`).

    Unlike DLIO's own generator, which starts again from 0 at each of its buffers, offsets are right in files of
    any size.
    """

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout:
        return FileLayout((PieceRun(1, (noise(_file_sample_bytes(spec, shape)),)),))

    def write_indices(self, job: FileJob) -> None:
        buffer = WriteBuffer()
        for suffix in (_OFFSETS, _SIZES):
            with OutputFile(job.path + suffix, buffer) as index:
                for first in range(0, job.samples, _INDEX_PART):
                    rows = np.arange(first, min(first + _INDEX_PART, job.samples), dtype=np.uint64)
                    factor = rows if suffix == _OFFSETS else np.ones_like(rows)
                    index.write(factor * np.uint64(job.sample_bytes))

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """As the indices say."""
        samples = spec.num_samples_per_file
        offsets, sizes = (np.fromfile(path + suffix, np.uint64) for suffix in (_OFFSETS, _SIZES))
        for suffix, numbers in ((_OFFSETS, offsets), (_SIZES, sizes)):
            if len(numbers) != samples:
                raise bad_file(path + suffix, "the number of samples", len(numbers), samples)
        end, size = int((offsets + sizes).max()), os.stat(path).st_size
        if end > size:
            raise bad_file(path, "the file's size", size, f"{end:,}, the end of its last sample")
        return SampleExtents.each(offsets, sizes)

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        """Maps the file and copies the sample: its pages are really read."""
        extents = self.sample_extents(path, spec)
        offset, length = int(extents.offset[index]), int(extents.length[index])
        data = np.memmap(path, np.uint8, "r") if os.stat(path).st_size else np.empty(0)
        sample: NDArray[Any] = np.array(data[offset : offset + length]).view(spec.dtype)
        return sample


# -- files that are read whole ---------------------------------------------------------------------------


class _Synthetic(DatasetFormat):
    """Tiny files that stand for samples; DLIO's synthetic loader reads none of them."""

    def write(self, out: OutputFile, job: FileJob) -> None:
        out.write(str(job.number).encode())

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:  # noqa: ARG002
        """Each sample is the file's bytes."""
        return np.frombuffer(Path(path).read_bytes(), np.uint8)


class _RecordedFiles(_Synthetic):
    """Files of a record's names and sizes, which hold noise; their samples lie where they were read."""

    write = DatasetFormat.write

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout:  # noqa: ARG002
        return FileLayout((PieceRun(1, (noise(shape[0]),)),))

    def file_bytes(self, spec: DatasetSpec, shape: tuple[int, ...]) -> int:  # noqa: ARG002
        return shape[0]

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """Where the samples were read. A file's name in the record is the end of its path, wherever it lies."""
        assert spec.requests is not None
        replay = replay_of(spec.requests)
        at = path.find("/")
        while at >= 0:
            if replay.has(name := path[at + 1 :]):
                return SampleExtents.each(*replay.extents(name))
            at = path.find("/", at + 1)
        raise bad_file(path, "its name", os.path.basename(path), "one of the record")


_SIDE_MAX = 65_535
_BLOCK = 64
"""Coefficients of a block, and bytes of its code."""

_END_OF_BLOCK = b"\xfe"
_FLAT = b"\xfe" + _END_OF_BLOCK
"""A block as bright as the one before it."""

_NO_FRAMES = (0xC4, 0xC8, 0xCC)
"""Markers among those of frames that are none."""

_RESTARTS = 8
_END = b"\xff\xd9"


class _Image(DatasetFormat):
    """A grey picture: a file is one sample.

    Attributes:
        ends: how a file begins and ends.
    """

    ends: tuple[bytes, bytes]

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """All of the file, whose ends are looked at."""
        with open(path, "rb") as file:
            begin = file.read(len(self.ends[0]))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(self.ends[1])))
            end = file.read()
        if begin != self.ends[0]:
            raise bad_file(path, "its beginning", begin, f"{self.ends[0]!r}, a {spec.format}'s")
        if end != self.ends[1]:
            raise bad_file(path, "its end", end, f"{self.ends[1]!r}, a {spec.format}'s", size)
        return SampleExtents.shared(1, 0, size)

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:
        from PIL import Image  # other formats start without it

        sides: tuple[int, ...] = ()
        # Its head may be longer than what is known of it, or it is larger than Pillow likes.
        with contextlib.suppress(OSError, Image.DecompressionBombError), warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            sides = Image.open(io.BytesIO(file.begin)).size
        if sides:
            yield "sample_bytes", math.prod(sides), file.sample_bytes

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:  # noqa: ARG002
        from PIL import Image

        try:
            with Image.open(path) as opened:
                return np.asarray(opened)
        except (SyntaxError, OSError) as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise
            raise bad_file(path, "the image", e, f"a {spec.format} that Pillow can decode") from e


class _Jpeg(_Image):
    """A grey image of noise, of exactly as many bytes as it has pixels."""

    ends = (b"\xff\xd8\xff", _END)

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout:  # noqa: ARG002
        """Headers, rows of noise with restart markers, and flat blocks.

        Raises:
            SourceError: the image is larger than a JPEG can be.
        """
        height, width = shape
        if max(shape) > _SIDE_MAX:
            raise SourceError(
                f"an image of {height:,} x {width:,} pixels is no JPEG, which has at most "
                f"{_SIDE_MAX:,} a side.",
                next_step="Lower dataset.record_length_bytes, or choose another dataset.format.",
            )
        across, down = -(-width // 8), -(-height // 8)
        head = _jpeg_headers(height, width, across)
        spare = len(head) + down * (across * _BLOCK + len(_END)) - height * width
        saved = _BLOCK - len(_FLAT)
        flat = min(-(-spare // saved), across * down)
        kept = max(0, flat * saved - spare)
        whole, coded = divmod(across * down - flat, across)
        # Each row of blocks ends with a restart marker, so that brightness does not wander away.
        row = noise(across * _BLOCK, PieceKind.CODES)
        cycle = tuple(p for i in range(_RESTARTS) for p in (row, text(_restart(i))))
        partial = noise(coded * _BLOCK + 1 + kept, PieceKind.CODES)
        flat_rest = text(_END_OF_BLOCK + _flat_rest(whole, down, across, across - coded - 1))
        last = PieceRun(1, (*cycle[: 2 * (whole % _RESTARTS)], partial, flat_rest))
        return FileLayout((PieceRun(1, (text(head),)), PieceRun(whole // _RESTARTS, cycle), last))


def _flat_rest(row: int, down: int, across: int, left: int) -> bytes:
    """The blocks that are left of a row, and all rows below."""
    rows = [_FLAT * left, *[_FLAT * across] * (down - row - 1)]
    return b"".join(
        blocks + (_restart(row + i) if row + i < down - 1 else _END)
        for i, blocks in enumerate(rows)
    )


def _restart(row: int) -> bytes:
    return bytes((0xFF, 0xD0 + row % _RESTARTS))


def _jpeg_headers(height: int, width: int, restart: int) -> bytes:
    """All before the scan's data: a grey baseline JPEG without quantisation."""
    sizes = bytes([1] * 8 + [0] * 8 + list(range(7, -1, -1)))  # a code of each length, 1 to 8
    segments = (
        (0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
        (0xDB, b"\0" + b"\1" * 64),
        (0xC0, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0"),
        (0xC4, b"\x00" + sizes + b"\x10" + sizes),
        (0xDD, struct.pack(">H", restart)),
        (0xDA, b"\1\1\0\0\x3f\0"),
    )
    return b"\xff\xd8" + b"".join(
        struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data for marker, data in segments
    )


class _Png(_Image):
    """Noise, stored: it would be no smaller if it was compressed. Written as it is made."""

    ends = (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82")

    def write(self, out: OutputFile, job: FileJob) -> None:
        (height, width), stream, stored = job.shape, job.stream(), zlib.compressobj(0)
        head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # grey, 8 bits, not interlaced
        out.write(self.ends[0] + _png_chunk(b"IHDR", head))
        rows = max(1, BLOCK_BYTES // (width + 1))
        for first in range(0, height, rows):
            lines = np.zeros((min(rows, height - first), width + 1), np.uint8)  # 0: no filter
            lines[:, 1:] = stream.take(lines.size - len(lines)).reshape(len(lines), width)
            out.write(_png_chunk(b"IDAT", stored.compress(lines.tobytes())))
        out.write(_png_chunk(b"IDAT", stored.flush()) + _png_chunk(b"IEND", b""))


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(data, zlib.crc32(kind))
    return b"".join((struct.pack(">I", len(data)), kind, data, struct.pack(">I", checksum)))


FORMATS: dict[str, DatasetFormat] = {
    "csv": _Csv(), "indexed_binary": _IndexedBinary(), "mmap_indexed_binary": _IndexedBinary(),
    "jpeg": _Jpeg(), "npy": _Npy(), "npz": _Npz(), "png": _Png(),
    "recorded": _RecordedFiles(), "synthetic": _Synthetic(),
}  # fmt: skip
