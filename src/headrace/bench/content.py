"""Content: bytes for generated files that no disk can compress or deduplicate, at memory speed.

A pool of random bytes (Philox, by the seed) is XORed with a 64-bit key for each block of each file. A byte is
a pure function of (seed, file, position), so any number of ranks writes the same files, and no two
blocks are alike. The pool stays in the CPU's cache: a block costs one pass over memory.

A `FileLayout` says what a file consists of: constant text around noise, and the checksums over it. Native code
(`_native.FileWriter`) writes files from layouts; what libraries write takes its bytes from a `ByteStream`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace import _native
from headrace.order.hash import GOLDEN, MASK, mix64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


BLOCK_BYTES = 1 << 20
"""Of the pool, and of what one key covers: fits into a core's L2 cache."""


class Content:
    """The content of a data set's files.

    Args:
        seed: whole number; another one makes wholly other bytes.

    Attributes:
        native: the same for native code.
    """

    def __init__(self, seed: int) -> None:
        self._seed_key = mix64((seed & MASK) + GOLDEN)
        words: NDArray[np.uint64] = np.random.Philox(key=seed & MASK).random_raw(BLOCK_BYTES // 8)
        self.native = _native.Noise(words)

    def key(self, file: int) -> int:
        """The key of a file, by its number in the data set."""
        return mix64((self._seed_key ^ file) + GOLDEN)

    def stream(self, file: int) -> ByteStream:
        """The bytes of a file, from the first; `file` is its number in the data set."""
        return ByteStream(self.native, self.key(file))


class ByteStream:
    """A file's bytes, taken one after the other, by one thread."""

    def __init__(self, noise: _native.Noise, key: int) -> None:
        self._noise, self._key, self._position = noise, key, 0

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """The next bytes, in arrays that hold until the next one is asked for."""
        scratch = np.empty(min(nbytes, BLOCK_BYTES), np.uint8)
        while nbytes > 0:
            block = scratch[: min(nbytes, BLOCK_BYTES)]
            self._fill(block)
            nbytes -= block.size
            yield block

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next bytes as an array of their own."""
        whole = np.empty(nbytes, np.uint8)
        self._fill(whole)
        return whole

    def _fill(self, out: NDArray[np.uint8]) -> None:
        self._noise.fill(self._key, self._position, out)
        self._position += out.size


LARGEST_CODE = 0xFD
"""Of `PieceKind.CODES`: the two bytes above are no codes of a generated JPEG."""


class PieceKind(IntEnum):
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


class FilePiece(NamedTuple):
    """A piece of a file."""

    kind: PieceKind
    nbytes: int = 0
    text: bytes = b""


def text(data: bytes) -> FilePiece:
    """A piece that is the same in all files."""
    return FilePiece(PieceKind.TEXT, 0, data)


def noise(nbytes: int, kind: PieceKind = PieceKind.NOISE) -> FilePiece:
    """A piece of the file's own bytes."""
    return FilePiece(kind, nbytes)


BEGIN, END = FilePiece(PieceKind.BEGIN), FilePiece(PieceKind.END)


class PieceRun(NamedTuple):
    """Pieces, so many times one after the other."""

    times: int
    pieces: tuple[FilePiece, ...]


class FileLayout(NamedTuple):
    """A file's layout; `patches` are offsets of CRC-32s, which are not known before."""

    runs: tuple[PieceRun, ...]
    checksum: Checksum = Checksum.NONE
    patches: tuple[int, ...] = ()

    def native(self) -> _native.FileLayout:
        """The same for native code, which refuses what makes no sense by `ValueError`."""
        return _native.FileLayout(self.runs, self.checksum, self.patches)

    @property
    def nbytes(self) -> int:
        """Of the finished file."""
        return self.native().nbytes
