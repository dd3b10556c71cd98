"""How much memory this process may still take: the machine's, and its control groups', the smallest."""

from __future__ import annotations

from pathlib import Path

from headrace.machine.cgroup import memory_usages
from headrace.machine.kernel_files import byte_fields

__all__ = ["available_memory", "fits_in_free_memory"]

_UNKNOWN = 1 << 60


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed; page cache counts as free.

    Args:
        root: where `proc` and `sys` are.
    """
    groups = [usage.limit - usage.used for usage in memory_usages(root)]
    machine = byte_fields(root / "proc/meminfo").get("MemAvailable", _UNKNOWN)
    return max(0, min(machine, *groups, _UNKNOWN))


def fits_in_free_memory(nbytes: float, root: Path = Path("/")) -> bool:
    """Whether `nbytes` are at most half of what is free; False where that is not told."""
    available = available_memory(root)
    return available < _UNKNOWN and nbytes <= available / 2
