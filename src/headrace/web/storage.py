"""Storage: what weighs on a file system over time, and the jobs behind it, as the page draws it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.web.picture import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TOP", "Flow", "file_system"]

TOP: Final = 7
"""Jobs that have a band of their own; as many as there are colours to tell apart."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A job on a file system: what it took at each moment."""

    job_id: str
    name: str
    user: str
    values: Sequence[float]


def file_system(
    name: str,
    times: Sequence[float],
    flows: Sequence[Flow],
    *,
    unit: str = "B/s",
    capacity: float | None = None,
    latency_s: Sequence[float] = (),
    waiting_gpus: Sequence[float] = (),
) -> dict[str, Any]:
    """A file system as plain values: the largest jobs one by one, the rest together.

    Args:
        name: of the file system.
        times: Unix seconds of the moments.
        flows: of all jobs.
        unit: of the flows.
        capacity: what it can give; None: not known.
        latency_s: of reads at each moment; empty: not known.
        waiting_gpus: GPUs' worth of waiting for it at each moment; empty: not known.
    """
    ranked = sorted(flows, key=lambda flow: (-sum(flow.values), flow.job_id))
    rest = [sum(column) for column in zip(*(f.values for f in ranked[TOP:]), strict=True)]
    total = [sum(column) for column in zip(*(f.values for f in ranked), strict=True)]
    most = sum(total)
    return {
        "name": plain(name),
        "unit": unit,
        "times": [round(t, 1) for t in times],
        "capacity": capacity,
        "now": total[-1] if total else 0.0,
        "jobs": len(ranked),
        "top": [
            {
                "job_id": plain(flow.job_id),
                "name": plain(flow.name),
                "user": plain(flow.user),
                "share": sum(flow.values) / most if most else 0.0,
                "values": _short(flow.values),
            }
            for flow in ranked[:TOP]
        ],
        "rest": _short(rest),
        "latency_s": [round(value, 6) for value in latency_s],
        "waiting_gpus": [round(value, 2) for value in waiting_gpus],
    }


def _short(values: Sequence[float]) -> list[float]:
    """Four digits are enough for a picture."""
    return [float(f"{value:.4g}") for value in values]
