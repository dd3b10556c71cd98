"""JobPlace: what this process's job has: nodes, GPUs, CPUs, restarts; read from the environment alone.

Slurm says it in SLURM_* variables, the local executor in HEADRACE_JOB_*; without either the job is this
machine. Nothing is asked over the network here; how much time is left is asked where it matters
(`headrace.cluster.launch.limits`), by the scheduler's clock and not by this node's.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.hostlist import expand_hosts, expand_indices
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["JobPlace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """One node's view of a job.

    Attributes:
        scheduler: `slurm`, `local` (headrace's executor of this machine) or `none`.
        job_id: as the scheduler prints it; of a task of an array, "17_3"; "" without a scheduler.
        name: of the job; "" if it has none.
        nodes: their names, in the order of their indices.
        index: which of them this is.
        gpus_per_node: GPUs of this node that the job may use.
        tasks_per_node: as was asked for; None if it was not.
        cpus_per_node: CPUs of this node that the job may use.
        restarts: how often the job was requeued.
        end_s: when it will be ended, by the scheduler's clock, Unix seconds; None if that is not known.
        can_requeue: whether the scheduler starts it again when asked; None if that is not known.
    """

    scheduler: str
    job_id: str
    nodes: tuple[str, ...]
    name: str = ""
    index: int = 0
    gpus_per_node: int = 0
    tasks_per_node: int | None = None
    cpus_per_node: int = 1
    restarts: int = 0
    end_s: float | None = None
    can_requeue: bool | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise LaunchError("The job has no nodes.")
        if not 0 <= self.index < len(self.nodes):
            raise LaunchError(
                f"This node's index is {self.index}, expected 0 to {len(self.nodes) - 1}: the job has "
                f"{len(self.nodes)} nodes.",
                next_step=_INSIDE,
            )

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> JobPlace:
        """This process's, from its environment.

        Args:
            environment: defaults to `os.environ`.

        Raises:
            LaunchError: the variables contradict each other, or cannot be understood.
        """
        given = os.environ if environment is None else environment
        if "HEADRACE_JOB_NODES" in given:
            return _of_local(given)
        if "SLURM_JOB_ID" in given:
            return _of_slurm(given)
        gpus = _visible_gpus(given)
        return cls(
            scheduler="none", job_id="", nodes=(socket.gethostname(),),
            gpus_per_node=_own_gpus() if gpus is None else gpus, cpus_per_node=_own_cpus(),
        )  # fmt: skip


_INSIDE = "Start `headrace launch` once, in the batch script or a shell of the allocation."


def _of_slurm(given: Mapping[str, str]) -> JobPlace:
    nodes = _names(given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST") or "")
    if not nodes:
        raise LaunchError(
            f"SLURM_JOB_ID is {given['SLURM_JOB_ID']!r}, but SLURM_JOB_NODELIST names no nodes.",
            next_step=_INSIDE,
        )
    said = _number(given, "SLURM_JOB_NUM_NODES")
    if said is not None and said != len(nodes):
        raise LaunchError(
            f"SLURM_JOB_NODELIST={given.get('SLURM_JOB_NODELIST')!r} names {len(nodes)} nodes, "
            f"SLURM_JOB_NUM_NODES says {said}.",
            next_step="One of them was changed in the script; Slurm sets both.",
        )
    gpus = _number(given, "SLURM_GPUS_ON_NODE")
    if gpus is None:
        listed = given.get("SLURM_STEP_GPUS") or given.get("SLURM_JOB_GPUS")
        gpus = _count(listed) if listed else _visible_gpus(given) or 0
    cpus = _least(given, "SLURM_JOB_CPUS_PER_NODE") or _number(given, "SLURM_CPUS_ON_NODE")
    tasks = _number(given, "SLURM_NTASKS_PER_NODE")
    array, task = given.get("SLURM_ARRAY_JOB_ID"), given.get("SLURM_ARRAY_TASK_ID")
    return JobPlace(
        scheduler="slurm",
        job_id=f"{array}_{task}" if array and task else given["SLURM_JOB_ID"],
        name=given.get("SLURM_JOB_NAME", ""),
        nodes=nodes,
        index=_number(given, "SLURM_NODEID") or 0,
        gpus_per_node=gpus,
        tasks_per_node=tasks,
        cpus_per_node=cpus or 1,
        restarts=_number(given, "SLURM_RESTART_COUNT") or 0,
        end_s=_seconds(given, "SLURM_JOB_END_TIME"),
    )


def _of_local(given: Mapping[str, str]) -> JobPlace:
    nodes = _names(given["HEADRACE_JOB_NODES"])
    gpus = _number(given, "HEADRACE_JOB_GPUS_PER_NODE")
    requeue = given.get("HEADRACE_JOB_REQUEUE")
    return JobPlace(
        scheduler="local",
        job_id=given.get("HEADRACE_JOB_ID", ""),
        name=given.get("HEADRACE_JOB_NAME", ""),
        nodes=nodes or (socket.gethostname(),),
        index=_number(given, "HEADRACE_JOB_NODE_INDEX") or 0,
        gpus_per_node=(_visible_gpus(given) or 0) if gpus is None else gpus,
        tasks_per_node=_number(given, "HEADRACE_JOB_TASKS_PER_NODE"),
        cpus_per_node=_number(given, "HEADRACE_JOB_CPUS_PER_NODE") or _own_cpus(),
        restarts=_number(given, "HEADRACE_JOB_RESTARTS") or 0,
        end_s=_seconds(given, "HEADRACE_JOB_END_S"),
        can_requeue=None if requeue is None else requeue == "1",
    )


def _names(text: str) -> tuple[str, ...]:
    try:
        return expand_hosts(text)
    except ValueError as e:
        raise LaunchError(f"The job's list of nodes cannot be understood: {e}.") from e


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None or text == "":
        return None
    if not text.isdigit():
        raise LaunchError(f"{name} is {text!r}, expected a number.", next_step=_INSIDE)
    return int(text)


def _seconds(given: Mapping[str, str], name: str) -> float | None:
    try:
        return float(given[name]) if given.get(name) else None
    except ValueError as e:
        raise LaunchError(f"{name} is {given[name]!r}, expected Unix seconds.") from e


def _least(given: Mapping[str, str], name: str) -> int | None:
    """The smallest number of Slurm's "8(x4),4": what every node has."""
    found = re.findall(r"(?:^|,)(\d+)", given.get(name, ""))
    return min(map(int, found), default=None)


def _count(indices: str) -> int:
    try:
        return len(expand_indices(indices))
    except ValueError as e:
        raise LaunchError(f"The job's GPUs cannot be understood: {e}.") from e


def _visible_gpus(given: Mapping[str, str]) -> int | None:
    """How many CUDA_VISIBLE_DEVICES (or AMD's) lets us see; None where it does not say."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in given:
            words = [w for w in given[name].split(",") if w.strip()]
            return words.index("-1") if "-1" in words else len(words)
    return None


def _own_gpus() -> int:
    """This machine's: NVIDIA's driver lists them; 0 where there is none."""
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _own_cpus() -> int:
    return len(os.sched_getaffinity(0))
