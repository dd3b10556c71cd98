"""Telemetry: what each node and job does, as an agent on the node sees it, and what is kept of it.

`agent` looks and receives, `accounts` add up, `writing` keeps a history, `history` reads it: to the job
report, to `headrace starving` and `usage`, to the queue.

    from headrace.telemetry import job_report

    print(job_report("history/", "4711").text())
"""

from headrace.telemetry.history import JobRecord, Stall, open_history, stalls
from headrace.telemetry.report import JobReport, job_report

__all__ = ["JobRecord", "JobReport", "Stall", "job_report", "open_history", "stalls"]
