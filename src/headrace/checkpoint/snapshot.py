"""Snapshot: a tree's arrays copied into memory that is kept from one checkpoint to the next.

Training goes on while the copy is written. Fresh memory costs four times the copy, so the memory of the last
snapshot is filled again; it grows to the largest tree, no further.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.checkpoint.tree import DTYPES, leaf_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.checkpoint.tree import Leaf

__all__ = ["Snapshot"]

_ALIGNMENT = 64
_THREADS = 4
"""That copy: one core does not reach the memory's bandwidth."""
_ALONE_BYTES = 32 << 20
"""Smaller trees are copied by one."""


class Snapshot:
    """Memory for one copy of a tree's arrays."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Copies the arrays; what it returned before is overwritten."""
        starts, end = [], 0
        for leaf in leaves:
            starts.append(end)
            end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory.size < end:
            self._memory = np.empty(0, np.uint8)  # not both at once
            self._memory = np.empty(end, np.uint8)
        places = [self._memory[s : s + leaf.nbytes] for s, leaf in zip(starts, leaves, strict=True)]
        if end < _ALONE_BYTES:
            for leaf, place in zip(leaves, places, strict=True):
                place[:] = leaf_bytes(leaf)
        else:
            with ThreadPoolExecutor(_THREADS, "snapshot") as pool:
                list(pool.map(_copy, leaves, places))
        return [_copied(leaf, place) for leaf, place in zip(leaves, places, strict=True)]

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        return self._memory.size


def _copy(leaf: Leaf, place: NDArray[np.uint8]) -> None:
    place[:] = leaf_bytes(leaf)


def _copied(leaf: Leaf, place: NDArray[np.uint8]) -> Leaf:
    """The leaf with its bytes in the snapshot. Of types that numpy lacks the bytes are enough."""
    kind = DTYPES[leaf.dtype]
    known = kind != "bfloat16" and not kind.startswith("float8")
    return replace(leaf, source=place.view(kind) if known else place)
