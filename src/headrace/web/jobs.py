"""Jobs: one job over time, as its page draws it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.telemetry.report import JobReport
from headrace.web.picture import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.telemetry.history import JobRecord

__all__ = ["JobPage", "mean"]

RANKS_MAX = 4096
NODES_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """What is known of a job.

    Attributes:
        record: its figures in all.
        times: Unix seconds of the moments below.
        use: GPUs' share of time at work; None where nobody looked.
        stall: steps' share of time that was waited; None where nothing is known.
        tiers: bytes per second, by where they came from.
        events: what its tuner did: `at_s`, `knob`, `before`, `after`, `why`, `kept`.
        ranks: number, place and stall now of each.
        running: it has not ended.
        now: its stall now; None: not known.
    """

    record: JobRecord
    times: Sequence[float]
    use: Sequence[float | None] = ()
    stall: Sequence[float | None] = ()
    tiers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    ranks: Sequence[tuple[int, str, float]] = ()
    running: bool = True
    partition: str = ""
    gpus: int = 0
    now: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain values, every name as it may be shown."""
        report = JobReport(self.record).as_dict()
        report["nodes"] = [plain(node) for node in report["nodes"][:NODES_MAX]]
        report["node_count"] = len(self.record.nodes)
        for key in ("job_id", "alias", "name", "user", "account", "hint"):
            report[key] = plain(report[key]) if key != "hint" else report[key]
        for key in (
            "stall_s",
            "gpu_hours_lost_by_cause",
            "gpu_hours_lost_by_file_system",
            "bytes_by_tier",
        ):
            report[key] = {plain(name): value for name, value in report[key].items()}
        return {
            "facts": {**report, "partition": plain(self.partition), "gpus": self.gpus},
            "running": self.running,
            "now": self.now,
            "times": [round(t, 3) for t in self.times],
            "use": [_share(value) for value in self.use],
            "stall": [_share(value) for value in self.stall],
            "tiers": {plain(k): [float(f"{v:.4g}") for v in row] for k, row in self.tiers.items()},
            "events": [
                {k: plain(v) if isinstance(v, str) else v for k, v in event.items()}
                for event in self.events
            ],
            "ranks": [[rank, plain(place), _share(s)] for rank, place, s in self.ranks[:RANKS_MAX]],
        }


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
