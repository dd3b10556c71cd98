"""Executor: where jobs run. Slurm's, or this machine's processes; the same calls either way."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.errors import ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "EXECUTOR_VARIABLE",
    "Executor",
    "JobState",
    "JobStatus",
    "Submission",
    "executor",
    "executor_name",
    "fill_pattern",
    "follow_file",
    "pattern_facts",
    "read_file",
]


class JobState(StrEnum):
    """Slurm's words for what became of a job; other executors use the same."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    REQUEUED = "REQUEUED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    UNKNOWN = "UNKNOWN"
    """The executor does not know the job, or not any more."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will come after it."""
        return self in _OVER


_OVER = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
    }
)


@dataclass(frozen=True, slots=True)
class Submission:
    """What is submitted.

    Attributes:
        script: the whole text, as `sbatch` would read it, directives included; it begins with `#!`.
        options: of `sbatch`, long and with their values joined ("--nodes=2"); they win over directives.
        arguments: of the script.
        directory: the job's working directory.
        environment: to be set on top of the caller's.
    """

    script: bytes
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    directory: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What is known of a job, or of one task of an array.

    Attributes:
        job_id: as the executor prints it ("17", "17_3" for a task of an array).
        name: of the job.
        state: its last known state.
        reason: why it waits or ended, in the executor's words; "" if none is known.
        nodes: that it has or had.
        exit_code: of the script; None until it is known, and where a signal ended it.
        signal: that ended the script.
        restarts: how often it was requeued.
        submitted_s, started_s, ended_s: Unix seconds; a start in the future is an expected one.
        output: where its standard output goes, with all patterns filled in; None if unknown.
    """

    job_id: str
    name: str
    state: JobState
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0
    submitted_s: float | None = None
    started_s: float | None = None
    ended_s: float | None = None
    output: Path | None = None


class Executor(Protocol):
    """Submits jobs and looks after them.

    Every call ends within a stated time and raises `ClusterError` with what the executor said.
    """

    name: str

    def submit(self, submission: Submission) -> str:
        """Queue a job (or array, or one that depends on others: by its options); its id."""
        ...

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for; an array has an entry for each task. A job that is not known has none."""
        ...

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs, or only send their scripts a signal. Jobs that are over already are no error."""
        ...

    def requeue(self, job_ids: Sequence[str]) -> None:
        """Have jobs start again under their numbers: those that run are ended first."""
        ...

    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[bytes]:
        """What the job printed, piece by piece; with `follow` until it is over."""
        ...

    def wait(
        self, job_ids: Sequence[str], timeout_s: float | None = None
    ) -> dict[str, list[JobStatus]]:
        """Return when all are over.

        Raises:
            ClusterTimeout: some are not, after so long.
        """
        ...


# -- what a job prints ---------------------------------------------------------------------------------

_PIECE_BYTES = 1 << 16
_POLL_S = 0.1


def read_file(path: Path) -> Iterator[bytes]:
    """What a file holds now, piece by piece.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as f:
        while piece := f.read(_PIECE_BYTES):
            yield piece


def follow_file(path: Path, is_over: Callable[[], bool]) -> Iterator[bytes]:
    """What a file holds and comes to hold, until it is over and all is read.

    The file may come late. If it is shorter than what was read (a job that was requeued writes anew), it is
    read from its beginning.

    Args:
        path: the file.
        is_over: whether nothing will be written any more; asked after each look that found nothing new.
    """
    position = 0
    while True:
        over = is_over()  # before the look: what came before the end is seen
        try:
            with path.open("rb") as f:
                if f.seek(0, 2) < position:
                    position = 0
                f.seek(position)
                while piece := f.read(_PIECE_BYTES):
                    position += len(piece)
                    yield piece
        except FileNotFoundError:
            pass
        if over:
            return
        time.sleep(_POLL_S)


# -- the name of its output file -----------------------------------------------------------------------

_PLACE = re.compile(r"%(\d*)([%AaJjNnstux])")
_WIDTH_MAX = 10


def pattern_facts(
    job_id: str,
    name: str,
    user: str,
    *,
    array_id: str | None = None,
    task: int | None = None,
    node: str = "",
) -> dict[str, str]:
    """What the letters stand for, in a batch script: step, task and node are the first."""
    facts = {
        "A": array_id or job_id,
        "j": job_id,
        "J": job_id,
        "N": node,
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": user,
        "x": name,
        "%": "%",
    }
    if task is not None:
        facts["a"] = str(task)
    return facts


def fill_pattern(pattern: str, facts: Mapping[str, str]) -> str:
    """Fill in; a letter with no fact stays, numbers are padded to a width, a backslash turns all of it off."""
    if "\\" in pattern:
        return pattern.replace("\\", "")

    def fill(place: re.Match[str]) -> str:
        width, letter = place.groups()
        if letter not in facts:
            return place[0]
        found = facts[letter]
        return found.zfill(min(int(width), _WIDTH_MAX)) if width and found.isdigit() else found

    return _PLACE.sub(fill, pattern)


# -- which one runs jobs here --------------------------------------------------------------------------

EXECUTOR_VARIABLE = "HEADRACE_EXECUTOR"


def executor_name(name: str | None = None) -> Literal["slurm", "local"]:
    """Which one `executor` gives.

    Raises:
        ClusterRequestError: there is none of this name.
    """
    named = name or os.environ.get(EXECUTOR_VARIABLE)
    if not named:
        return "slurm" if shutil.which("sbatch") else "local"
    if named == "slurm":
        return "slurm"
    if named == "local":
        return "local"
    raise ClusterRequestError(f"there is no executor {named!r}, expected slurm or local.")


def executor(name: str | None = None) -> Executor:
    """The executor of this name.

    Args:
        name: `slurm` or `local`; by default HEADRACE_EXECUTOR, else Slurm's where sbatch is, else this
            machine's.

    Raises:
        ClusterRequestError: there is none of this name.
    """
    if executor_name(name) == "slurm":
        from headrace.cluster.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    from headrace.cluster.local.executor import LocalExecutor

    return LocalExecutor()
