"""Keyed permutations of [0, n).

A permutation is a pure function of (n, key) in O(1) memory, with its inverse. Up to 4,096 elements
it is a Fisher-Yates table; above, a Feistel network over the smallest bit width that holds n, with
cycle walking (see native/core/permutation.h for the algorithm and its sources).

A 64-bit key cannot reach all n! orders once n > 20: no generator with a 64-bit seed can. What the
tests hold is that no statistic we know of tells its orders from random ones.
"""

from __future__ import annotations

from functools import lru_cache

from headrace._native import Permutation

__all__ = ["SAMPLES_MAX", "Permutation", "keyed"]

SAMPLES_MAX = 1 << 48
"""The most elements a permutation can have, and so the most samples an order can have."""


@lru_cache(maxsize=64)
def keyed(n: int, key: int) -> Permutation:
    """Return the permutation of [0, n) under `key`, kept for the batches that follow.

    Making a table of 4,096 takes about 12 us, more than looking up a batch in it. At most 64 are
    kept: 1 MiB.

    Raises:
        ValueError: n is not 1 to 2^48.
    """
    return Permutation(n, key)
