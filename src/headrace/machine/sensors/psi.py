"""Pressure: how long tasks waited for CPU, memory and I/O, from /proc/pressure (PSI).

`some`: at least one task waited. `full`: nobody did anything else. Kernels since 4.20 have it, unless
they were started without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.machine.counters import Growth
from headrace.machine.sensors import Key, Reading, lines_of, number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Pressure", "pressure_of"]

_KINDS: Final = ("cpu", "memory", "io")


class Pressure:
    """Seconds waited, of the node."""

    name = "psi"

    def __init__(self, root: Path) -> None:
        self._folder = root / "proc/pressure"
        self._growth = Growth()
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        found: dict[Key, float] = {}
        for kind in _KINDS:
            for share, seconds in pressure_of(self._folder / kind).items():
                found[f"{kind}_pressure_s", share] = seconds
        self.why = "" if found else f"{self._folder} is not there: this kernel tells no pressure"
        return Reading(self._growth.since(found))


def pressure_of(path: Path) -> dict[str, float]:
    """`some` and `full` seconds of a pressure file, of the node or of a control group; {} without one."""
    found = {}
    for line in lines_of(path):
        words = line.split()
        total = next((word for word in words[1:] if word.startswith("total=")), "")
        value = number(total.removeprefix("total="))
        if words[:1] in (["some"], ["full"]) and value is not None:
            found[words[0]] = value / 1e6
    return found
