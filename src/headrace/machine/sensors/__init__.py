"""Sensors: each reads one thing of this node, cheaply, and says nothing where there is nothing.

A sensor gives what grew since it was last asked, and gauges as they are. It never raises for what the
machine lacks or says in a form that nobody knows: that is left out, and `why` says so once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

__all__ = ["LINES_MAX", "Reading", "Sensor", "all_sensors", "lines_of", "number"]

LINES_MAX = 4096
_BYTES_MAX = 1 << 20

Key = tuple[str, str]
"""Name of a figure, and what it is of (a device, an interface, a mount; "")."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a sensor saw."""

    grown: dict[Key, float] = field(default_factory=dict)
    """What counters grew by since the last reading."""
    gauges: dict[Key, float] = field(default_factory=dict)


class Sensor(Protocol):
    """Reads one thing."""

    name: str

    @property
    def why(self) -> str:
        """Why it sees nothing; '' if it does."""

    def read(self) -> Reading:
        """What there is now."""


def all_sensors(root: Path = Path("/")) -> list[Sensor]:
    """One of each, except the GPUs' (see `headrace.machine.sensors.gpu`).

    Args:
        root: where `proc` and `sys` are.
    """
    from headrace.machine.sensors.beegfs import BeeGFS
    from headrace.machine.sensors.cpu import CPU
    from headrace.machine.sensors.disk import Disks
    from headrace.machine.sensors.lustre import Lustre
    from headrace.machine.sensors.memory import Memory
    from headrace.machine.sensors.network import Network
    from headrace.machine.sensors.nfs import NFS
    from headrace.machine.sensors.psi import Pressure

    kinds: tuple[type[Sensor], ...] = (
        CPU, Memory, Pressure, Disks, Network, NFS, Lustre, BeeGFS,
    )  # fmt: skip
    return [kind(root) for kind in kinds]  # type: ignore[call-arg] # they all take the root


def lines_of(path: Path) -> list[str]:
    """The lines of a file of the kernel, so many at most; [] where it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_BYTES_MAX)
    except OSError:
        return []
    return text.decode(errors="replace").splitlines()[:LINES_MAX]


def number(word: str) -> float | None:
    """A counter's value; None if it is none."""
    word = word.strip()
    return float(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None
