"""Stall: how much of its time each job waits for data now, for views of the queue."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.telemetry.database import SUFFIX
from headrace.telemetry.history import open_history

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RECENT_S", "Stall", "stalls"]

RECENT_S: Final = 600.0
"""What a job did longer ago says little about now."""

FILES_MAX: Final = 256
"""A view of the queue must not wait for thousands of files to be copied: there a Prometheus answers."""


@dataclass(frozen=True, slots=True)
class Stall:
    """How a job fares."""

    share: float
    """Of their time that its steps waited, 0 to 1."""
    cause: str
    """What they waited for most; '' where they hardly waited."""
    measured: bool
    """headrace told; else it is inferred."""


def stalls(history: Path | str, seconds: float = RECENT_S) -> dict[str, Stall]:
    """How jobs fare, by both of their names ("4712" and "4711_1"); unknown ones are not there.

    Args:
        history: a folder of agents' files, or the URL of a Prometheus. Of a folder with more than
            `FILES_MAX` files nothing is told.
        seconds: so long back.

    Raises:
        TelemetryError: there is no history, or it cannot be read.
    """
    if _is_large(history):
        return {}
    opened = open_history(history)
    try:
        now_s = time.time()
        found: dict[str, Stall] = {}
        for record in opened.records(now_s - seconds, now_s + 60):
            share = record.stall
            if share is None:
                continue
            cause = next(iter(record.waited), "") if share > 0.01 else ""
            stall = Stall(share, cause, record.measured)
            found[record.job_id] = stall
            if record.alias:
                found[record.alias] = stall
        return found
    finally:
        opened.close()


def _is_large(history: Path | str) -> bool:
    try:
        with os.scandir(history) as entries:
            return sum(entry.name.endswith(SUFFIX) for entry in entries) > FILES_MAX
    except OSError:
        return False
