"""LaunchReport: how a launch ended: for the job's log, for scripts, and for the run's manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["LaunchReport", "Outcome"]

Outcome = Literal["completed", "stopped", "requeued", "continued", "failed", "cancelled"]


@dataclass(slots=True, kw_only=True)
class LaunchReport:
    """What became of one launch.

    Attributes:
        job: its id; "" without a scheduler.
        restarts: how often it had been requeued before.
        nodes: names.
        lost: those of them that were lost.
        ranks: in all.
        outcome: `completed`; `stopped` (to be resumed: the ranks saved and left, or a node was lost);
            `requeued` (likewise, and the scheduler starts the job again); `continued` (a node was lost, and
            the launch begins again on the others); `failed`; `cancelled`.
        why: more about an end that is not `completed`.
        next_step: what the user can do about it.
        exit_code: of `headrace launch`.
        wall_s: from start to end.
        staged_samples, staged_bytes: on all nodes' local disks.
        source_bytes: read from the source to stage them.
        stage_s: from the start until what is staged could be read; copying goes on beside the ranks.
        epoch, position, order_hash, seed, steps: where the ranks' loaders stood last, if they said.
        ended: processes that had to be ended; 0 after a good run.
        stuck: processes that could not be ended.
        remarks: what one may want to know.
    """

    job: str = ""
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    ranks: int = 0
    outcome: Outcome = "failed"
    why: str = ""
    next_step: str | None = None
    exit_code: int = 3
    wall_s: float = 0.0
    staged_samples: int = 0
    staged_bytes: int = 0
    source_bytes: int = 0
    stage_s: float | None = None
    epoch: int | None = None
    position: int | None = None
    order_hash: str | None = None
    seed: int | None = None
    steps: int | None = None
    ended: int = 0
    stuck: int = 0
    remarks: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def line(self) -> str:
        """In one line."""
        who = f"job {self.job}" if self.job else "this machine"
        if self.restarts:
            who += f", restart {self.restarts}"
        nodes = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        text = f"{who}: {self.outcome}, {nodes}, {self.ranks} ranks, {self.wall_s:.1f} s"
        if self.staged_samples:
            text += f"; {self.staged_samples:,} samples staged"
            text += f", {self.source_bytes:,} bytes read from the source"
        if self.stage_s is not None:
            text += f", readable after {self.stage_s:.1f} s"
        if self.position is not None:
            text += f"; epoch {self.epoch}, position {self.position:,}, order {self.order_hash}"
        if self.stuck:
            text += f"; {self.stuck} processes cannot be ended"
        if self.why:
            text += f": {self.why}"
        return text
