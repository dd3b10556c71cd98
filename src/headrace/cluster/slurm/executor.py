"""SlurmExecutor: jobs through sbatch, squeue, scontrol and scancel; nothing of it runs between the calls.

slurmctld forgets a job some minutes after its end: what it forgot is in the books, or was seen before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.documents import DocumentKind
from headrace.base.files import replace_file, state_folder
from headrace.base.peers import user_name
from headrace.cluster.executor import (
    Executor,
    JobState,
    JobStatus,
    SchedulerUnavailable,
    Submission,
    split_id,
)
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.scontrol import read_config, read_snapshot, read_statuses
from headrace.errors import ClusterError, ClusterTimeout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from headrace.cluster.snapshot import ClusterSnapshot


_KEPT_MAX = 1000
"""So many submissions are written down; the oldest give way."""

_RECORD = DocumentKind(
    name="the record of a job that was submitted",
    version=1,
    error=ClusterError,
    next_step="Submit the job's script again: headrace cluster batch SCRIPT.",
)

_SINGLY_MAX = 32
"""So many jobs are asked for one by one, 5 ms each; for more, all of the cluster's are read."""


class SlurmExecutor(Executor):
    """Slurm."""

    name = "slurm"
    poll_s = (0.1, 5.0, 1.3)
    outage_s = 600.0  # a restart of slurmctld, or a failover to its backup
    gone = "Slurm does not know it any more: it ended longer than MinJobAge ago, and there is no accounting"
    not_known = (
        "Slurm does not know job {}, or not any more.",
        "Its output is where --output said, by default slurm-JOBID.out in the folder where it was submitted.",
    )
    output_not_known = "Slurm does not say where the output of job {} goes."
    output_hint = "It was written by the job's first node: look there, or on a shared file system."

    def __init__(self, commands: Commands | None = None) -> None:
        self.commands = commands or Commands()
        self.seen: dict[str, JobStatus] = {}
        # Slurm forgets at once the tasks of an array that are cancelled while they wait.
        self._cancelled: set[str] = set()

    def submit(self, submission: Submission) -> str:
        """Queue a job; the script reaches sbatch byte for byte."""
        # With arguments the script is named, and "-" names its standard input... only from some version on: a
        # script that comes on standard input takes its arguments behind "/dev/stdin".
        arguments = ("/dev/stdin", *submission.arguments) if submission.arguments else ()
        directory = None if submission.directory is None else str(submission.directory)
        try:
            output, message = self.commands.run(
                "sbatch", "--parsable", *submission.options, *arguments,
                stdin=submission.script, environment={**os.environ, **submission.environment},
                directory=directory,
            )  # fmt: skip
        except ClusterTimeout as e:
            raise ClusterTimeout(
                f"{e.message} Whether the job was submitted is not known.",
                next_step="Look with squeue before you submit it again.",
            ) from e
        if message:  # of a job that it took: a site's filter may have a word
            logging.getLogger("headrace").warning("%s", message)
        job_id = output.decode(errors="replace").strip().rpartition("\n")[2].partition(";")[0]
        if not job_id.isdigit():
            raise ClusterError(f"sbatch says {output[:160]!r}, expected the number of a job.")
        if submission.cluster:
            self._keep(submission, job_id)
        return job_id

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for."""
        asked = {job_id: split_id(job_id) for job_id in job_ids}
        numbers = {number for number, _ in asked.values()}
        known = self._known(numbers)
        self.seen |= {status.job_id: status for each in known.values() for status in each}
        lost = sorted(number for number in known if self._misses_some(number, known[number]))
        for number, statuses in (self._remembered(lost) if lost else {}).items():
            have = {status.job_id for status in known[number]}
            known[number] += [status for status in statuses if status.job_id not in have]
        return {
            job_id: [status for status in known[number] if status.job_id == job_id]
            if task and task.isdigit()
            else sorted(known[number], key=_order)
            for job_id, (number, task) in asked.items()
        }

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs, or send the script of those that run a signal."""
        asked = [job_id for job_id in job_ids if split_id(job_id)]
        if signal is not None:
            # scancel tries again for a minute to signal a job that has not started.
            asked = self._in_state(asked, JobState.RUNNING, JobState.SUSPENDED)
        elif tasks := [job_id for job_id in asked if "_" in job_id]:
            self._cancelled.update(self._in_state(tasks, JobState.PENDING, JobState.REQUEUED))
        if not asked:
            return
        options = () if signal is None else (f"--signal={signal}", "--batch")
        try:
            self.commands.run("scancel", *options, *asked)
        except ClusterError as e:
            if not _is_unknown_job(e) and "already completing or completed" not in e.message:
                raise

    def _in_state(self, job_ids: Sequence[str], *states: JobState) -> list[str]:
        known = self.status(job_ids).values()
        return [s.job_id for statuses in known for s in statuses if s.state in states]

    def own(self) -> list[str]:
        """Those that slurmctld knows."""
        words = ("--noheader", f"--user={user_name(os.geteuid())}", "--states=all", "--format=%F")
        numbers = set(self.commands.query("squeue", *words).split())
        if strange := sorted(word for word in numbers if not word.isdigit()):
            raise ClusterError(f"squeue says {strange[0][:160]!r}, expected the numbers of jobs.")
        return sorted(numbers, key=int)

    def snapshot(self, *, jobs: bool = False) -> ClusterSnapshot:
        """As slurmctld has it."""
        return read_snapshot(self.commands, jobs=jobs)

    # -- what was submitted ------------------------------------------------------------------------

    def _keep(self, submission: Submission, job_id: str) -> None:
        """Write down what was submitted: Slurm forgets a script with its job, and never knew its options."""
        here = dataclasses.replace(
            submission, directory=Path(submission.directory or "").absolute()
        )
        text = submission.script.decode(errors="surrogateescape")
        content = {"job": job_id, "script": text, **here.document()}
        # A home folder that is full, or none: the job runs, and cannot be resubmitted.
        with contextlib.suppress(OSError, RuntimeError):
            path = _record_of(submission.cluster, job_id)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, _RECORD.encode(content), mode=0o600, sync=False)

    def submission(self, job_id: str) -> Submission:
        """As it was written down when it was submitted here."""
        number, _ = split_id(job_id)
        config = read_config(self.commands.query("scontrol", "show", "config"))
        cluster = config.get("ClusterName", "").strip()
        path = _record_of(cluster, number)
        try:
            record = _RECORD.decode(path.read_bytes(), str(path)).plain()
        except OSError:
            record = {}
        if record.get("job") != number:
            raise ClusterError(
                f"what was submitted as job {number} is not known: {path.parent} holds the last "
                f"{_KEPT_MAX:,} jobs that headrace submitted to {cluster} from this home folder.",
                path=str(path),
                next_step="Submit its script again: headrace cluster batch SCRIPT.",
            )
        script = record["script"].encode(errors="surrogateescape")
        return Submission.of({**record, "cluster": cluster}, script)

    # -- what Slurm forgot -------------------------------------------------------------------------

    def _misses_some(self, number: str, known: list[JobStatus]) -> bool:
        """Whether slurmctld does not know the job, or not a task that it once knew."""
        have = {status.job_id for status in known}
        return not known or any(
            job_id.partition("_")[0] == number and job_id not in have and "[" not in job_id
            for job_id in self.seen
        )

    def _remembered(self, numbers: list[str]) -> dict[str, list[JobStatus]]:
        """From the books, and from what this executor saw itself."""
        from headrace.cluster.slurm.accounting import read_accounting  # submitting needs none of it

        remembered: dict[str, dict[str, JobStatus]] = {number: {} for number in numbers}
        try:
            for job in read_accounting(self.commands, job_ids=numbers):
                remembered.get(job.job_id.partition("_")[0], {})[job.job_id] = job
        except (SchedulerUnavailable, ClusterTimeout):
            raise
        except ClusterError:  # there are none, or this user may not read them
            pass
        for job_id, seen in self.seen.items():
            kept = remembered.get(job_id.partition("_")[0])
            if kept is None or "[" in job_id:
                continue
            if job_id in kept:
                kept[job_id] = dataclasses.replace(kept[job_id], output=seen.output)
            elif seen.state.is_over:
                kept[job_id] = seen
            elif job_id in self._cancelled:
                kept[job_id] = dataclasses.replace(seen, state=JobState.CANCELLED, reason="")
        return {number: list(statuses.values()) for number, statuses in remembered.items()}

    # -- what slurmctld knows ----------------------------------------------------------------------

    def _known(self, numbers: Collection[str]) -> dict[str, list[JobStatus]]:
        """All tasks of jobs that slurmctld knows: by a request for each, or one for all jobs there are."""
        show = ("scontrol", "--details", "show", "job")
        known: dict[str, list[JobStatus]] = {number: [] for number in numbers}
        if len(numbers) > _SINGLY_MAX:
            for status in read_statuses(self.commands.query(*show)):
                known.get(status.job_id.partition("_")[0], []).append(status)
            return known
        for number in numbers:
            try:
                known[number] = read_statuses(self.commands.query(*show, number))
            except ClusterError as e:
                if not _is_unknown_job(e):
                    raise
        return known


def _record_of(cluster: str, number: str) -> Path:
    return state_folder() / "submitted" / Path(cluster).name / f"{int(number) % _KEPT_MAX}.json"


def _is_unknown_job(error: ClusterError) -> bool:
    """Whether a refusal says that there is no such job."""
    return "Invalid job id" in error.message or "No jobs in the system" in error.message


def _order(status: JobStatus) -> tuple[int, str]:
    task = status.job_id.partition("_")[2]
    return (int(task) if task.isdigit() else 1 << 40, status.job_id)
