"""Steps as a loader would have logged them, with known waits: for tests of what is made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.plane.batch_trace import PHASES, STEP
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass
class Run:
    """A rank's steps, one after the other; each `add` is one delivery."""

    worked_s: float = 0.01
    now_s: float = 1000.0
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(
        self,
        phases: Mapping[str, float],
        *,
        nbytes: Mapping[str, int] | None = None,
        worked_s: float | None = None,
        **more: Any,
    ) -> None:
        """One step that waited in these phases, and worked afterwards."""
        waited = tuple(float(phases.get(name, 0.0)) for name in PHASES)
        asked_s = self.now_s
        delivered_s = asked_s + sum(waited)
        self.now_s = delivered_s + (self.worked_s if worked_s is None else worked_s)
        given = {"source": 1_000_000} if nbytes is None else nbytes
        row = {
            "epoch": 0, "step": len(self.rows), "position": 8 * len(self.rows), "samples": 8,
            "order_hash": 1, "left_out": 0, "left_out_hash": 0, "asked_s": asked_s, "delivered_s": delivered_s,
            "waited_s": waited,
            "bytes": tuple(given.get(name, 0) for name in TIERS), "room_s": 0.0, "held_s": 0.0,
            "reads": 8, "read_s": 8 * 0.005, "depth": 0, "quiet_reads": 0, "quiet_s": 0.0, "work_s": 0.0,
            "cpu_s": 0.0, "serial": False, "looks": 0, "contended": 0, "others_s": 0.0, **more,
        }  # fmt: skip
        self.rows.append(tuple(row[name] for name in STEP.names))

    def steps(self) -> NDArray[np.void]:
        """All of them, dtype `STEP`."""
        return np.array(self.rows, STEP)
