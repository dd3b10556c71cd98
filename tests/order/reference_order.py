"""Permutations, orders and order hashes in plain Python: the slow side of the equivalence tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.order.hash import GOLDEN, MASK, SAMPLES_MAX, Purpose, derive_key, mix64

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TABLE_SIZE_MAX = 4096
"""Up to here a permutation is a table; above, a Feistel network."""

ROUNDS = 8


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


def shuffled(values: Sequence[int], seed: int, *path: int) -> list[int]:
    """The values in the order of the permutation whose key is derived so."""
    if not values:
        return []
    permutation = ReferencePermutation(len(values), derive_key(seed, *path))
    return [values[at] for at in permutation.range(0, len(values))]


def reference_blocked(
    samples: int, block_samples: int, window_blocks: int, seed: int, epoch: int
) -> list[int]:
    """A whole epoch of a blocked order, from lists of blocks."""
    blocks = [range(samples)[at : at + block_samples] for at in range(0, samples, block_samples)]
    numbers = shuffled(range(len(blocks)), seed, Purpose.BLOCKS, epoch)
    indices: list[int] = []
    for window, first in enumerate(range(0, len(numbers), window_blocks)):
        together = [i for number in numbers[first : first + window_blocks] for i in blocks[number]]
        indices += shuffled(together, seed, Purpose.WINDOW, epoch, window)
    return indices


def reference_opportunistic(
    samples: int, resident: Sequence[tuple[int, int]], seed: int, epochs: int, epoch: int
) -> list[int]:
    """A whole epoch of an opportunistic order, from lists of parts."""
    near = [i for first, last in resident for i in range(first, last)]
    others = sorted(set(range(samples)) - set(near))
    parts = [near] if near and others else []
    count = min(epochs, -(-samples // len(near))) if parts else 0
    if epoch >= count:
        return shuffled(range(samples), seed, Purpose.SHUFFLED, epoch)
    dealt = shuffled(others, seed, Purpose.PARTS) if count > 1 else others
    parts += [dealt[at : at + len(near)] for at in range(0, len(dealt), len(near))]
    last = parts[epoch + 1] if epoch + 1 < count else []
    between = parts[:epoch] + parts[epoch + 1 + bool(last) :]
    groups = (parts[epoch], [i for part in between for i in part], last)
    return [
        i
        for number, group in enumerate(groups)
        for i in shuffled(group, seed, Purpose.RESIDENT, epoch, number)
    ]


def reference_balanced(labels: Sequence[int], seed: int, length: int, epoch: int) -> list[int]:
    """A whole epoch of a balanced order, draw by draw."""
    classes = sorted({label for label in labels if label >= 0})
    members = {c: [i for i, label in enumerate(labels) if label == c] for c in classes}
    rounds = -(-length // len(classes))
    key = derive_key(seed, Purpose.CLASSES, epoch)
    indices: list[int] = []
    for number in range(rounds):
        begin = number * len(classes)
        keys = [mix64(mix64(begin + i + GOLDEN) ^ key) for i in range(len(classes))]
        for c in (classes[i] for i in sorted(range(len(classes)), key=keys.__getitem__)):
            cycle, draw = divmod(epoch * rounds + number, len(members[c]))
            indices.append(shuffled(members[c], seed, Purpose.MEMBERS, c, cycle)[draw])
    return indices[:length]


def reference_order_hash(position_start: int, indices: Sequence[int]) -> int:
    """Hash one batch in plain Python; the slow side of the equivalence test."""
    total = 0
    for position, index in enumerate(indices, position_start):
        total += mix64(mix64(position + GOLDEN) ^ (int(index) & MASK))
    return total & MASK
