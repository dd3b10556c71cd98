"""LocalExecutor: the executor of a laptop, and of tests: jobs as processes of this machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import shutil
import signal as signals
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.peers import user_name
from headrace.cluster.executor import Executor, JobState, JobStatus, Submission, split_id
from headrace.cluster.launch.place import machine_gpus
from headrace.cluster.local.jobs import JobsFolder, LocalJob, TaskState, read_request
from headrace.cluster.local.keeper import job_variables, keeper_lives, node_names, schedule
from headrace.cluster.processes import send, start_time
from headrace.cluster.snapshot import Allocation, ClusterJob, ClusterSnapshot, Node, Partition
from headrace.errors import ClusterError, ClusterRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.cluster.layout import JobLayout


class LocalExecutor(Executor):
    """This machine."""

    name = "local"
    poll_s = (0.02, 0.5, 1.2)
    gone = "it is not known, or was over more than a day ago"
    not_known = ("there is no local job {}, or not any more.", None)

    def __init__(
        self, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Of the jobs in this folder; `variables` win over what jobs are told otherwise."""
        self.jobs = JobsFolder.of_user() if folder is None else JobsFolder(folder)
        self._variables = dict(variables or {})

    def submit(self, submission: Submission) -> str:
        """Queue a job; it starts at once if there are CPUs and GPUs for it."""
        request = read_request(submission.script, submission.options)
        directory = Path(submission.directory or Path.cwd(), request.directory).absolute()
        if not directory.is_dir():
            raise ClusterRequestError(
                f"{directory}: the job's working directory does not exist.", path=str(directory)
            )
        self.jobs.open()
        with self.jobs.locked():
            for _, job_id in request.dependencies:
                if job_id:
                    self._known(job_id)
            number = self.jobs.next_number()
            folder = self.jobs.path / f".new-{number}"
            job = LocalJob(
                number=number, folder=folder, request=request, name=request.name or "sbatch",
                user=user_name(os.geteuid()), directory=str(directory), options=submission.options,
                arguments=submission.arguments, environment={**os.environ, **submission.environment},
                submitted_s=time.time(), key=secrets.token_hex(16), variables=self._variables,
            )  # fmt: skip
            try:
                job.create(submission.script)
                folder.rename(self.jobs.path / str(number))
            except OSError as e:
                shutil.rmtree(folder, ignore_errors=True)
                raise ClusterError(
                    f"{folder}: the job cannot be written: {e.strerror}.", path=str(folder)
                ) from e
        schedule(self.jobs)
        return str(number)

    def status(self, job_ids: Sequence[str]) -> dict[str, list[JobStatus]]:
        """By id asked for."""
        known = {job_id: self._tasks(job_id) for job_id in job_ids}
        # A keeper that was killed is seen by whoever looks.
        if any(not job.tasks[task].is_over for tasks in known.values() for job, task in tasks):
            schedule(self.jobs)
            known = {job_id: self._tasks(job_id) for job_id in job_ids}
        return {job_id: [_status(*task) for task in tasks] for job_id, tasks in known.items()}

    def cancel(self, job_ids: Sequence[str], signal: int | None = None) -> None:
        """End jobs: all processes get SIGTERM, and SIGKILL 10 s later; or send the script a signal."""

        def end(_job: LocalJob, state: TaskState) -> None:
            if state.is_over:
                return
            if signal is not None:
                began = start_time(state.script) if state.script and keeper_lives(state) else None
                if began is not None:
                    send(state.script, began, signal)
            elif state.state == JobState.PENDING:
                state.state, state.reason, state.ended_s = JobState.CANCELLED, "", time.time()
            else:
                state.asked = "cancel"

        self._change(job_ids, end)

    def requeue(self, job_ids: Sequence[str]) -> None:
        """Have jobs start again: those that run are ended, those that are over wait anew."""

        def again(job: LocalJob, state: TaskState) -> None:
            if state.is_over:
                state.state, state.reason, state.asked = JobState.PENDING, "requeued", ""
                state.restarts += 1
                state.started_s = state.ended_s = state.exit_code = state.signal = None
                (job.folder / "over").unlink(missing_ok=True)
            elif state.state != JobState.PENDING:
                state.asked = state.asked or "requeue"

        for job_id in job_ids:
            self._known(job_id)
        self._change(job_ids, again)

    def own(self) -> list[str]:
        """All that were not over more than a day ago."""
        return [str(number) for number in self.jobs.numbers()]

    def submission(self, job_id: str) -> Submission:
        """As it lies in the job's folder."""
        self._known(job_id)
        job = self._tasks(job_id)[0][0]
        return Submission(
            job.script.read_bytes(),
            job.options,
            job.arguments,
            Path(job.directory),
            job.environment,
        )

    # -- one job -----------------------------------------------------------------------------------

    def _tasks(self, job_id: str) -> list[tuple[LocalJob, int | None]]:
        number, task = split_id(job_id)
        try:
            job = LocalJob.load(self.jobs.path / number)
        except FileNotFoundError:
            return []
        return [(job, t) for t in job.tasks if task is None or str(t) == task]

    def _known(self, job_id: str) -> None:
        if not self._tasks(job_id):
            raise ClusterRequestError(self.not_known[0].format(job_id))

    def _change(
        self, job_ids: Sequence[str], change: Callable[[LocalJob, TaskState], None]
    ) -> None:
        """Change the states of tasks; those whose keepers are asked for something hear of it at once."""
        for job_id in job_ids:
            split_id(job_id)
        if not self.jobs.path.is_dir():
            return
        with self.jobs.locked():
            for job_id in job_ids:
                tasks = self._tasks(job_id)
                for job, task in tasks:
                    change(job, job.tasks[task])
                for job, _ in tasks[:1]:
                    job.save()
                for job, task in tasks:
                    state = job.tasks[task]
                    if state.asked and state.runs and state.output:  # else it is about to look
                        send(state.keeper, state.keeper_started, signals.SIGHUP)
        schedule(self.jobs)


