"""This machine as a cluster: what a request is laid out on, and what a command learns, without Slurm."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.executor import JobState
from headrace.cluster.snapshot import Allocation, ClusterSnapshot, Job, Node, Partition

if TYPE_CHECKING:
    from headrace.cluster.layout import Layout
    from headrace.cluster.local.folder import JobsFolder, LocalJob, Task

__all__ = ["foreground_environment", "local_snapshot", "with_local_jobs"]

_DEVICE = re.compile(r"nvidia\d+")


def local_snapshot(gpus: int = 0, nodes: int = 1) -> ClusterSnapshot:
    """One partition, `local`: this process's CPUs, the machine's memory and its GPUs.

    Args:
        gpus: on a machine without any, a node is said to have as many as this: what a cluster would give GPUs
            are processes here, so that a job can be tried on a laptop.
        nodes: so many that all are this machine, for the same reason.
    """
    cpus = len(os.sched_getaffinity(0))
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    own = sum(_DEVICE.fullmatch(path.name) is not None for path in Path("/dev").glob("nvidia*"))
    names = _names(nodes)
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
    from headrace.cluster.local.folder import jobs_folder

    node = snapshot.nodes[0]
    found = [
        made
        for job in (folder or jobs_folder()).jobs()
        for task in job.tasks
        if (made := _job(job, task, node.name)) is not None
    ]
    running = [job for job in found if job.nodes]
    cpus = min(node.cpus, sum(job.cpu_count for job in running))
    gpus = tuple(sorted({i for job in running for part in job.allocations for i in part.gpus}))
    state = "idle" if not running else "allocated" if cpus == node.cpus else "mixed"
    busy = dataclasses.replace(node, states=(state,), cpus_allocated=cpus, gpus_allocated=gpus)
    return dataclasses.replace(snapshot, nodes=(busy,), jobs=tuple(found))


def _job(job: LocalJob, task: Task, node: str) -> Job | None:
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


def _names(nodes: int) -> tuple[str, ...]:
    return (socket.gethostname(),) if nodes == 1 else tuple(f"local{i}" for i in range(nodes))


def foreground_environment(layout: Layout, name: str) -> dict[str, str]:
    """What a command in the foreground is told of its job, as the local executor tells those that it queues."""
    per_node = layout.tasks_per_node or -(-layout.tasks // layout.nodes)
    return {
        "HEADRACE_JOB_ID": f"local-{os.getpid()}",
        "HEADRACE_JOB_NAME": name,
        "HEADRACE_JOB_NODES": ",".join(_names(layout.nodes)),
        "HEADRACE_JOB_NODE_INDEX": "0",
        "HEADRACE_JOB_GPUS_PER_NODE": str(layout.gpus_per_node or -(-layout.gpus // layout.nodes)),
        "HEADRACE_JOB_TASKS_PER_NODE": str(per_node),
        "HEADRACE_JOB_CPUS_PER_TASK": str(layout.cpus_per_task or 1),
        "HEADRACE_JOB_CPUS_PER_NODE": str((layout.cpus_per_task or 1) * per_node),
        "HEADRACE_JOB_RESTARTS": "0",
        "HEADRACE_JOB_REQUEUE": "0",
        "HEADRACE_JOB_DIRECTORY": str(Path.cwd()),
    }
