"""LaunchOptions: what `headrace launch` was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FRAMEWORKS", "Framework", "LaunchOptions"]

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
