"""CPU: how busy the node's CPUs are, from /proc/stat."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.machine.counters import Growth
from headrace.machine.sensors import Key, Reading, lines_of, number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CPU"]

_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_IDLE = ("idle", "iowait")


class CPU:
    """CPU seconds: busy, waiting for I/O, and in all."""

    name = "cpu"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/stat"
        self._growth = Growth()
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        words = next(iter(lines_of(self._path)), "").split()
        values = [number(word) for word in words[1:9]]
        if words[:1] != ["cpu"] or len(values) < 5 or None in values:
            self.why = f"{self._path} cannot be understood"
            return Reading()
        self.why = ""
        seconds = {
            name: (value or 0.0) / self._ticks_per_s
            for name, value in zip(_FIELDS, values, strict=False)
        }
        total: dict[Key, float] = {
            ("cpu_busy_s", ""): sum(s for name, s in seconds.items() if name not in _IDLE),
            ("cpu_iowait_s", ""): seconds["iowait"],
            ("cpu_s", ""): sum(seconds.values()),
        }
        return Reading(self._growth.since(total))
