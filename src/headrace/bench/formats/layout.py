"""Layout: what a generated file consists of: constant text around noise, and the checksums over it.

Native code writes files from their layouts (`_native.FileWriter`). `write_layout` does the same in plain
Python: it says what a layout means, and the tests hold the two together.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.store.sources.tfrecord import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.content import Stream
    from headrace.store.output_file import OutputFile

__all__ = [
    "BEGIN",
    "END",
    "LARGEST_CODE",
    "Checksum",
    "Kind",
    "Layout",
    "Piece",
    "Run",
    "noise",
    "text",
    "write_layout",
]

LARGEST_CODE = 0xFD
"""Of `Kind.CODES`: the two bytes above are no codes of a generated JPEG."""


class Kind(IntEnum):
    """What a piece is; native code's numbers."""

    TEXT = 0
    NOISE = 1
    CODES = 2
    """Noise whose bytes are at most `LARGEST_CODE`."""
    BEGIN = 3
    END = 4


class Checksum(IntEnum):
    """Which checksum the pieces between BEGIN and END have; native code's numbers."""

    NONE = 0
    ZIP = 1
    """CRC-32, once in a file: written over it at the layout's `patches`."""
    RECORD = 2
    """TFRecord's masked CRC-32C, written where each END is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a file."""

    kind: Kind
    nbytes: int = 0
    text: bytes = b""


def text(data: bytes) -> Piece:
    """A piece that is the same in all files."""
    return Piece(Kind.TEXT, 0, data)


def noise(nbytes: int, kind: Kind = Kind.NOISE) -> Piece:
    """A piece of the file's own bytes."""
    return Piece(kind, nbytes)


BEGIN, END = Piece(Kind.BEGIN), Piece(Kind.END)


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces, so many times one after the other."""

    times: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A file's layout."""

    runs: tuple[Run, ...]
    checksum: Checksum = Checksum.NONE
    patches: tuple[int, ...] = ()
    """Offsets in the file of CRC-32s, which are not known before."""

    @property
    def nbytes(self) -> int:
        """Of the finished file."""
        sum_bytes = 4 if self.checksum is Checksum.RECORD else 0
        return sum(
            run.times
            * sum(p.nbytes + len(p.text) + sum_bytes * (p.kind is Kind.END) for p in run.pieces)
            for run in self.runs
        )

    def native(self) -> _native.FileLayout:
        """The same for native code.

        Raises:
            ValueError: the layout makes no sense.
        """
        runs = [
            (run.times, [(int(p.kind), p.nbytes, p.text) for p in run.pieces]) for run in self.runs
        ]
        return _native.FileLayout(runs, int(self.checksum), list(self.patches))


def write_layout(out: OutputFile, layout: Layout, stream: Stream) -> None:
    """Writes a file, piece by piece."""
    crc, summing = 0, False
    for piece in _pieces_of(layout):
        if piece.kind is Kind.BEGIN:
            crc, summing = 0, True
        elif piece.kind is Kind.END:
            summing = False
            if layout.checksum is Checksum.RECORD:
                out.write(mask(crc).to_bytes(4, "little"))
        else:
            for data in _bytes_of(piece, stream):
                if summing:
                    crc = _continued(layout.checksum, crc, data)
                out.write(data)
    for at in layout.patches:
        out.patch(at, crc.to_bytes(4, "little"))


def _pieces_of(layout: Layout) -> Iterator[Piece]:
    for run in layout.runs:
        for _ in range(run.times):
            yield from run.pieces


def _bytes_of(piece: Piece, stream: Stream) -> Iterator[NDArray[np.uint8]]:
    if piece.kind is Kind.TEXT:
        yield np.frombuffer(piece.text, np.uint8)
        return
    for data in stream.blocks(piece.nbytes):
        yield np.minimum(data, LARGEST_CODE) if piece.kind is Kind.CODES else data


def _continued(checksum: Checksum, crc: int, data: NDArray[np.uint8]) -> int:
    if checksum is Checksum.ZIP:
        return zlib.crc32(data.data, crc)
    return _native.crc32c(data, crc)
