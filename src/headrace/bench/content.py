"""Content: bytes for generated samples that no disk can compress or deduplicate, at memory speed.

A pool of random bytes (Philox, by the seed) is XORed with a 64-bit key for each block of each file. A byte is
a pure function of (seed, file, position), so any number of ranks writes the same files, and no two
blocks are alike. The pool stays in the CPU's cache: a block costs one pass over memory.

CRC-32 is linear over XOR, so a block's checksum follows from its key: zip's CRC costs nothing per byte.
"""

from __future__ import annotations

import threading
import zlib
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["BLOCK_BYTES", "Content", "Stream", "crc32_combine"]

BLOCK_BYTES = 1 << 20
"""Of the pool, and of what one key covers: fits into a core's L2 cache."""

_MASK = (1 << 64) - 1
_POLYNOMIAL = 0xEDB88320


def _mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit numbers that leaves no pattern."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


class Content:
    """The content of a data set's files.

    Args:
        seed: whole number; another one makes wholly other bytes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._local = threading.local()
        generator = np.random.Philox(key=seed & _MASK)
        self._pool: NDArray[np.uint64] = generator.random_raw(BLOCK_BYTES // 8)

    def stream(self, file: int) -> Stream:
        """The bytes of a file, from the first; `file` is its number in the data set."""
        return Stream(self, _mix(_mix(self.seed & _MASK) ^ file))

    def scratch(self) -> NDArray[np.uint64]:
        """This thread's block: fresh memory for each file would cost more than what it holds."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty(BLOCK_BYTES // 8, np.uint64)
        scratch: NDArray[np.uint64] = self._local.scratch
        return scratch

    @property
    def pool(self) -> NDArray[np.uint64]:
        """The random words."""
        return self._pool

    def block_crc(self, key: int) -> int:
        """CRC-32 of a whole block, of its key."""
        crc, tables = self._key_crcs
        for position, byte in enumerate(key.to_bytes(8, "little")):
            crc ^= tables[position][byte]
        return crc

    @cached_property
    def _key_crcs(self) -> tuple[int, list[list[int]]]:
        """CRC-32 of the pool, and for each byte of a key what it changes."""
        zeros = zlib.crc32(bytes(BLOCK_BYTES))
        tables = []
        for position in range(8):
            bits = []
            for bit in range(8):
                word = bytearray(8)
                word[position] = 1 << bit
                bits.append(zlib.crc32(bytes(word) * (BLOCK_BYTES // 8)) ^ zeros)
            table = [0] * 256
            for value in range(1, 256):
                lowest = (value & -value).bit_length() - 1
                table[value] = table[value & (value - 1)] ^ bits[lowest]
            tables.append(table)
        return zlib.crc32(self._pool.tobytes()), tables


class Stream:
    """A file's bytes, taken one after the other. A thread has one at a time.

    Args:
        content: of the data set.
        key: the file's.
    """

    def __init__(self, content: Content, key: int) -> None:
        self._content = content
        self._pool = content.pool
        self._key = key
        self._block = 0
        self._scratch = content.scratch()

    def _next_key(self) -> int:
        key = _mix(self._key ^ self._block)
        self._block += 1
        return key

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """The next bytes, in arrays that hold until the next one is asked for."""
        return (data for data, _ in self._blocks(nbytes))

    def checked_blocks(self, nbytes: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """The next bytes, each array with its CRC-32."""
        for data, key in self._blocks(nbytes):
            whole = data.size == BLOCK_BYTES
            yield data, self._content.block_crc(key) if whole else zlib.crc32(data.data)

    def _blocks(self, nbytes: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
        while nbytes > 0:
            size = min(nbytes, BLOCK_BYTES)
            words = self._scratch[: -(-size // 8)]
            key = self._next_key()
            np.bitwise_xor(self._pool[: words.size], np.uint64(key), out=words)
            yield words.view(np.uint8)[:size], key
            nbytes -= size

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next bytes as an array of their own."""
        whole = np.empty(nbytes, np.uint8)
        at = 0
        for data in self.blocks(nbytes):
            whole[at : at + data.size] = data
            at += data.size
        return whole


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two pieces in a row, of the CRC-32 of each."""
    return _shift(first, second_bytes) ^ second


def _shift(crc: int, nbytes: int) -> int:
    """The CRC register after so many zero bytes: a product with x^8n in the CRC's field."""
    power = 0
    while nbytes:
        if nbytes & 1:
            crc = _apply(_zeros(power), crc)
        nbytes >>= 1
        power += 1
    return crc


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """The 32 x 32 matrix over GF(2) of 2^power zero bytes."""
    if power == 0:
        rows = [_POLYNOMIAL] + [1 << i for i in range(31)]
        for _ in range(3):
            rows = [_apply(rows, row) for row in rows]
        return tuple(rows)
    half = _zeros(power - 1)
    return tuple(_apply(half, row) for row in half)


def _apply(matrix: tuple[int, ...] | list[int], vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total
