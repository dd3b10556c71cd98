"""Scheduler: the three things a launch asks of the one that runs its job: time left, requeue allowed, requeue.

Times are asked as what is *left*, by the scheduler's own clock, so that a node whose clock is wrong stops in
time all the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import TYPE_CHECKING

from headrace.errors import LaunchError

if TYPE_CHECKING:
    from headrace.cluster.place import JobPlace

__all__ = ["REQUEUE_EXIT", "can_requeue", "duration_s", "requeue", "time_left_s"]

REQUEUE_EXIT = 75
"""EX_TEMPFAIL: ends a job that asks its executor to start it again."""

_ASK_S = 10.0


def _slurm_id() -> str:
    # Of an array's task the number that Slurm gave it, which every command takes.
    return os.environ.get("SLURM_JOB_ID", "")


def time_left_s(place: JobPlace) -> float | None:
    """Seconds until the job is ended; None if it is not, or nobody says."""
    if place.scheduler == "slurm":
        text = _ask("squeue", "--noheader", f"--jobs={_slurm_id()}", "--format=%L")
        return None if text is None else duration_s(text.strip())
    return None if place.end_s is None else place.end_s - time.time()


def duration_s(text: str) -> float | None:
    """Slurm's [DAYS-][[HOURS:]MINUTES:]SECONDS; None for "UNLIMITED", "INVALID" and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def can_requeue(place: JobPlace) -> bool:
    """Whether the scheduler would start the job again."""
    if place.scheduler == "slurm":
        text = _ask("scontrol", "show", "job", _slurm_id()) or ""
        # An interactive allocation has nothing that could be started again.
        return "Requeue=1" in text.split() and "BatchFlag=1" in text.split()
    return bool(place.can_requeue)


def requeue(place: JobPlace) -> None:
    """Has the job start again; under Slurm this ends the process soon.

    Raises:
        LaunchError: the scheduler does not.
    """
    if place.scheduler != "slurm":
        return  # our exit status says it
    try:
        ended = _run("scontrol", "requeue", _slurm_id())
        why = ended.stderr.strip() if ended.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as e:
        why = str(e)
    if why:
        raise LaunchError(
            f"Job {_slurm_id()} cannot be requeued: {why}",
            next_step="Submit it again: it goes on from its checkpoint.",
        )


def _ask(*command: str) -> str | None:
    try:
        ended = _run(*command)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - Slurm's own, as PATH has it
        command, check=False, capture_output=True, text=True, timeout=_ASK_S
    )
