"""Memory: what the node has, and what is free, from /proc/meminfo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.machine.kernel_files import byte_fields
from headrace.machine.sensors import Reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Memory"]

_NAMES = {"MemTotal": "memory_bytes", "MemAvailable": "memory_available_bytes"}


class Memory:
    """Bytes of memory; what the kernel would give back counts as available."""

    name = "memory"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/meminfo"
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        there = byte_fields(self._path)
        gauges = {(_NAMES[name], ""): float(there[name]) for name in _NAMES if name in there}
        self.why = "" if gauges else f"{self._path} cannot be understood"
        return Reading(gauges=gauges)
