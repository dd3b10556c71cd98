"""Content: bytes for generated files that no disk can compress or deduplicate, at memory speed.

A pool of random bytes (Philox, by the seed) is XORed with a 64-bit key for each block of each file. A byte is
a pure function of (seed, file, position), so any number of ranks writes the same files, and no two
blocks are alike. The pool stays in the CPU's cache: a block costs one pass over memory.

A `FileLayout` says what a file consists of: constant text around noise, and the checksums over it. Native code
(`_native.FileWriter`) writes files from layouts; `ByteStream` has the same bytes in Python.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace import _native
from headrace.order.hash import GOLDEN, MASK, mix64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


BLOCK_BYTES = 1 << 20
"""Of the pool, and of what one key covers: fits into a core's L2 cache."""


def _mix(value: int) -> int:
    """SplitMix64: a bijection of 64-bit numbers that leaves no pattern."""
    return mix64(value + GOLDEN)


class Content:
    """The content of a data set's files.

    Args:
        seed: whole number; another one makes wholly other bytes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._seed_key = _mix(seed & MASK)
        self._local = threading.local()
        self._words: NDArray[np.uint64] = np.random.Philox(key=seed & MASK).random_raw(
            BLOCK_BYTES // 8
        )

    def key(self, file: int) -> int:
        """The key of a file, by its number in the data set."""
        return _mix(self._seed_key ^ file)

    def stream(self, file: int) -> ByteStream:
        """The bytes of a file, from the first; `file` is its number in the data set."""
        return ByteStream(self, self.key(file))

    def scratch(self) -> NDArray[np.uint64]:
        """This thread's block: fresh memory for each file would cost more than what it holds."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty(BLOCK_BYTES // 8 + 1, np.uint64)
        scratch: NDArray[np.uint64] = self._local.scratch
        return scratch

    @cached_property
    def native(self) -> _native.Noise:
        """The same for native code."""
        return _native.Noise(self._words)

    @cached_property
    def pool(self) -> NDArray[np.uint8]:
        """The random bytes, and a word of zeros behind them for who reads whole words."""
        return np.concatenate([self._words, np.zeros(1, np.uint64)]).view(np.uint8)


class ByteStream:
    """A file's bytes, taken one after the other. A thread has one at a time."""

    def __init__(self, content: Content, key: int) -> None:
        self._content = content
        self._key = key
        self._position = 0
        self._scratch = content.scratch()

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """The next bytes, in arrays that hold until the next one is asked for."""
        while nbytes > 0:
            block, at = divmod(self._position, BLOCK_BYTES)
            size = min(nbytes, BLOCK_BYTES - at)
            count = -(-size // 8)
            words = self._scratch[:count]
            # The key's bytes lie over a block's, from its beginning: in between they are turned.
            key, turn = _mix(self._key ^ block), at % 8 * 8
            turned = (key >> turn | key << (64 - turn)) & MASK
            pool = np.frombuffer(self._content.pool, np.uint64, count, at)
            np.bitwise_xor(pool, np.uint64(turned), out=words)
            self._position += size
            nbytes -= size
            yield words.view(np.uint8)[:size]

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next bytes as an array of their own."""
        whole = np.empty(nbytes, np.uint8)
        at = 0
        for data in self.blocks(nbytes):
            whole[at : at + data.size] = data
            at += data.size
        return whole


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
