"""How much of a file lies in the page cache, without reading what is not there.

Asks the kernel: `cachestat` (Linux 6.5), else `mincore` over a mapping. Both answer for the moment only,
and may refuse where the file is not ours; then the answer is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.store.segment import OpenSegment


_SYS_CACHESTAT = 451  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes of the file that lie in the page cache, in whole pages; None where nobody can tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return resident_range(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def resident_range(fd: int, offset: int, length: int) -> int | None:
    """Bytes of a range of an open file that lie in the page cache; None: nobody can tell.

    Pages that the range only touches count as far as they belong to it.
    """
    if length <= 0:
        return 0
    pages = resident_pages(fd, length, offset)
    return None if pages is None else min(length, pages * mmap.PAGESIZE)


def resident_pages(fd: int, size: int, offset: int = 0) -> int | None:
    """Pages of `size` bytes, not 0, of an open file that lie in the page cache; None: nobody can tell."""
    extent = (ctypes.c_uint64 * 2)(offset, size)
    pages = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
    if not _libc.syscall(_SYS_CACHESTAT, fd, extent, pages, ctypes.c_uint(0)):
        return int(pages[0])
    in_cache = page_map(fd, min(offset + size, os.fstat(fd).st_size))
    return None if in_cache is None else int(in_cache[offset // mmap.PAGESIZE :].sum())


def page_map(fd: int, size: int) -> NDArray[np.bool_] | None:
    """Which pages of an open file of `size` bytes, not 0, lie in the page cache; None: nobody can tell."""
    try:
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    content = np.frombuffer(mapping, np.uint8)
    status = _libc.mincore(
        ctypes.c_void_p(content.ctypes.data),
        ctypes.c_size_t(size),
        ctypes.c_void_p(pages.ctypes.data),
    )
    return None if status else (pages & 1).astype(np.bool_)


def resident_samples(segment: OpenSegment) -> list[tuple[int, int]]:
    """Ranges (first, behind the last) of samples, by global index; none where nobody can tell.

    Folders of files are not looked at: to ask for each file costs as much as to read it.
    """
    maps = {}
    for number, entry in enumerate(segment.volumes.entries):
        if entry.kind in ("packed", "file") and entry.bytes:
            with contextlib.suppress(HeadraceError, ValueError, OSError):
                fd, close = segment.volumes.borrow(number)
                in_cache = page_map(fd, entry.bytes)
                if close:
                    os.close(fd)
                if in_cache is not None:
                    maps[number] = np.concatenate([[0], np.cumsum(in_cache)])
    out: list[tuple[int, int]] = []
    if not maps:
        return out
    near = np.zeros(segment.directory.samples, np.bool_)
    for start, stop, extents in segment.walk():
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


def can_read_direct(path: str) -> bool:
    """Whether a file can be read past the page cache."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, 4096) as buffer:
            return os.preadv(fd, [buffer], 0) >= 0
    except OSError:
        return False
    finally:
        os.close(fd)
