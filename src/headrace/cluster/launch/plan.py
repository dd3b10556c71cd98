"""Plan: which nodes run how many ranks on which GPUs: what is asked, laid out on what the job has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from headrace.errors import LaunchError

if TYPE_CHECKING:
    from headrace.cluster.launch.place import JobPlace


# -- what was asked ------------------------------------------------------------------------------------

Framework = Literal["torch", "tensorflow", "jax", "mpi", "plain"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


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


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The layout."""

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
    ranks = options.ranks_per_node
    if ranks is None:
        drives_all = options.framework in ("tensorflow", "jax")
        ranks = 1 if drives_all else gpus or place.tasks_per_node or 1
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
