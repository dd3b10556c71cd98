"""Trace: what a run did, step by step, in a folder: written beside training, read by reports and proofs.

* format: what the files say, byte by byte; one rank's file, append-only, of bounded size
* writer: the thread that writes, and what it is told to follow
* run: `read_run`: a folder read back, whatever became of it
* recorded: what a recorded job read, request by request, beside a workload
"""

from __future__ import annotations

from headrace.trace.run import RankTrace, Run, read_run
from headrace.trace.writer import flush, follow

__all__ = ["RankTrace", "Run", "flush", "follow", "read_run"]
