"""Stalls: the cause of every second that training waited for data.

`verdict_of` is pure: steps and evidence in, causes out. `live` takes both from a loader of this process.
"""

from __future__ import annotations

from headrace.control.stalls.verdict import Verdict, verdict_line, verdict_of
from headrace.control.stalls.waits import Evidence

__all__ = ["Evidence", "Verdict", "verdict_line", "verdict_of"]
