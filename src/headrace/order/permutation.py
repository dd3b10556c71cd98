"""Keyed permutations of [0, n): the native one, and the plain Python one it is tested against.

A permutation is a pure function of (n, key) in O(1) memory, with its inverse. Up to 4,096 elements
it is a Fisher-Yates table; above, a Feistel network over the smallest bit width that holds n, with
cycle walking (see native/core/permutation.h for the algorithm and its sources).

A 64-bit key cannot reach all n! orders once n > 20: no generator with a 64-bit seed can. What the
tests hold is that no statistic we know of tells its orders from random ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from headrace._native import Permutation
from headrace.order.hash import GOLDEN, MASK, mix64

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SAMPLES_MAX", "Permutation", "ReferencePermutation", "keyed"]

SAMPLES_MAX = 1 << 48
"""The most elements a permutation can have, and so the most samples an order can have."""

TABLE_SIZE_MAX = 4096
"""Up to here a permutation is a table; above, a Feistel network."""

ROUNDS = 8


@lru_cache(maxsize=64)
def keyed(n: int, key: int) -> Permutation:
    """Return the permutation of [0, n) under `key`, kept for the batches that follow.

    Making a table of 4,096 takes about 12 us, more than looking up a batch in it. At most 64 are
    kept: 1 MiB.

    Raises:
        ValueError: n is not 1 to 2^48.
    """
    return Permutation(n, key)


class ReferencePermutation:
    """The keyed permutation in plain Python, one element at a time."""

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= SAMPLES_MAX:
            raise ValueError(f"n is {n}, expected 1 to 2^48 elements")
        self.n = n
        self._words = _key_stream(n, key)
        if n <= TABLE_SIZE_MAX:
            self._table = self._shuffled_table()
        else:
            bits = (n - 1).bit_length()
            self._low_bits = bits // 2
            self._masks = ((1 << (bits - bits // 2)) - 1, (1 << (bits // 2)) - 1)
            self._round_keys = [next(self._words) for _ in range(ROUNDS)]

    def at(self, position: int) -> int:
        """Return the index at one position."""
        if self.n <= TABLE_SIZE_MAX:
            return self._table[position]
        index = self._network(position, forward=True)
        while index >= self.n:
            index = self._network(index, forward=True)
        return index

    def inverse(self, index: int) -> int:
        """Return the position of one index."""
        if self.n <= TABLE_SIZE_MAX:
            return self._table.index(index)
        position = self._network(index, forward=False)
        while position >= self.n:
            position = self._network(position, forward=False)
        return position

    def range(self, start: int, stop: int) -> list[int]:
        """Return the indices at positions `start` to `stop - 1`."""
        return [self.at(position) for position in range(start, stop)]

    def _shuffled_table(self) -> list[int]:
        table = list(range(self.n))
        for last in range(self.n - 1, 0, -1):
            other = self._draw_below(last + 1)
            table[last], table[other] = table[other], table[last]
        return table

    def _draw_below(self, bound: int) -> int:
        """Draw from [0, bound) without bias: the part of 2^64 that does not divide is redrawn."""
        rejected = (1 << 64) % bound
        while True:
            product = next(self._words) * bound
            if product & MASK >= rejected:
                return product >> 64

    def _network(self, value: int, *, forward: bool) -> int:
        """Run the rounds; even rounds change the high half (0), odd ones the low half (1)."""
        halves = [value >> self._low_bits, value & self._masks[1]]
        for i in range(ROUNDS) if forward else reversed(range(ROUNDS)):
            changed = i % 2
            other = halves[1 - changed]
            halves[changed] ^= mix64(other ^ self._round_keys[i]) & self._masks[changed]
        return halves[0] << self._low_bits | halves[1]


def _key_stream(n: int, key: int) -> Iterator[int]:
    state = mix64(key ^ mix64(n + GOLDEN))
    while True:
        state = (state + GOLDEN) & MASK
        yield mix64(state)
