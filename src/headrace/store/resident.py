"""Which samples of a segment lie in the page cache as a whole: those of file volumes."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import HeadraceError
from headrace.store.residency import page_map

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.store.segment import OpenSegment

__all__ = ["ranges_of", "resident_samples"]

_AT_ONCE = 1 << 18


def resident_samples(segment: OpenSegment) -> list[tuple[int, int]]:
    """Ranges (first, behind the last) of samples, by global index; none where nobody can tell.

    Folders of files are not looked at: to ask for each file costs as much as to read it.
    """
    maps = {}
    for number, entry in enumerate(segment.volumes.entries):
        if entry.kind in ("packed", "file") and entry.bytes:
            with contextlib.suppress(HeadraceError, ValueError, OSError):
                fd, close = segment.volumes.borrow(number)
                found = page_map(fd, entry.bytes)
                if close:
                    os.close(fd)
                if found is not None:
                    maps[number] = np.concatenate([[0], np.cumsum(found)])
    out: list[tuple[int, int]] = []
    if not maps:
        return out
    near = np.zeros(segment.directory.samples, np.bool_)
    for start in range(0, len(near), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(near))
        extents = segment.directory.extents_of(np.arange(start, stop, dtype=np.int64))
        far = np.ones(len(extents["length"]), np.bool_)
        first = extents["offset"] // mmap.PAGESIZE
        last = (extents["offset"] + extents["length"] + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        for number, before in maps.items():
            mine = (extents["volume"] == number) & (last < len(before))
            far[mine] = before[last[mine]] - before[first[mine]] < last[mine] - first[mine]
        near[start:stop] = np.bincount(extents["sample"] - start, far, stop - start) == 0
    return ranges_of(near, segment.base)


def ranges_of(flags: NDArray[np.bool_], base: int = 0) -> list[tuple[int, int]]:
    """The ranges in which flags are set, each number `base` higher."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(a) + base, int(b) + base) for a, b in edges.reshape(-1, 2)]
