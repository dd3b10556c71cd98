"""Hashes of orders: the mixing function, keys derived from a seed, keyed permutations, the order hash.

`mix64` is the finaliser of SplitMix64 (Steele, Lea and Flood 2014; Stafford's variant 13), the same
function as in the native library. Everything random in headrace comes from it, so orders are the
same on every machine and with every version of numpy.

A **permutation** of [0, n) is a pure function of (n, key) in O(1) memory, with its inverse. Up to 4,096
elements it is a Fisher-Yates table; above, a Feistel network over the smallest bit width that holds n, with
cycle walking (see native/core/permutation.h for the algorithm and its sources). A 64-bit key cannot reach
all n! orders once n > 20: no generator with a 64-bit seed can. What the tests hold is that no statistic we
know of tells its orders from random ones.

The **order hash** is H = sum over delivered samples of h(position, index) mod 2^64. A sum does not
care about grouping: the partial hashes of ranks, workers and resumed runs add up to the hash of the
epoch, and a missing, doubled or misplaced sample changes it.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace._native import Permutation

if TYPE_CHECKING:
    import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the odd step that spreads counters before mixing."""

MASK = (1 << 64) - 1

SAMPLES_MAX = 1 << 48
"""The most elements a permutation can have, and so the most samples an order can have."""


def mix64(value: int) -> int:
    """Mix one 64-bit word; a bijection of [0, 2^64)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix each word of a uint64 array of any shape; equal to `mix64` of each."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Purpose(IntEnum):
    """What a key is for: keys of different purposes share nothing. Numbers are never reused."""

    SHUFFLED = 1
    BLOCKS = 2
    WINDOW = 3
    CLASSES = 4
    MEMBERS = 5
    DRAWS = 6
    SAMPLES = 7
    RESIDENT = 8
    PICTURES = 9
    AUGMENTATIONS = 10
    TOKENS = 11
    SOURCES = 12
    MIXES = 13
    PACKED = 14
    PARTS = 15


def derive_key(seed: int, *parts: int) -> int:
    """Derive a 64-bit key from a seed and a path of numbers (purpose, epoch, window, ...).

    For one seed and one path up to its last number, different last numbers give different keys.
    """
    key = mix64(seed + GOLDEN)
    for part in parts:
        key = mix64((key ^ part) + GOLDEN)
    return key


@lru_cache(maxsize=64)
def keyed(n: int, key: int) -> Permutation:
    """Return the permutation of [0, n) under `key`, kept for the batches that follow.

    Making a table of 4,096 takes about 12 us, more than looking up a batch in it. At most 64 are
    kept: 1 MiB.

    Raises ValueError if n is not 1 to 2^48.
    """
    return Permutation(n, key)


def hash_array(key: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Hash each counter under `key` to a uint64; same shape as `counters`."""
    spread = mix64_array(counters.astype(np.uint64) + np.uint64(GOLDEN))
    return mix64_array(spread ^ np.uint64(key))


def uniform(key: int, counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Hash each counter to a float64 in [0, 1), a multiple of 2^-53; same shape as `counters`."""
    return (hash_array(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order_hash(position_start: int, indices: npt.NDArray[np.int64]) -> int:
    """Hash one batch of deliveries.

    Args:
        position_start: the global position of the first sample, 0 to 2^63 - 1.
        indices: int64, one-dimensional; `indices[i]` was delivered at `position_start + i`.

    Returns:
        The batch's share of the order hash, 0 to 2^64 - 1.
    """
    return _native.order_hash(position_start, np.ascontiguousarray(indices, np.int64))


def position_hashes(position_start: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Hash each delivery of a batch by itself, uint64, shaped like `indices`; their sum is `order_hash`."""
    positions = np.arange(position_start, position_start + len(indices), dtype=np.uint64)
    spread = mix64_array(positions + np.uint64(GOLDEN))
    return mix64_array(spread ^ indices.astype(np.uint64))


def combine_hashes(*hashes: int) -> int:
    """Add partial order hashes (of ranks, workers or batches) mod 2^64."""
    return sum(hashes) & MASK
