"""SlurmExecutor: jobs through sbatch, squeue, scontrol and scancel; nothing of it runs between the calls.

slurmctld forgets a job some minutes after its end: what it forgot is in the books, or was seen before.
"""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.executor import (
    Executor,
    JobState,
    JobStatus,
    SchedulerUnavailable,
    fill_pattern,
    follow_file,
    pattern_facts,
    read_file,
    split_id,
)
from headrace.cluster.hostlist import expand_hosts, expand_indices
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.text import blocks, job_state, task_id, unix_seconds, value
from headrace.errors import ClusterError, ClusterTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from headrace.cluster.executor import Submission


# -- what slurmctld knows of a job ---------------------------------------------------------------------

TASKS_MAX = 10_000
"""So many tasks of an array that wait have an entry each; those of a larger one are one entry together."""

_WORD = re.compile(r"(\w+)=(\S*)")
_NO_TASK = "4294967294"
"""What scontrol fills in as the number of a task that has none yet."""


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
    statuses: dict[str, list[JobStatus]] = {number: [] for number in numbers}
    for status in read_statuses(commands.query("scontrol", "--details", "show", "job")):
        statuses.get(status.job_id.partition("_")[0], []).append(status)
    return statuses


def read_statuses(text: str) -> Iterator[JobStatus]:
    """Of what `scontrol show job` prints, one for each task.

    Raises:
        ClusterError: it prints something else.
    """
    records = blocks(text, "JobId")
    if not records and text.strip() and "No jobs" not in text:
        raise ClusterError(f"scontrol says of a job what cannot be read: {text.strip()[:160]!r}.")
    for block in records:
        yield from _statuses(block)


def _statuses(block: str) -> Iterator[JobStatus]:
    first, _, rest = block.partition("\n")
    ids, _, name = first.partition(" JobName=")
    fields = dict(_WORD.findall(ids)) | dict(_WORD.findall(rest))
    try:
        exit_code, signal = (int(part) for part in fields.get("ExitCode", "0:0").split(":"))
        state = job_state(fields["JobState"])
        reason = fields.get("Reason", "").replace("_", " ")
        status = JobStatus(
            job_id=fields["JobId"],
            name=name,
            state=state,
            reason="" if reason == "None" else reason,
            nodes=expand_hosts(value(block, "NodeList")),
            exit_code=known_exit_code(state, exit_code, signal),
            signal=signal or None,
            restarts=int(fields.get("Restarts", 0)),
            submitted_s=unix_seconds(fields.get("SubmitTime", "")),
            started_s=unix_seconds(fields.get("StartTime", "")),
            ended_s=unix_seconds(fields.get("EndTime", "")) if state.is_over else None,
        )
    except (KeyError, ValueError) as e:
        raise ClusterError(
            f"scontrol says of a job what cannot be read ({e!r}): {block[:160]!r}."
        ) from e
    pattern = value(block, "StdOut")
    user = value(block, "UserId").partition("(")[0]
    array_id, tasks = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    if not array_id or tasks is None:
        yield dataclasses.replace(status, output=_output_path(pattern, status, user))
        return
    numbers = _tasks(tasks)
    if numbers is None:
        yield dataclasses.replace(status, job_id=task_id(status.job_id, array_id, tasks))
        return
    for task in numbers:
        yield dataclasses.replace(
            status,
            job_id=f"{array_id}_{task}",
            output=_output_path(pattern, status, user, array_id, task),
        )


def known_exit_code(state: JobState, exit_code: int, signal: int) -> int | None:
    """None where Slurm says 0 of a script that did not end by itself."""
    is_known = state.is_over and not signal and (exit_code or state is JobState.COMPLETED)
    return exit_code if is_known else None


def _tasks(text: str) -> list[int] | None:
    try:
        numbers = expand_indices(text.partition("%")[0])
    except ValueError:  # "1,3,5,...": cut short, or too many
        return None
    return list(numbers) if len(numbers) <= TASKS_MAX else None


