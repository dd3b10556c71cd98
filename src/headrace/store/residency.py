"""How much of a file lies in the page cache, without reading what is not there.

Asks the kernel: `cachestat` (Linux 6.5), else `mincore` over a mapping. Both answer for the moment only,
and may refuse where the file is not ours; then the answer is None.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["page_map", "resident_bytes", "resident_pages", "resident_range"]

_SYS_CACHESTAT = 451
"""The same number on every architecture."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def resident_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes of the file that lie in the page cache, in whole pages; None where nobody can tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return 0
        pages = resident_pages(fd, size)
        return None if pages is None else min(size, pages * mmap.PAGESIZE)
    finally:
        os.close(fd)


def resident_pages(fd: int, size: int) -> int | None:
    """Pages of an open file of `size` bytes, not 0, that lie in the page cache; None: nobody can tell."""
    pages = _by_cachestat(fd)
    return _by_mincore(fd, size) if pages is None else pages


def resident_range(fd: int, offset: int, length: int) -> int | None:
    """Bytes of a range of an open file that lie in the page cache; None: nobody can tell.

    Pages that the range only touches count as far as they belong to it.
    """
    if length <= 0:
        return 0
    pages = _by_cachestat(fd, offset, length)
    if pages is None:
        first = offset // mmap.PAGESIZE
        found = page_map(fd, os.fstat(fd).st_size)
        if found is None:
            return None
        pages = int(found[first : -(-(offset + length) // mmap.PAGESIZE)].sum())
    return min(length, pages * mmap.PAGESIZE)


def _by_cachestat(fd: int, offset: int = 0, length: int = 0) -> int | None:
    asked, found = _Range(offset, length), _CacheStat()
    status = _libc.syscall(
        _SYS_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), ctypes.c_uint(0)
    )
    return None if status else int(found.cached)


def _by_mincore(fd: int, size: int) -> int | None:
    pages = page_map(fd, size)
    return None if pages is None else int(pages.sum())


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
