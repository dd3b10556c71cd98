"""png: an 8-bit grey image of noise for each sample. Written here: noise is stored, not compressed."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.formats.images import open_reader, sample_extents

if TYPE_CHECKING:
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "open_reader", "sample_extents", "write"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ROWS_BYTES = 1 << 20
_GREY_8 = b"\x08\x00\x00\x00\x00"
"""Bit depth, colour type, compression, filter, interlace."""


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    height, width = job.shape
    out.write(_SIGNATURE + _chunk(b"IHDR", struct.pack(">2L", width, height) + _GREY_8))
    packer = zlib.compressobj(level=0)
    stream = job.stream()
    at_once = max(1, _ROWS_BYTES // width)
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


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return None
