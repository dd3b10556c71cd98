"""LaunchPlan: which nodes run how many ranks on which GPUs: what is asked, laid out on what the job has.

What the job has is read from the environment alone: Slurm says it in SLURM_* variables, the local executor in
HEADRACE_JOB_*; without either the job is this machine. How much time is left is asked where it matters
(`scheduler`), by the scheduler's clock and not by this node's.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.cluster.notation import expand_hosts, expand_indices
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping


# -- what the job has ----------------------------------------------------------------------------------


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
        return cls(
            scheduler="none", job_id="", nodes=(socket.gethostname(),),
            gpus_per_node=_gpu_count(given, machine_gpus()), cpus_per_node=len(os.sched_getaffinity(0)),
        )  # fmt: skip


GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_INSIDE = "Start `headrace launch` once, in the batch script or a shell of the allocation."


def _of_slurm(given: Mapping[str, str]) -> JobPlace:
    nodes = _names(given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST") or "")
    if not nodes:
        raise LaunchError(
            f"SLURM_JOB_ID is {given['SLURM_JOB_ID']!r}, but SLURM_JOB_NODELIST names no nodes.",
            next_step=_INSIDE,
        )
    node_count = _number(given, "SLURM_JOB_NUM_NODES")
    if node_count is not None and node_count != len(nodes):
        raise LaunchError(
            f"SLURM_JOB_NODELIST={given.get('SLURM_JOB_NODELIST')!r} names {len(nodes)} nodes, "
            f"SLURM_JOB_NUM_NODES says {node_count}.",
            next_step="One of them was changed in the script; Slurm sets both.",
        )
    gpus = _number(given, "SLURM_GPUS_ON_NODE")
    if gpus is None:
        listed = given.get("SLURM_STEP_GPUS") or given.get("SLURM_JOB_GPUS")
        gpus = _count(listed) if listed else _gpu_count(given)
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
        gpus_per_node=_gpu_count(given) if gpus is None else gpus,
        tasks_per_node=_number(given, "HEADRACE_JOB_TASKS_PER_NODE"),
        cpus_per_node=_number(given, "HEADRACE_JOB_CPUS_PER_NODE") or len(os.sched_getaffinity(0)),
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
    counts = re.findall(r"(?:^|,)(\d+)", given.get(name, ""))
    return min(map(int, counts), default=None)


def _count(indices: str) -> int:
    try:
        return len(expand_indices(indices))
    except ValueError as e:
        raise LaunchError(f"The job's GPUs cannot be understood: {e}.") from e


def _gpu_count(given: Mapping[str, str], default: int = 0) -> int:
    visible = visible_gpus(given)
    return default if visible is None else len(visible[1])


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    """The variable that says which GPUs a process sees, and what it names; None where none says."""
    for name in GPU_VARIABLES:
        if name in environment:
            gpus = tuple(w.strip() for w in environment[name].split(",") if w.strip())
            return name, gpus[: gpus.index("-1")] if "-1" in gpus else gpus
    return None


def machine_gpus() -> int:
    """How many GPUs NVIDIA's driver shows on this machine."""
    return sum(re.fullmatch(r"nvidia\d+", p.name) is not None for p in Path("/dev").glob("nvidia*"))


# -- what was asked ------------------------------------------------------------------------------------

