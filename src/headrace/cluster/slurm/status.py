"""Status: what slurmctld knows of a job. It forgets a job some minutes after its end."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.executor import JobState, JobStatus
from headrace.cluster.hostlist import expand_hosts, expand_indices
from headrace.cluster.output_pattern import fill_pattern, pattern_facts
from headrace.cluster.slurm.records import blocks, task_id, value
from headrace.cluster.slurm.values import job_state, unix_seconds
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from headrace.cluster.slurm.commands import Commands

__all__ = [
    "ask_controller",
    "ask_for_all",
    "is_unknown_job",
    "known_exit_code",
    "read_statuses",
    "split_id",
]

TASKS_MAX = 10_000
"""So many tasks of an array that wait have an entry each; those of a larger one are one entry together."""

_ID = re.compile(r"(\d+)(?:_(\d+)|_\[([\d,:%-]+)\])?\Z")
_WORD = re.compile(r"(\w+)=(\S*)")
_NO_TASK = "4294967294"
"""What scontrol fills in as the number of a task that has none yet."""


def split_id(job_id: str) -> tuple[str, str | None]:
    """Of "17_3" the job's number, "17", and the task's, "3".

    Raises:
        ValueError: it is no id of a job.
    """
    if (found := _ID.match(job_id)) is None:
        raise ValueError(
            f"{job_id!r} is no job id, expected a number, or number_task for a task of an array"
        )
    return found[1], found[2] or found[3]


def is_unknown_job(error: ClusterError) -> bool:
    """Whether a refusal says that there is no such job."""
    return "Invalid job id" in error.message or "No jobs in the system" in error.message


def ask_controller(commands: Commands, number: str) -> list[JobStatus]:
    """What slurmctld knows of a job and all its tasks; nothing if it does not know it.

    Raises:
        ClusterError: it cannot be asked.
    """
    try:
        return list(read_statuses(commands.query("scontrol", "--details", "show", "job", number)))
    except ClusterError as e:
        if is_unknown_job(e):
            return []
        raise


def ask_for_all(commands: Commands, numbers: Collection[str]) -> dict[str, list[JobStatus]]:
    """What slurmctld knows of many jobs, by one request.

    Raises:
        ClusterError: it cannot be asked.
    """
    found: dict[str, list[JobStatus]] = {number: [] for number in numbers}
    for status in read_statuses(commands.query("scontrol", "--details", "show", "job")):
        found.get(status.job_id.partition("_")[0], []).append(status)
    return found


def read_statuses(text: str) -> Iterator[JobStatus]:
    """Of what `scontrol show job` prints, one for each task.

    Raises:
        ClusterError: it prints something else.
    """
    found = blocks(text, "JobId")
    if not found and text.strip() and "No jobs" not in text:
        raise ClusterError(f"scontrol says of a job what cannot be read: {text.strip()[:160]!r}.")
    for block in found:
        yield from _statuses(block)


def _statuses(block: str) -> Iterator[JobStatus]:
    first, _, rest = block.partition("\n")
    ids, _, name = first.partition(" JobName=")
    said = dict(_WORD.findall(ids)) | dict(_WORD.findall(rest))
    try:
        exit_code, signal = (int(part) for part in said.get("ExitCode", "0:0").split(":"))
        state = job_state(said["JobState"])
        reason = said.get("Reason", "").replace("_", " ")
        status = JobStatus(
            job_id=said["JobId"],
            name=name,
            state=state,
            reason="" if reason == "None" else reason,
            nodes=expand_hosts(value(block, "NodeList")),
            exit_code=known_exit_code(state, exit_code, signal),
            signal=signal or None,
            restarts=int(said.get("Restarts", 0)),
            submitted_s=unix_seconds(said.get("SubmitTime", "")),
            started_s=unix_seconds(said.get("StartTime", "")),
            ended_s=unix_seconds(said.get("EndTime", "")) if state.is_over else None,
        )
    except (KeyError, ValueError) as e:
        raise ClusterError(
            f"scontrol says of a job what cannot be read ({e!r}): {block[:160]!r}."
        ) from e
    pattern = value(block, "StdOut")
    user = value(block, "UserId").partition("(")[0]
    array_id, tasks = said.get("ArrayJobId"), said.get("ArrayTaskId")
    if not array_id or tasks is None:
        yield dataclasses.replace(status, output=_output(pattern, status, user))
        return
    numbers = _tasks(tasks)
    if numbers is None:
        yield dataclasses.replace(status, job_id=task_id(status.job_id, array_id, tasks))
        return
    for task in numbers:
        yield dataclasses.replace(
            status,
            job_id=f"{array_id}_{task}",
            output=_output(pattern, status, user, array_id, task),
        )


def known_exit_code(state: JobState, exit_code: int, signal: int) -> int | None:
    """None where Slurm says 0 of a script that did not end by itself."""
    told = state.is_over and not signal and (exit_code or state is JobState.COMPLETED)
    return exit_code if told else None


def _tasks(text: str) -> list[int] | None:
    try:
        found = expand_indices(text.partition("%")[0])
    except ValueError:  # "1,3,5,...": cut short, or too many
        return None
    return list(found) if len(found) <= TASKS_MAX else None


def _output(
    pattern: str, status: JobStatus, user: str, array_id: str | None = None, task: int | None = None
) -> Path | None:
    """Most versions fill in the pattern, some leave parts of it."""
    if not pattern or pattern == "(null)":
        return None
    if task is not None:
        pattern = pattern.replace(_NO_TASK, str(task))
    node = status.nodes[0] if status.nodes else ""
    facts = pattern_facts(status.job_id, status.name, user, array_id=array_id, task=task, node=node)
    return Path(fill_pattern(pattern, facts) if "%" in pattern else pattern)
