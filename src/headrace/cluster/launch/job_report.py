"""The job's report at the end of its log, where the telemetry agent ran beside it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["has_agent", "report_text"]


def has_agent() -> bool:
    """Whether this installation has the telemetry agent."""
    try:
        return find_spec("headrace.telemetry.report") is not None
    except ModuleNotFoundError:
        return False


def report_text(job: str, environment: Mapping[str, str], since_s: float = 0.0) -> str:
    """What the agents have kept of a job, for people; "" where that is nothing.

    Args:
        job: as the processes of the job were told (HEADRACE_JOB_ID).
        environment: says where the history is.
        since_s: Unix seconds; what was seen earlier is another job's of the same number.
    """
    if not has_agent():
        return ""
    history = import_module("headrace.telemetry.place").default_history(environment)
    try:
        return str(import_module("headrace.telemetry").job_report(history, job, since_s).text())
    except HeadraceError:  # a job of a second or two: nobody has looked yet
        return ""
