"""How much memory is free for the page cache, as far as this process may use it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["fits_in_free_memory"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def fits_in_free_memory(nbytes: float) -> bool:
    """Whether `nbytes` are at most half of what is free; False where that is not told."""
    free = _free_bytes()
    return free is not None and nbytes <= free / 2


def _free_bytes() -> int | None:
    try:
        for line in _MEMINFO.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
                limit = _number(_CGROUP / "memory.max")
                used = _number(_CGROUP / "memory.current")
                return free if limit is None else min(free, limit - (used or 0))
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return None
