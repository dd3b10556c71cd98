"""Host: how busy this machine's processors are, and how much its tasks wait for I/O.

Counters of /proc, read in some ten microseconds. Where one is missing it is NaN, and so is what is made
of it; one that wrapped or began anew has not grown.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["HostCounters", "HostUse", "read_host"]

_IDLE = (3, 4)  # idle, iowait


class HostUse(NamedTuple):
    """What happened between two moments; NaN: not known."""

    cpu_share: float
    """Of the processors, in use."""
    io_pressure: float
    """Share of the time in which some task waited for I/O."""


class HostCounters(NamedTuple):
    """What the kernel counted so far; NaN: it does not say."""

    at_s: float = math.nan
    """Monotonic."""
    busy_s: float = math.nan
    """Of all processors together."""
    all_s: float = math.nan
    """The same, idle time included."""
    io_waited_s: float = math.nan

    def since(self, before: HostCounters) -> HostUse:
        """What happened since an earlier look."""
        every = self.all_s - before.all_s
        busy = self.busy_s - before.busy_s
        seconds, waited = self.at_s - before.at_s, self.io_waited_s - before.io_waited_s
        return HostUse(_share(busy, every), _share(waited, seconds))


def _share(part: float, whole: float) -> float:
    """NaN for what cannot be: a counter wrapped, or began anew."""
    if not (whole > 0.0 and 0.0 <= part < math.inf and math.isfinite(whole)):
        return math.nan
    return min(1.0, part / whole)


def read_host(now_s: float, root: Path = Path("/proc")) -> HostCounters:
    """Read the counters.

    Args:
        now_s: monotonic.
        root: where proc is mounted.
    """
    busy_s, all_s = _cpu(root)
    return HostCounters(now_s, busy_s, all_s, _io(root))


def _cpu(root: Path) -> tuple[float, float]:
    try:
        with (root / "stat").open() as f:
            words = f.readline().split()
        ticks = [int(word) for word in words[1:9]]
        every = sum(ticks) / os.sysconf("SC_CLK_TCK")
        idle = sum(ticks[at] for at in _IDLE) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.nan, math.nan
    return (every - idle, every) if words and words[0] == "cpu" else (math.nan, math.nan)


def _io(root: Path) -> float:
    try:
        with (root / "pressure/io").open() as f:
            line = f.readline()
        return int(line.rpartition("total=")[2]) * 1e-6 if line.startswith("some") else math.nan
    except (OSError, ValueError):
        return math.nan
