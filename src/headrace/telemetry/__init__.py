"""Telemetry: what each node and job does, as an agent on the node sees it, and what is kept of it.

`agent` looks and receives, `accounts` add up, `writing` keeps a history, `history` reads it: to the job
report, to `headrace starving` and `usage`, to the queue. Names are imported when they are first used.

    from headrace.telemetry import job_report

    print(job_report("history/", "4711").text())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.telemetry.history import History, JobRecord, Stall, open_history, stalls
    from headrace.telemetry.report import JobReport, job_report

__all__ = [
    "History",
    "JobRecord",
    "JobReport",
    "Stall",
    "job_report",
    "open_history",
    "stalls",
]

_HOMES = {
    "History": "history",
    "JobRecord": "history",
    "JobReport": "report",
    "Stall": "history",
    "job_report": "report",
    "open_history": "history",
    "stalls": "history",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.telemetry' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"headrace.telemetry.{_HOMES[name]}"), name)
    return value
