"""Scheduler: what a launch asks of the one that runs its job: time left, lost nodes, a new start.

Times are asked as what is *left*, by the scheduler's own clock, so that a node whose clock is wrong stops in
time all the same.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from typing import TYPE_CHECKING

from headrace.cluster.notation import expand_hosts
from headrace.cluster.slurm.commands import Commands
from headrace.errors import ClusterError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headrace.cluster.launch.plan import JobPlace


REQUEUE_EXIT = 75
"""EX_TEMPFAIL: ends a job that asks its executor to start it again."""

_SLURM = Commands(deadline_s=10.0)


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
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def can_requeue(place: JobPlace) -> bool:
    """Whether the scheduler would start the job again."""
    if place.scheduler == "slurm":
        text = _ask("scontrol", "show", "job", _slurm_id()) or ""
        # An interactive allocation has nothing that could be started again.
        return "Requeue=1" in text.split() and "BatchFlag=1" in text.split()
    return bool(place.can_requeue)


def silent_nodes(place: JobPlace, names: Sequence[str]) -> tuple[str, ...]:
    """Those nodes that the scheduler cannot reach either, by its last look."""
    if place.scheduler != "slurm":
        return ()
    text = _ask("sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T")
    states = dict(line.split() for line in (text or "").splitlines())
    return tuple(n for n in names if states.get(n, "").endswith("*") or "down" in states.get(n, ""))


def give_up_nodes(place: JobPlace, keep: Sequence[str]) -> str:
    """Takes all nodes but `keep` out of the running job; why that cannot be done, "" if it is.

    Slurm ends a job that has a node which does not answer, after SlurmdTimeout, and does not start it again
    before: a job that has given the node up goes on, or starts again at once.
    """
    if place.scheduler != "slurm":
        return ""
    with tempfile.TemporaryDirectory() as folder:  # scontrol writes scripts where it is
        return _refusal(
            "scontrol", "update", f"JobId={_slurm_id()}", f"NodeList={','.join(keep)}", cwd=folder
        )


def requeue(place: JobPlace, lost: Collection[str] = ()) -> None:
    """Has the job start again; under Slurm this ends the process soon.

    Args:
        place: of the job.
        lost: nodes on which it is not to start, as long as others are left.

    Raises:
        LaunchError: the scheduler does not.
    """
    if place.scheduler != "slurm":
        return  # our exit status says it
    job = _slurm_id()
    # Only a job that waits can be told which nodes it may not have, and by then Slurm ends what ran in it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if why := _refusal("scontrol", "requeue", job):
        raise LaunchError(
            f"Job {job} cannot be requeued: {why}",
            next_step="Submit it again: it goes on from its checkpoint.",
        )
    if excluded := _excluded(place, lost):
        _refusal("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(excluded)}")


def _excluded(place: JobPlace, lost: Collection[str]) -> list[str]:
    """The nodes that the job may not start on from now on; none if it needs them all to start at all."""
    text = _ask("scontrol", "show", "job", _slurm_id()) or ""
    facts = dict(word.split("=", 1) for word in text.split() if "=" in word)
    before = facts.get("ExcNodeList", "(null)")
    excluded = {*lost, *(expand_hosts(before) if before != "(null)" else ())}
    partition = facts.get("Partition", "")
    there = _ask("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N") or ""
    if not lost or len(set(there.split()) - excluded) < len(place.nodes):
        return []
    return sorted(excluded)


def _refusal(*command: str, cwd: str | None = None) -> str:
    """Why a command did not do what it should; "" if it did."""
    try:
        _SLURM.run(*command, directory=cwd)
    except ClusterError as e:
        return e.message
    return ""


def _ask(*command: str) -> str | None:
    """What a command answers; None where it does not."""
    try:
        return _SLURM.query(*command)
    except ClusterError:
        return None
