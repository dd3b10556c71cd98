"""Memory: what the node has, and what is free, from /proc/meminfo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.telemetry.sensors import Key, Reading, lines_of, number

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
        gauges: dict[Key, float] = {}
        for line in lines_of(self._path):
            name, _, rest = line.partition(":")
            if name in _NAMES:
                value = number(rest.strip().removesuffix("kB"))
                if value is not None:
                    gauges[_NAMES[name], ""] = 1024 * value
        self.why = "" if gauges else f"{self._path} cannot be understood"
        return Reading(gauges=gauges)
