"""How much memory is free for the page cache, as far as this process may use it."""

from __future__ import annotations

import os

__all__ = ["fits_in_free_memory"]

_MEMINFO = "/proc/meminfo"
_CGROUP = "/sys/fs/cgroup"


def fits_in_free_memory(nbytes: float) -> bool:
    """Whether `nbytes` are at most half of what is free; False where that is not told."""
    free = _free_bytes()
    return free is not None and nbytes <= free / 2


def _free_bytes() -> int | None:
    try:
        for line in _read(_MEMINFO).splitlines():
            if line.startswith(b"MemAvailable:"):
                free = int(line.split()[1]) << 10
                limit = _number(f"{_CGROUP}/memory.max")
                used = _number(f"{_CGROUP}/memory.current")
                return free if limit is None else min(free, limit - (used or 0))
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: str) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return None


def _read(path: str) -> bytes:
    # Not `open`: a sample that is being watched would seem to have opened this file.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)