def _output_path(
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


# -- the executor --------------------------------------------------------------------------------------

_POLL_S = (0.1, 5.0)
"""The first and the longest pause between two looks at jobs: each is a request to slurmctld, shared by all."""

_SINGLY_MAX = 32
"""So many jobs are asked for one by one, 5 ms each; for more, all of the cluster's are read."""

OUTAGE_S = 600.0
"""So long is slurmctld waited for: a restart, or a failover to its backup."""

_GONE = "Slurm does not know it any more: it ended longer than MinJobAge ago, and there is no accounting"


class SlurmExecutor(Executor):
    """Slurm.

    Args:
        commands: how its commands are called.
        notice: gets what sbatch tells the user of a job that it took: a site's filter may have a word.
        outage_s: how long `wait` and `logs` bear that slurmctld does not answer.
    """

    name = "slurm"
    poll_s = (*_POLL_S, 1.3)

    def __init__(
        self,
        commands: Commands | None = None,
        notice: Callable[[str], None] | None = None,
        outage_s: float = OUTAGE_S,
    ) -> None:
        self.commands = commands or Commands()
        self._notice = notice
        self.outage_s = outage_s
        self._seen: dict[str, JobStatus] = {}
        # Slurm forgets at once the tasks of an array that are cancelled while they wait.
        self._cancelled: set[str] = set()

    def submit(self, submission: Submission) -> str:
        """Queue a job; the script reaches sbatch byte for byte.

        Raises:
            ClusterRequestError: this cluster cannot meet it, or there is no such folder.
            ClusterError: there is no Slurm, or it does not answer.
        """
        environment = None
        if submission.environment:
            import os

            own = os.environ if self.commands.environment is None else self.commands.environment
            environment = {**own, **submission.environment}
        # With arguments the script is named, and "-" names its standard input... only from some version on: a
        # script that comes on standard input takes its arguments behind "/dev/stdin".
        arguments = ("/dev/stdin", *submission.arguments) if submission.arguments else ()
        directory = None if submission.directory is None else str(submission.directory)
        try:
            output, message = self.commands.run(
                "sbatch", "--parsable", *submission.options, *arguments,
                stdin=submission.script, environment=environment, directory=directory,
            )  # fmt: skip
        except ClusterTimeout as e:
            raise ClusterTimeout(
                f"{e.message} Whether the job was submitted is not known.",
                next_step="Look with squeue before you submit it again.",
            ) from e
        if message and self._notice is not None:
            self._notice(message)
        job_id = output.decode(errors="replace").strip().rpartition("\n")[2].partition(";")[0]
        if not job_id.isdigit():
            raise ClusterError(f"sbatch says {output[:160]!r}, expected the number of a job.")
        return job_id

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for.

        Raises:
            ClusterError: Slurm does not answer.
        """
        asked = {job_id: split_id(job_id) for job_id in job_ids}
        numbers = {number for number, _ in asked.values()}
        if len(numbers) > _SINGLY_MAX:
            known = ask_for_all(self.commands, numbers)
        else:
            known = {number: ask_controller(self.commands, number) for number in numbers}
        for statuses in known.values():
            for status in statuses:
                self._seen[status.job_id] = status
        lost = sorted(number for number in known if self._misses_some(number, known[number]))
        if lost:
            for number, statuses in self._remembered(lost).items():
                have = {status.job_id for status in known[number]}
                known[number] += [status for status in statuses if status.job_id not in have]
        return {
            job_id: _of_task(known[number], job_id, task)
            for job_id, (number, task) in asked.items()
        }

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs, or send the script of those that run a signal.

        Raises:
            ClusterError: Slurm does not answer, or they are somebody else's.
        """
        asked = [job_id for job_id in job_ids if split_id(job_id)]
        if signal is not None:
            # scancel tries again for a minute to signal a job that has not started.
            running = (JobState.RUNNING, JobState.SUSPENDED)
            statuses_by_id = self.status(asked)
            asked = [
                s.job_id
                for statuses in statuses_by_id.values()
                for s in statuses
                if s.state in running
            ]
        elif tasks := [job_id for job_id in asked if "_" in job_id]:
            waiting = (JobState.PENDING, JobState.REQUEUED)
            self._cancelled |= {
                s.job_id
                for known in self.status(tasks).values()
                for s in known
                if s.state in waiting
            }
        if not asked:
            return
        options = () if signal is None else (f"--signal={signal}", "--batch")
        try:
            self.commands.run("scancel", *options, *asked)
        except ClusterError as e:
            if not is_unknown_job(e) and "already completing or completed" not in e.message:
                raise

    def requeue(self, job_ids: Sequence[str]) -> None:
        """Have jobs start again; Slurm lets them wait two minutes.

        Raises:
            ClusterError: Slurm does not know them, or they may not be requeued.
        """
        for job_id in job_ids:
            split_id(job_id)
            self.commands.run("scontrol", "requeue", job_id)

    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[bytes]:
        """What the job printed.

        Raises:
            ClusterRequestError: it is an array; its tasks have logs.
            ClusterError: the job, or its output, is not known, or cannot be read here.
        """
        path = self._output(job_id)
        if not follow:
            try:
                yield from read_file(path)
            except FileNotFoundError:
                if self.one(job_id).state.is_over:
                    raise _unreadable(job_id, path, "it is not there") from None
            except OSError as e:
                raise _unreadable(job_id, path, e.strerror or str(e)) from e
            return
        watch = _Watch(lambda: self._over(job_id), self.outage_s)
        try:
            yield from follow_file(path, watch.is_over)
        except OSError as e:
            raise _unreadable(job_id, path, e.strerror or str(e)) from e

    # -- what Slurm forgot -------------------------------------------------------------------------

    def _misses_some(self, number: str, known: list[JobStatus]) -> bool:
        """Whether slurmctld does not know the job, or not a task that it once knew."""
        have = {status.job_id for status in known}
        return not known or any(
            job_id.partition("_")[0] == number and job_id not in have and "[" not in job_id
            for job_id in self._seen
        )

    def _remembered(self, numbers: list[str]) -> dict[str, list[JobStatus]]:
        """From the books, and from what this executor saw itself."""
        from headrace.cluster.slurm.accounting import read_accounting  # submitting needs none of it

        remembered: dict[str, dict[str, JobStatus]] = {number: {} for number in numbers}
        try:
            books = read_accounting(self.commands, job_ids=numbers)
        except (SchedulerUnavailable, ClusterTimeout):
            raise
        except ClusterError:  # there are none, or this user may not read them
            books = []
        for job in books:
            remembered.get(job.job_id.partition("_")[0], {})[job.job_id] = job.status()
        for job_id, seen in self._seen.items():
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

    def forgotten(self, job_id: str) -> JobStatus:
        """As it was last seen, in the state UNKNOWN."""
        seen = self._seen.get(job_id) or JobStatus(job_id, "", JobState.UNKNOWN)
        return dataclasses.replace(seen, state=JobState.UNKNOWN, reason=_GONE)

    def not_known(self, job_id: str) -> ClusterError:
        """Says where its output may be all the same."""
        return ClusterError(
            f"Slurm does not know job {job_id}, or not any more.",
            next_step="Its output is where --output said, by default slurm-JOBID.out in the folder "
            "where it was submitted.",
        )

    def _output(self, job_id: str) -> Path:
        output = self.one(job_id).output
        if output is None:
            raise ClusterError(f"Slurm does not say where the output of job {job_id} goes.")
        return output

    def _over(self, job_id: str) -> bool:
        known = self.status([job_id])[job_id]
        return all(status.state.is_over for status in known)


class _Watch:
    """Asks rarely whether a job is over, and bears that slurmctld is away."""

    def __init__(self, ask: Callable[[], bool], outage_s: float) -> None:
        self._ask = ask
        self._outage_s = outage_s
        self._answer = False
        self._next = 0.0
        self._pause, self._longest = _POLL_S
        self._answered = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        if self._answer or now < self._next:
            return self._answer
        try:
            self._answer = self._ask()
            self._answered = now
        except (SchedulerUnavailable, ClusterTimeout):
            if now - self._answered > self._outage_s:
                raise
        self._pause = min(self._pause * 1.3, self._longest)
        self._next = time.monotonic() + self._pause
        return self._answer


def _of_task(known: list[JobStatus], job_id: str, task: str | None) -> list[JobStatus]:
    if task is None:
        return sorted(known, key=_order)
    if task.isdigit():
        return [status for status in known if status.job_id == job_id]
    return known


def _order(status: JobStatus) -> tuple[int, str]:
    task = status.job_id.partition("_")[2]
    return (int(task) if task.isdigit() else 1 << 40, status.job_id)


def _unreadable(job_id: str, path: Path, why: str) -> ClusterError:
    return ClusterError(
        f"{path}: the output of job {job_id} cannot be read here: {why}.",
        path=str(path),
        next_step="It was written by the job's first node: look there, or on a shared file system.",
    )
