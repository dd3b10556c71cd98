"""LocalExecutor: the executor of a laptop, and of tests: jobs as processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import pwd
import secrets
import shutil
import signal as signals
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.executor import (
    Executor,
    JobState,
    JobStatus,
    follow_file,
    read_file,
    split_id,
)
from headrace.cluster.launch.plan import machine_gpus
from headrace.cluster.local.jobs import JobsFolder, LocalJob, jobs_folder, read_request
from headrace.cluster.local.keeper import node_names, schedule
from headrace.cluster.processes import send, start_time
from headrace.cluster.snapshot import Allocation, ClusterSnapshot, Job, Node, Partition
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.cluster.executor import Submission
    from headrace.cluster.layout import JobLayout
    from headrace.cluster.local.jobs import LocalTask, TaskState


# -- the executor --------------------------------------------------------------------------------------


class LocalExecutor(Executor):
    """This machine.

    Args:
        folder: where jobs are known; by default this user's (`jobs_folder`).
    """

    name = "local"
    poll_s = (0.02, 0.5, 1.2)

    def __init__(self, folder: Path | None = None) -> None:
        self.jobs = jobs_folder() if folder is None else JobsFolder(folder)

    def submit(self, submission: Submission) -> str:
        """Queue a job; it starts at once if there are CPUs and GPUs for it.

        Raises:
            ClusterRequestError: sbatch would refuse it, or it is not done here.
            ClusterError: the folder of jobs cannot be used.
        """
        request = read_request(submission.script, submission.options)
        directory = self._directory(request.directory, submission.directory)
        self.jobs.open()
        with self.jobs.locked():
            for dependency in request.dependencies:
                if dependency.job_id:
                    self._known(dependency.job_id)
            number = self.jobs.next_number()
            folder = self.jobs.path / f".new-{number}"
            job = LocalJob(
                number=number, folder=folder, request=request, name=request.name or "sbatch",
                user=_user(),
                directory=str(directory), arguments=submission.arguments,
                environment={**os.environ, **submission.environment},
                submitted_s=time.time(), key=secrets.token_hex(16),
            )  # fmt: skip
            try:
                self._write(job, submission.script)
                folder.rename(self.jobs.path / str(number))
            except OSError as e:
                shutil.rmtree(folder, ignore_errors=True)
                raise ClusterError(
                    f"{folder}: the job cannot be written: {e.strerror}.", path=str(folder)
                ) from e
        schedule(self.jobs)
        return str(number)

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for.

        Raises:
            ClusterRequestError: it is no id.
        """
        asked = {job_id: split_id(job_id) for job_id in job_ids}
        if not self.jobs.path.is_dir():
            return {job_id: [] for job_id in asked}
        statuses_by_id = self._read(asked)
        # A keeper that was killed is seen by whoever looks.
        if any(not s.state.is_over for statuses in statuses_by_id.values() for s in statuses):
            schedule(self.jobs)
            statuses_by_id = self._read(asked)
        return statuses_by_id

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs: all processes get SIGTERM, and SIGKILL 10 s later; or send the script a signal.

        Raises:
            ClusterRequestError: it is no id.
        """
        asked = {job_id: split_id(job_id) for job_id in job_ids}
        if not self.jobs.path.is_dir():
            return
        with self.jobs.locked():
            for job_id in asked:
                for _, task in self._tasks(job_id):
                    state = task.read()
                    if state.is_over:
                        continue
                    if signal is not None:
                        began = start_time(state.script) if state.script else None
                        if began is not None and _keeps(state):
                            send(state.script, began, signal)
                    elif state.state == JobState.PENDING:
                        state.state, state.ended_s = JobState.CANCELLED, time.time()
                        state.reason = ""
                        task.write(state)
                    else:
                        task.ask("cancel")
                        _wake(state)
        schedule(self.jobs)

    def requeue(self, job_ids: Sequence[str]) -> None:
        """Have jobs start again: those that run are ended, those that are over wait anew.

        Raises:
            ClusterRequestError: it is no id, or none that is known.
        """
        for job_id in job_ids:
            split_id(job_id)
            self._known(job_id)
        with self.jobs.locked():
            for job_id in job_ids:
                for job, task in self._tasks(job_id):
                    state = task.read()
                    if state.is_over:
                        state.state, state.reason = JobState.PENDING, "requeued"
                        state.restarts += 1
                        state.started_s = state.ended_s = state.exit_code = state.signal = None
                        task.forget("cancel")
                        task.write(state)
                        job.over.unlink(missing_ok=True)
                    elif state.state != JobState.PENDING:
                        task.ask("requeue")
                        _wake(state)
        schedule(self.jobs)

    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[bytes]:
        """What the job printed.

        Raises:
            ClusterRequestError: it is an array; its tasks have logs.
            ClusterError: it is not known, or its output cannot be read.
        """
        status = self.one(job_id)
        try:
            while status.output is None:
                if status.state.is_over or not follow:
                    return
                time.sleep(0.1)
                status = self.one(job_id)
            if follow:
                yield from follow_file(status.output, lambda: self.one(job_id).state.is_over)
            else:
                yield from read_file(status.output)
        except OSError as e:
            if status.state.is_over or not isinstance(e, FileNotFoundError):
                raise ClusterError(
                    f"{status.output}: the output of job {job_id} cannot be read: {e.strerror}. "
                    f"{status.reason}",
                    path=str(status.output),
                ) from e

    def forgotten(self, job_id: str) -> JobStatus:
        """It may have been over for a day."""
        return JobStatus(
            job_id, "", JobState.UNKNOWN, "it is not known, or was over more than a day ago"
        )

    def not_known(self, job_id: str) -> ClusterError:
        """Names it."""
        return ClusterError(f"there is no local job {job_id}, or not any more.")

    # -- one job -----------------------------------------------------------------------------------

    def _directory(self, asked: str, given: Path | None) -> Path:
        directory = Path(given or Path.cwd(), asked).absolute()
        if not directory.is_dir():
            raise ClusterRequestError(
                f"{directory}: the job's working directory does not exist.", path=str(directory)
            )
        return directory

    @staticmethod
    def _write(job: LocalJob, script: bytes) -> None:
        job.folder.mkdir(mode=0o700)
        for task in job.tasks:
            task.folder.mkdir()
        job.script.write_bytes(script)
        job.script.chmod(0o700)
        job.save()

    def _tasks(self, job_id: str) -> list[tuple[LocalJob, LocalTask]]:
        number, task = split_id(job_id)
        try:
            job = self.jobs.load(number)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(job, t) for t in job.tasks if task is None or str(t.number) == task]

    def _known(self, job_id: str) -> None:
        if not self._tasks(job_id):
            raise ClusterRequestError(f"there is no local job {job_id}, or not any more.")

    def _read(self, asked: dict[str, tuple[str, str | None]]) -> dict[str, list[JobStatus]]:
        return {
            job_id: [_status(job, task) for job, task in self._tasks(job_id)] for job_id in asked
        }


def _status(job: LocalJob, task: LocalTask) -> JobStatus:
    state = task.read()
    started = state.started_s is not None
    return JobStatus(
        job_id=job.task_id(task),
        name=job.name,
        state=JobState(state.state),
        reason=state.reason,
        nodes=node_names(job.request.nodes) if started else (),
        exit_code=state.exit_code,
        signal=state.signal,
        restarts=state.restarts,
        submitted_s=job.submitted_s,
        started_s=state.started_s,
        ended_s=state.ended_s,
        output=Path(state.output) if state.output else None,
    )


def _keeps(state: TaskState) -> bool:
    """Whether its keeper is there, and no other process of that number."""
    return bool(state.keeper) and start_time(state.keeper) == state.keeper_started


def _wake(state: TaskState) -> None:
    """Have the keeper look at once, not within a second."""
    if state.keeper:
        send(state.keeper, state.keeper_started, signals.SIGHUP)


def _user() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


# -- this machine as a cluster -------------------------------------------------------------------------


def local_snapshot(gpus: int = 0, nodes: int = 1) -> ClusterSnapshot:
    """One partition, `local`: this process's CPUs, the machine's memory and its GPUs.

    Args:
        gpus: on a machine without any, a node is said to have as many as this: what a cluster would give GPUs
            are processes here, so that a job can be tried on a laptop.
        nodes: so many that all are this machine, for the same reason.
    """
    cpus = len(os.sched_getaffinity(0))
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    own = machine_gpus()
    names = node_names(nodes)
    alike = tuple(
        Node(
            name=name, states=("idle",), cpus=cpus if own else max(cpus, gpus), sockets=1,
            cores_per_socket=cpus, threads_per_core=1, memory_mib=memory_mib, gpus=own or gpus,
            partitions=("local",), architecture=platform.machine(),
        )
        for name in names
    )  # fmt: skip
    partition = Partition("local", names, is_default=True)
    return ClusterSnapshot("local", "", time.time(), alike, (partition,), ())


def with_local_jobs(snapshot: ClusterSnapshot, folder: JobsFolder | None = None) -> ClusterSnapshot:
    """This machine with the jobs of its user that the local executor has; those that are over are left out.

    Args:
        snapshot: of one node.
        folder: of the jobs; None: this user's.
    """
    node = snapshot.nodes[0]
    jobs = [
        seen
        for job in (folder or jobs_folder()).jobs()
        for task in job.tasks
        if (seen := _job(job, task, node.name)) is not None
    ]
    running = [job for job in jobs if job.nodes]
    cpus = min(node.cpus, sum(job.cpu_count for job in running))
    gpus = tuple(sorted({i for job in running for part in job.allocations for i in part.gpus}))
    state = "idle" if not running else "allocated" if cpus == node.cpus else "mixed"
    busy = dataclasses.replace(node, states=(state,), cpus_allocated=cpus, gpus_allocated=gpus)
    return dataclasses.replace(snapshot, nodes=(busy,), jobs=tuple(jobs))


def _job(job: LocalJob, task: LocalTask, node: str) -> Job | None:
    state = task.read()
    if state.is_over:
        return None
    asked = job.request
    runs = state.started_s is not None and state.state != JobState.PENDING
    cpus = asked.nodes * asked.tasks_per_node * asked.cpus_per_task
    gpus = asked.nodes * asked.gpus_per_node
    has = (Allocation(node, cpus, 0, len(state.gpus), state.gpus),) if runs else ()
    return Job(
        job_id=job.task_id(task), name=job.name, user=job.user, account="", partition="local",
        state=JobState(state.state), reason=state.reason, nodes=(node,) if runs else (), allocations=has,
        node_count=asked.nodes, cpu_count=cpus, gpu_count=gpus, submitted_s=job.submitted_s,
        started_s=state.started_s if runs else None,
        limit_minutes=None if asked.time_s is None else round(asked.time_s / 60),
    )  # fmt: skip


def foreground_environment(layout: JobLayout, name: str) -> dict[str, str]:
    """What a command in the foreground is told of its job, as the local executor tells those that it queues."""
    per_node = layout.tasks_per_node or -(-layout.tasks // layout.nodes)
    return {
        "HEADRACE_JOB_ID": f"local-{os.getpid()}",
        "HEADRACE_JOB_NAME": name,
        "HEADRACE_JOB_NODES": ",".join(node_names(layout.nodes)),
        "HEADRACE_JOB_NODE_INDEX": "0",
        "HEADRACE_JOB_GPUS_PER_NODE": str(layout.gpus_per_node or -(-layout.gpus // layout.nodes)),
        "HEADRACE_JOB_TASKS_PER_NODE": str(per_node),
        "HEADRACE_JOB_CPUS_PER_TASK": str(layout.cpus_per_task or 1),
        "HEADRACE_JOB_CPUS_PER_NODE": str((layout.cpus_per_task or 1) * per_node),
        "HEADRACE_JOB_RESTARTS": "0",
        "HEADRACE_JOB_REQUEUE": "0",
        "HEADRACE_JOB_DIRECTORY": str(Path.cwd()),
    }