Framework = Literal["torch", "tensorflow", "jax", "mpi", "plain"]
FRAMEWORKS: tuple[Framework, ...] = ("torch", "tensorflow", "jax", "mpi", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How a program is launched."""

    framework: Framework = "torch"
    """What its ranks expect of their environment, and who starts them."""

    nodes: tuple[int, int] | None = None
    """The fewest and the most nodes that take part; None: all, and a job that loses one is requeued."""

    gpus: int | None = None
    """GPUs in all; None: all that the job has."""

    ranks_per_node: int | None = None
    """Processes on each node; None: one for each GPU, or as many tasks as were asked for. One with
    TensorFlow and JAX, whose processes drive several GPUs each."""

    stage: tuple[str, ...] = ()
    """What is copied onto the nodes' local disks: a source as `headrace stage` takes it."""

    local: str | None = None
    """A folder on each node's local disk; None: $SLURM_TMPDIR, $TMPDIR or /tmp."""

    meet: str | None = None
    """A folder that all nodes see; None: one in the current folder, removed at the end."""

    replicas: int = 1
    """Nodes that hold each staged sample: with 2 a lost node's share is still near."""

    daemon: bool = True
    """Start a node daemon on each node, for loaders with `plane="node"`."""

    agent: bool = True
    """Start the telemetry agent on each node, where there is one."""

    stop_before_s: float = 120.0
    """How long before the job's time limit ranks are asked to save and leave."""

    grace_s: float = 25.0
    """How long they have, once asked. Slurm's KillWait is 30 s by default."""

    connect_s: float = 120.0
    """How long to wait for the nodes."""

    stage_s: float = 600.0
    """How long to wait until staging has begun on all nodes (its copying goes on meanwhile)."""

    silence_s: float = 30.0
    """A node that says nothing for so long is lost."""

    requeue: bool = True
    """Ask the scheduler to start the job again when its ranks were stopped for a signal or the limit."""

    manifest: str | None = None
    """Where the run's manifest goes; None: headrace-runs/JOB-RESTARTS.json."""

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            raise ValueError(f"framework is {self.framework!r}, expected one of {FRAMEWORKS}")
        for name in ("gpus", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        if self.gpus is not None and self.ranks_per_node is not None and self.framework == "torch":
            raise ValueError("gpus and ranks_per_node are given: torch has one rank for each GPU")
        if self.nodes is not None and not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ValueError(
                f"nodes is {self.nodes[0]}-{self.nodes[1]}, expected MIN-MAX, MIN from 1 to MAX"
            )
        if self.nodes is not None and self.gpus is not None:
            raise ValueError("gpus and nodes are given: GPUs in all depend on the number of nodes")
        if self.replicas not in (1, 2):
            raise ValueError(f"replicas is {self.replicas}, expected 1 or 2")
        for name in ("stop_before_s", "grace_s", "connect_s", "stage_s", "silence_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")


# -- the layout ----------------------------------------------------------------------------------------

_ONE_PROCESS = ("tensorflow", "jax")
"""Frameworks whose process drives all GPUs of its node."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The layout.

    Attributes:
        nodes: that take part, in the order of their indices.
        ranks_per_node: on each.
        gpus_per_node: on each; 0: none.
        cpus_per_rank: for its threads.
        remarks: what was decided that one might not expect.
    """

    nodes: tuple[str, ...]
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """In all."""
        return len(self.nodes) * self.ranks_per_node


def lay_out(place: JobPlace, options: LaunchOptions) -> LaunchPlan:
    """What runs where.

    Raises:
        LaunchError: the job has not what is asked; says the nearest that it has.
    """
    if place.index != 0:
        raise LaunchError(
            f"This is node {place.index} of {len(place.nodes)}, expected the first one.",
            next_step="Start `headrace launch` once, in the batch script, and not by srun: it starts "
            "one launcher on each node itself.",
        )
    nodes, gpus, remarks = _gpus(place, options)
    ranks = _ranks(place, options, gpus)
    cpus = max(1, place.cpus_per_node // ranks)
    if place.cpus_per_node < ranks:
        remarks += (
            f"{ranks} ranks share the {place.cpus_per_node} CPUs of each node: they will be slow.",
        )
    if gpus and ranks > gpus:
        remarks += (f"{ranks} ranks share the {gpus} GPUs of each node.",)
    return LaunchPlan(nodes, ranks, gpus, cpus, remarks)


def _gpus(place: JobPlace, options: LaunchOptions) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """The nodes that take part, GPUs on each, and remarks."""
    each, nodes = place.gpus_per_node, place.nodes
    wanted = options.gpus
    if options.nodes is not None:
        least, most = options.nodes
        if len(nodes) < least:
            raise LaunchError(
                f"{least} nodes at least are asked for, {len(nodes)} are there: {', '.join(nodes)}.",
                next_step="Submit the job with more nodes, or allow fewer: --nodes MIN-MAX.",
            )
        nodes = nodes[:most]
    if wanted is None:
        return nodes, each, ()
    have = each * len(nodes)
    if wanted > have:
        raise LaunchError(
            f"{wanted} GPUs are asked for, the job has {have}: {len(nodes)} nodes with {each} each.",
            next_step=f"Ask for {have} or fewer (--gpus), or submit the job with more."
            if have
            else "Submit the job with GPUs (--gres=gpu:N or --gpus-per-node=N), or leave --gpus out.",
        )
    for count in range(1, len(nodes) + 1):
        if wanted % count == 0 and wanted // count <= each:
            remark = (
                f"{count} of the job's {len(nodes)} nodes take part: {wanted} GPUs are asked for."
            )
            return nodes[:count], wanted // count, (remark,) if count < len(nodes) else ()
    fits = [
        n for n in range(1, have + 1)
        if any(n % c == 0 and n // c <= each for c in range(1, len(nodes) + 1))
    ]  # fmt: skip
    near = sorted(sorted(fits, key=lambda n: abs(n - wanted))[:2])
    raise LaunchError(
        f"{wanted} GPUs cannot be spread evenly over {len(nodes)} nodes with {each} each.",
        next_step=f"Ask for {' or '.join(map(str, near))}: --gpus.",
    )


def _ranks(place: JobPlace, options: LaunchOptions, gpus: int) -> int:
    if options.ranks_per_node is not None:
        return options.ranks_per_node
    if options.framework in _ONE_PROCESS:
        return 1
    return gpus or place.tasks_per_node or 1
