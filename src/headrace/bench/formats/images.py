"""Images: jpeg and png files of noise, one sample each, which Pillow decodes.

A jpeg has exactly as many bytes as pixels, and no picture is encoded. The file's Huffman tables make a
coefficient of every byte up to 0xfd: a byte that begins with n ones codes a coefficient of 7 - n bits, which
are its other bits. So noise is a valid scan as it is, 64 bytes for 8 x 8 pixels, and cannot be compressed.
0xfe ends a block; 0xff would begin a marker. Blocks at the end of the image are flat, two bytes each, in
exchange for the file's headers.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.content import FileLayout, PieceKind, PieceRun, noise, text
from headrace.bench.formats import DatasetFormat, SampleExtents, bad_file, import_library
from headrace.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.content import FilePiece
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats import FileJob
    from headrace.store.output_file import OutputFile

_SIDE_MAX = 65_535
_BLOCK = 64
"""Coefficients of a block, and bytes of its code."""

_END_OF_BLOCK = b"\xfe"
_FLAT = b"\xfe" + _END_OF_BLOCK
"""A block as bright as the one before it."""

_RESTARTS = 8
_END = b"\xff\xd9"

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_ROWS_BYTES = 1 << 20
_PNG_GREY_8 = b"\x08\x00\x00\x00\x00"
"""Bit depth, colour type, compression, filter, interlace."""


class _Image(DatasetFormat):
    """A file is one sample.

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

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:  # noqa: ARG002
        image = import_library("PIL.Image", f"decoding {spec.format}")
        try:
            with image.open(path) as opened:
                return np.asarray(opened)
        except (image.UnidentifiedImageError, SyntaxError, OSError) as e:
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
        pieces: list[FilePiece] = list(cycle[: 2 * (whole % _RESTARTS)])
        pieces.append(noise(coded * _BLOCK + 1 + kept, PieceKind.CODES))
        pieces.append(text(_END_OF_BLOCK + _flat_rest(whole, down, across, across - coded - 1)))
        return FileLayout(
            (
                PieceRun(1, (text(head),)),
                PieceRun(whole // _RESTARTS, cycle),
                PieceRun(1, tuple(pieces)),
            )
        )


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
    """An 8-bit grey image of noise, which is stored, not compressed."""

    ends = (_PNG_SIGNATURE, b"IEND\xaeB`\x82")

    def write(self, out: OutputFile, job: FileJob) -> None:
        height, width = job.shape
        out.write(_PNG_SIGNATURE + _chunk(b"IHDR", struct.pack(">2L", width, height) + _PNG_GREY_8))
        packer = zlib.compressobj(level=0)
        stream = job.stream()
        at_once = max(1, _PNG_ROWS_BYTES // width)
        for first in range(0, height, at_once):
            count = min(at_once, height - first)
            rows = np.zeros((count, 1 + width), np.uint8)  # each begins with its filter: none
            rows[:, 1:] = stream.take(count * width).reshape(count, width)
            if data := packer.compress(rows.data):
                out.write(_chunk(b"IDAT", data))
        out.write(_chunk(b"IDAT", packer.flush()) + _chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(data, zlib.crc32(kind))
    return len(data).to_bytes(4, "big") + kind + data + crc.to_bytes(4, "big")


FORMATS: dict[str, DatasetFormat] = {"jpeg": _Jpeg(), "png": _Png()}
