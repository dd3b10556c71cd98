"""jpeg: a grey image of noise for each sample, of exactly as many bytes as it has pixels.

No picture is encoded. The file's Huffman tables make a coefficient of every byte up to 0xfd: a byte that
begins with n ones codes a coefficient of 7 - n bits, which are its other bits. So noise is a valid scan as
it is, 64 bytes for 8 x 8 pixels, and cannot be compressed. 0xfe ends a block; 0xff would begin a marker.
Blocks at the end of the image are flat, two bytes each, in exchange for the file's headers.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from headrace.bench.content import Kind, Layout, Run, noise, text, write_layout
from headrace.bench.formats.images import open_reader, sample_extents
from headrace.errors import SourceError

if TYPE_CHECKING:
    from headrace.bench.content import Piece
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "layout", "open_reader", "sample_extents", "write"]

_SIDE_MAX = 65_535
_BLOCK = 64
"""Coefficients of a block, and bytes of its code."""

_END_OF_BLOCK = b"\xfe"
_FLAT = b"\xfe" + _END_OF_BLOCK
"""A block as bright as the one before it."""

_RESTARTS = 8
_END = b"\xff\xd9"


def layout(spec: DatasetSpec, shape: tuple[int, ...]) -> Layout:  # noqa: ARG001 - of all formats
    """What a file consists of.

    Raises:
        SourceError: the image is larger than a JPEG can be.
    """
    height, width = shape
    if max(shape) > _SIDE_MAX:
        raise SourceError(
            f"an image of {height:,} x {width:,} pixels is no JPEG, which has at most {_SIDE_MAX:,} a side.",
            next_step="Lower dataset.record_length_bytes, or choose another dataset.format.",
        )
    across, down = -(-width // 8), -(-height // 8)
    head = _headers(height, width, across)
    spare = len(head) + down * (across * _BLOCK + len(_END)) - height * width
    saved = _BLOCK - len(_FLAT)
    flat = min(-(-spare // saved), across * down)
    kept = max(0, flat * saved - spare)
    whole, coded = divmod(across * down - flat, across)
    # Each row of blocks ends with a restart marker, so that brightness does not wander away.
    row = noise(across * _BLOCK, Kind.CODES)
    cycle = tuple(p for i in range(_RESTARTS) for p in (row, text(_restart(i))))
    pieces: list[Piece] = list(cycle[: 2 * (whole % _RESTARTS)])
    pieces.append(noise(coded * _BLOCK + 1 + kept, Kind.CODES))
    pieces.append(text(_END_OF_BLOCK + _flat_rest(whole, down, across, across - coded - 1)))
    return Layout((
        Run(1, (text(head),)), Run(whole // _RESTARTS, cycle), Run(1, tuple(pieces)),
    ))  # fmt: skip


def _flat_rest(row: int, down: int, across: int, left: int) -> bytes:
    """The blocks that are left of a row, and all rows below."""
    rows = [_FLAT * left, *[_FLAT * across] * (down - row - 1)]
    return b"".join(
        blocks + (_restart(row + i) if row + i < down - 1 else _END)
        for i, blocks in enumerate(rows)
    )


def _restart(row: int) -> bytes:
    return bytes((0xFF, 0xD0 + row % _RESTARTS))


def _headers(height: int, width: int, restart: int) -> bytes:
    """All before the scan's data: a grey baseline JPEG without quantisation."""
    sizes = bytes([1] * 8 + [0] * 8 + list(range(7, -1, -1)))  # a code of each length, 1 to 8
    return b"".join((
        b"\xff\xd8",
        _segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
        _segment(0xDB, b"\0" + b"\1" * 64),
        _segment(0xC0, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0"),
        _segment(0xC4, b"\x00" + sizes + b"\x10" + sizes),
        _segment(0xDD, struct.pack(">H", restart)),
        _segment(0xDA, b"\1\1\0\0\x3f\0"),
    ))  # fmt: skip


def _segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    write_layout(out, layout(job.spec, job.shape), job.stream())


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:
    """Size of the finished file."""
    return layout(spec, shape).nbytes
