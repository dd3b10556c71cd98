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
from headrace.cluster.executor import Executor, JobState, JobStatus, split_id
from headrace.cluster.launch.place import machine_gpus
from headrace.cluster.local.jobs import (
    JobsFolder,
    LocalJob,
    job_directory,
    queued_job,
    read_request,
)
from headrace.cluster.local.keeper import (
    NO_GPUS,
    gpus_here,
    job_variables,
    keeper_lives,
    node_names,
    schedule,
)
from headrace.cluster.processes import send
from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition, occupied
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout
from headrace.machine.host import start_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.executor import Submission
    from headrace.cluster.layout import JobLayout
    from headrace.cluster.snapshot import ClusterJob


_BEGIN_S = 10.0
_LOOK_S = 0.02


class LocalExecutor(Executor):
    """This machine."""

    name = "local"
    poll_s = (0.02, 0.5, 1.2)
    gone = "it is not known, or was over more than a day ago"
    not_known = (
        "there is no local job {}, or not any more.",
        "`headrace cluster status` lists this machine's jobs.",
    )

    def __init__(
        self, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Of the jobs in this folder; `variables` win over what jobs are told otherwise."""
        self.jobs = JobsFolder.of_user() if folder is None else JobsFolder(folder)
        self._variables = dict(variables or {})

    def submit(self, submission: Submission, number: int | None = None) -> str:
        """Queue a job; it starts at once if there are CPUs and GPUs for it. `number`: of another executor."""
        whole = dataclasses.replace(
            submission, directory=job_directory(submission),
            environment={**os.environ, **submission.environment},
        )  # fmt: skip
        self.jobs.open()
        with self.jobs.locked():
            for _, job_id in read_request(submission.script, submission.options).dependencies:
                if job_id:
                    self._known(job_id)
            number = number or self.jobs.next_number()
            folder = self.jobs.path / f".new-{number}"
            job = LocalJob(
                number=number, folder=folder, submission=whole, user=user_name(os.geteuid()),
                submitted_s=time.time(), key=secrets.token_hex(16), variables=self._variables,
            )  # fmt: skip
            try:
                job.create()
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
        """End jobs: all processes get SIGTERM, and SIGKILL 30 s later; or send the script a signal."""
        if signal is not None:
            for job, task in [task for job_id in job_ids for task in self._tasks(job_id)]:
                self._signal(job, task, signal)
            return
        for job_id in job_ids:
            split_id(job_id)
        if not self.jobs.path.is_dir():
            return
        with self.jobs.locked():
            for job_id in job_ids:
                self._end(self._tasks(job_id))
        schedule(self.jobs)

    def own(self) -> list[str]:
        """All that were not over more than a day ago."""
        return [str(number) for number in self.jobs.numbers()]

    def submission(self, job_id: str) -> Submission:
        """As it lies in the job's folder."""
        return self._known(job_id).submission

    def snapshot(self, *, jobs: bool = False) -> ClusterSnapshot:
        """This machine, one node; its jobs are those of its user that are not over."""
        empty = local_snapshot()
        own = self.jobs.jobs() if jobs else ()
        tasks = [(job, task) for job in own for task in job.tasks if not job.tasks[task].is_over]
        rows = [_row(job, task, empty.nodes[0]) for job, task in tasks]
        nodes = occupied(empty.nodes, rows)
        return dataclasses.replace(empty, nodes=nodes, jobs=tuple(rows))

    # -- one job -----------------------------------------------------------------------------------

    def _tasks(self, job_id: str) -> list[tuple[LocalJob, int | None]]:
        number, task = split_id(job_id)
        try:
            job = LocalJob.load(self.jobs.path / number)
        except FileNotFoundError:
            return []
        return [(job, t) for t in job.tasks if task is None or str(t) == task]

    def _signal(self, job: LocalJob, task: int | None, number: int) -> None:
        """Signal the script of a task that runs; one that is about to begin is waited for."""
        until_s = time.monotonic() + _BEGIN_S
        while (state := job.tasks[task]).runs and keeper_lives(state):
            if state.script:
                if (began := start_time(state.script)) is not None:
                    send(state.script, began, number)
                return
            if time.monotonic() > until_s:
                raise ClusterTimeout(
                    f"the script of job {job.task_id(task)} has not begun within {_BEGIN_S:g} s: it was not "
                    "signalled."
                )
            time.sleep(_LOOK_S)
            job = LocalJob.load(job.folder)

    @staticmethod
    def _end(tasks: list[tuple[LocalJob, int | None]]) -> None:
        """End tasks of a job; `locked`."""
        states = [job.tasks[task] for job, task in tasks if not job.tasks[task].is_over]
        for state in states:
            if state.state == JobState.PENDING:
                state.state, state.reason, state.ended_s = JobState.CANCELLED, "", time.time()
            else:
                state.is_cancelled = True
        for job, _ in tasks[:1]:
            job.save()
        for state in states:
            if state.is_cancelled and state.output:  # else its keeper is about to look
                send(state.keeper, state.keeper_started, signals.SIGHUP)

    def _known(self, job_id: str) -> LocalJob:
        if not (tasks := self._tasks(job_id)):
            raise ClusterRequestError(self.not_known[0].format(job_id))
        return tasks[0][0]


def _status(job: LocalJob, task: int | None) -> JobStatus:
    state = job.tasks[task]
    nodes = node_names(job.request.nodes) if state.started_s is not None else ()
    return JobStatus(
        job.task_id(task), job.name, state.shown, state.reason, nodes, state.exit_code, state.signal,
        state.restarts, job.submitted_s, state.started_s, state.ended_s,
        output=Path(state.output) if state.output else None,
        folder=job.submission.directory,
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
        name="", states=("idle",), cpus=cpus if own else max(cpus, gpus),
        memory_mib=memory_mib, gpus=own or gpus,
        partitions=("local",), architecture=platform.machine(),
    )  # fmt: skip
    alike = tuple(dataclasses.replace(node, name=name) for name in names)
    partition = Partition("local", names, is_default=True)
    return ClusterSnapshot("local", "", time.time(), alike, (partition,), ())


def _row(job: LocalJob, task: int | None, here: Node) -> ClusterJob:
    """A task in the queue: the nodes that it is told of are all this one, with what this one has."""
    state, asked = job.tasks[task], job.request
    request = asked if gpus_here() else dataclasses.replace(asked, gpus_per_node=0)
    status = dataclasses.replace(
        _status(job, task), nodes=(here.name,) if state.runs else (),
        started_s=state.started_s if state.runs else None,
    )  # fmt: skip
    row = queued_job(status, request, job.user, "local", state.gpus)
    nodes = _status(job, task).with_run().nodes if state.runs else ()
    return dataclasses.replace(row, nodes=nodes, cpu_count=min(asked.cpus, here.cpus))


def foreground_environment(layout: JobLayout, name: str) -> dict[str, str]:
    """What a command in the foreground is told of its job, as the local executor tells those that it queues."""
    return ({} if gpus_here() else NO_GPUS) | job_variables(
        f"local-{os.getpid()}", name, ",".join(node_names(layout.nodes)),
        gpus_per_node=layout.gpus_per_node or -(-layout.gpus // layout.nodes),
        tasks_per_node=layout.tasks_per_node or -(-layout.tasks // layout.nodes),
        cpus_per_task=layout.cpus_per_task or 1,
    )  # fmt: skip
