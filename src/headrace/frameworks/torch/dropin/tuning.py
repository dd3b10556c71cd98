"""Tuning: introduces a process's reading ahead to the controller of that process.

Each worker turns how many reads it has in flight by what its own opens wait for. That works beside other
workers because more reads are only kept where they helped, and buffers stay the size that the loader's
budget gave each worker.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.control import tune
from headrace.control.limits import Bounds, Limits, read_limits

if TYPE_CHECKING:
    from headrace.control import TuningHandle
    from headrace.plane.read_ahead import ReadAhead

__all__ = ["READS_MAX", "READS_MIN", "tuned"]

READS_MIN = 16
"""Fewer save nothing that can be measured, and finding that out costs reads."""

READS_MAX = 128
"""Of one process: each read has a thread. Eight workers reach the 1,024 of a plane."""


def tuned(ahead: ReadAhead) -> TuningHandle:
    """Return the handle to keep beside the read-ahead; `wake` it while files are read.

    Args:
        ahead: of this process.
    """
    return tune(
        f"files read ahead in process {os.getpid()}",
        [ahead],
        ahead.consumer,
        _limits,
        frozen=("buffer_bytes",),
        enabled=os.environ.get("HEADRACE_TUNE", "1") != "0",
    )


def _limits(held_bytes: int) -> Limits:
    limits = read_limits(held_bytes=held_bytes)
    high = min(limits.reads_in_flight.high, READS_MAX)
    return replace(limits, reads_in_flight=Bounds(min(READS_MIN, high), high))