def _status(job: LocalJob, task: int | None) -> JobStatus:
    state = job.tasks[task]
    nodes = node_names(job.request.nodes) if state.started_s is not None else ()
    return JobStatus(
        job.task_id(task), job.name, state.shown, state.reason, nodes, state.exit_code, state.signal,
        state.restarts, job.submitted_s, state.started_s, state.ended_s,
        output=Path(state.output) if state.output else None,
    )  # fmt: skip


# -- this machine as a cluster -------------------------------------------------------------------------


def local_snapshot(gpus: int = 0, nodes: int = 1) -> ClusterSnapshot:
    """One partition, `local`: this process's CPUs, the machine's memory and its GPUs.

    Args:
        gpus: on a machine without any, a node is said to have as many as this: what a cluster would give GPUs
            are processes here, so that a job can be tried on a laptop.
        nodes: so many that all are this machine, for the same reason.
    """
    cpus, own, names = len(os.sched_getaffinity(0)), machine_gpus(), node_names(nodes)
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    node = Node(
        name="", states=("idle",), cpus=cpus if own else max(cpus, gpus), sockets=1,
        cores_per_socket=cpus, threads_per_core=1, memory_mib=memory_mib, gpus=own or gpus,
        partitions=("local",), architecture=platform.machine(),
    )  # fmt: skip
    alike = tuple(dataclasses.replace(node, name=name) for name in names)
    partition = Partition("local", names, is_default=True)
    return ClusterSnapshot("local", "", time.time(), alike, (partition,), ())


def with_local_jobs(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """This machine, one node, with the jobs of its user that the local executor has and are not over."""
    node = snapshot.nodes[0]
    jobs = [
        _job(job, state, job.task_id(task), node.name)
        for job in JobsFolder.of_user().jobs()
        for task, state in job.tasks.items()
        if not state.is_over
    ]
    running = [job for job in jobs if job.nodes]
    cpus = min(node.cpus, sum(job.cpu_count for job in running))
    gpus = tuple(sorted({i for job in running for part in job.allocations for i in part.gpus}))
    state = "idle" if not running else "allocated" if cpus == node.cpus else "mixed"
    busy = dataclasses.replace(node, states=(state,), cpus_allocated=cpus, gpus_allocated=gpus)
    return dataclasses.replace(snapshot, nodes=(busy,), jobs=tuple(jobs))


def _job(job: LocalJob, state: TaskState, job_id: str, node: str) -> ClusterJob:
    asked = job.request
    has = (Allocation(node, asked.cpus, 0, len(state.gpus), state.gpus),) if state.runs else ()
    return ClusterJob(
        job_id=job_id, name=job.name, user=job.user, account="", partition="local",
        state=state.shown, reason=state.reason, nodes=(node,) if state.runs else (), allocations=has,
        node_count=asked.nodes, cpu_count=asked.cpus, gpu_count=asked.gpus,
        submitted_s=job.submitted_s, started_s=state.started_s if state.runs else None,
        limit_minutes=None if asked.time_s is None else round(asked.time_s / 60),
    )  # fmt: skip


def foreground_environment(layout: JobLayout, name: str) -> dict[str, str]:
    """What a command in the foreground is told of its job, as the local executor tells those that it queues."""
    return job_variables(
        f"local-{os.getpid()}", name, ",".join(node_names(layout.nodes)),
        gpus_per_node=layout.gpus_per_node or -(-layout.gpus // layout.nodes),
        tasks_per_node=layout.tasks_per_node or -(-layout.tasks // layout.nodes),
        cpus_per_task=layout.cpus_per_task or 1, directory=str(Path.cwd()),
    )  # fmt: skip
