"""Others: how many CPUs other programs want while the doctor looks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.machine.host import read_text

if TYPE_CHECKING:
    from headrace.insight.doctor.findings import Findings

__all__ = ["Busy", "wanted_by_others"]

_ALONE: Final = 0.95
_STAT: Final = Path("/proc/stat")


def wanted_by_others(found: Findings) -> float:
    """CPUs that others want, by what a busy thread of ours did not get: more than they can have."""
    if found.decode is None or found.environment is None or found.decode.got >= _ALONE:
        return 0.0
    return max(0.0, found.environment.cpus / found.decode.got - 1.0)


class Busy:
    """What other processes take of the CPUs meanwhile."""

    def __init__(self) -> None:
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        own = os.times()
        words = read_text(_STAT).split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9] if word.isdigit()]
        busy = 0.0
        if len(ticks) == 8:
            busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, own.user + own.system

    def others(self) -> float:
        """CPUs that others used since."""
        then, now = self._begun, self._now()
        seconds = now[0] - then[0]
        if seconds <= 0 or not now[1]:
            return 0.0
        return max(0.0, (now[1] - then[1] - (now[2] - then[2])) / seconds)
