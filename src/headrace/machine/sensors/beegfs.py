"""BeeGFS: that it is mounted here. Its client keeps no counters that can be read.

Clients' figures are kept by BeeGFS's servers, and asking those from every node all the time would be a
load of its own. What jobs read is told by their own processes' counters, and by headrace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.job import clean
from headrace.machine.sensors import Key, Reading

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BeeGFS"]

MOUNTS_MAX: Final = 32


class BeeGFS:
    """The clients of this node: one for each mount."""

    name = "beegfs"

    def __init__(self, root: Path) -> None:
        self._folder = root / "proc/fs/beegfs"
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        try:
            clients = sorted(path.name for path in self._folder.iterdir())[:MOUNTS_MAX]
        except OSError:
            clients = []
        self.why = (
            "BeeGFS's client keeps no counters: its servers do"
            if clients
            else "no BeeGFS is mounted here"
        )
        gauges: dict[Key, float] = {("fs_mounted", clean(name)): 1.0 for name in clients}
        return Reading(gauges=gauges)
