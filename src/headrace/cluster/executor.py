"""Executor: where jobs run. Slurm's, or this machine's processes; the same calls either way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Executor", "JobState", "JobStatus", "Submission"]


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
