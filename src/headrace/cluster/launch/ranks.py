"""Ranks: the commands and variables by which each framework's processes find each other.

Everything here is a plain function of the layout: `headrace launch --dry-run` prints what it returns.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.launch import rank_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.launch.plan import LaunchPlan

__all__ = ["NodeCommands", "NodeFacts", "commands_for", "program_of"]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node has said of itself.

    Attributes:
        name: of the node.
        address: by which the others reach it.
        ports: free ones, one for each of its ranks and one more.
    """

    name: str
    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeCommands:
    """What one node runs.

    Attributes:
        commands: the processes to start; none where another node starts them (mpirun).
        environments: of each, on top of what is common.
        per_rank: each command is one rank; else one command starts all of the node's.
    """

    commands: tuple[tuple[str, ...], ...]
    environments: tuple[Mapping[str, str], ...] = field(default=())
    per_rank: bool = True

    def text(self) -> str:
        """As one would type it."""
        lines = []
        for command, environment in zip(self.commands, self.environments, strict=True):
            words = [f"{k}={shlex.quote(v)}" for k, v in environment.items()]
            lines.append(" ".join([*words, shlex.join(command)]))
        return "\n".join(lines)


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command that the user's words mean: `train.py ARGS`, `-m module ARGS` or any program."""
    if not words:
        raise ValueError("nothing to launch: name a script, -m MODULE or a program")
    if words[0] == "-m" or words[0].endswith(".py"):
        return (sys.executable, *words)
    return tuple(words)


def commands_for(  # noqa: PLR0917 - who, where, and what
    framework: str,
    node: int,
    plan: LaunchPlan,
    facts: Sequence[NodeFacts],
    program: Sequence[str],
    common: Mapping[str, str] | None = None,
) -> NodeCommands:
    """What node `node` starts.

    Args:
        framework: see `headrace.cluster.launch.options.FRAMEWORKS`.
        node: its index.
        plan: the layout.
        facts: of all nodes.
        program: as `program_of` gives it.
        common: variables of all ranks (mpirun must be told which to hand on).
    """
    if framework == "torch":
        return _torchrun(node, plan, facts, program)
    if framework == "mpi":
        return _mpirun(node, plan, facts, program, common or {})
    environments = []
    for local in range(plan.ranks_per_node):
        rank = node * plan.ranks_per_node + local
        environment = _rank_variables(rank, local, node, plan, facts)
        if framework == "jax":
            environment |= _jax(rank, local, plan, facts)
        if framework == "tensorflow":
            environment |= _tensorflow(rank, plan, facts)
        environments.append(environment)
    started = (sys.executable, "-I", "-S", rank_start.__file__, *program)
    return NodeCommands((started,) * plan.ranks_per_node, tuple(environments))


def _torchrun(
    node: int, plan: LaunchPlan, facts: Sequence[NodeFacts], program: Sequence[str]
) -> NodeCommands:
    """One torchrun on each node. Static rendezvous: who is there is known, nothing needs to be found out."""
    command = (
        sys.executable, "-m", "torch.distributed.run",
        f"--nnodes={len(plan.nodes)}", f"--node-rank={node}",
        f"--nproc-per-node={plan.ranks_per_node}",
        "--rdzv-backend=static",
        f"--master-addr={facts[0].address}", f"--master-port={facts[0].ports[0]}",
        "--max-restarts=0",  # a rank that fails ends the job; the scheduler starts it again
        "--no-python", sys.executable, "-I", "-S", rank_start.__file__, *program,
    )  # fmt: skip
    return NodeCommands((command,), ({},), per_rank=False)


def _rank_variables(
    rank: int, local: int, node: int, plan: LaunchPlan, facts: Sequence[NodeFacts]
) -> dict[str, str]:
    """Under torchrun's names, which most programs know."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(plan.ranks),
        "LOCAL_WORLD_SIZE": str(plan.ranks_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(plan.nodes)),
        "MASTER_ADDR": facts[0].address,
        "MASTER_PORT": str(facts[0].ports[0]),
    }


def _jax(rank: int, local: int, plan: LaunchPlan, facts: Sequence[NodeFacts]) -> dict[str, str]:
    out = {
        "JAX_COORDINATOR_ADDRESS": f"{facts[0].address}:{facts[0].ports[0]}",
        "JAX_NUM_PROCESSES": str(plan.ranks),
        "JAX_PROCESS_ID": str(rank),
    }
    if plan.ranks_per_node > 1 and plan.gpus_per_node:
        each = max(1, plan.gpus_per_node // plan.ranks_per_node)
        first = local * each % plan.gpus_per_node
        out["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(d) for d in range(first, first + each))
    return out


def _tensorflow(rank: int, plan: LaunchPlan, facts: Sequence[NodeFacts]) -> dict[str, str]:
    """MultiWorkerMirroredStrategy: every rank is a worker with a port of its own."""
    workers = [
        f"{node.address}:{port}"
        for node in facts
        for port in node.ports[1 : plan.ranks_per_node + 1]
    ]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    return {"TF_CONFIG": json.dumps(cluster)}


def _mpirun(
    node: int,
    plan: LaunchPlan,
    facts: Sequence[NodeFacts],
    program: Sequence[str],
    common: Mapping[str, str],
) -> NodeCommands:
    """One mpirun, on the first node; by srun or ssh it starts its own daemons on the others."""
    if node:
        return NodeCommands(())
    kind = _mpi_kind()
    names = [f.name for f in facts]
    n = str(plan.ranks)
    if kind == "openmpi":
        hosts = ",".join(f"{name}:{plan.ranks_per_node}" for name in names)
        handed = [word for name in common for word in ("-x", name)]
        # Oversubscribed: of an allocation it counts the step that it runs in, a task on each node.
        command = [
            "mpirun", "-np", n, "--host", hosts, "--map-by", f"ppr:{plan.ranks_per_node}:node:OVERSUBSCRIBE",
            "--bind-to", "none", *handed,
        ]  # fmt: skip
    else:  # MPICH and Intel MPI: Hydra
        command = [
            "mpirun", "-n", n, "-ppn", str(plan.ranks_per_node), "-hosts", ",".join(names),
            "-genvlist", ",".join(common),
        ]  # fmt: skip
    if os.geteuid() == 0 and kind == "openmpi":
        command.append("--allow-run-as-root")
    return NodeCommands(((*command, *program),), ({},), per_rank=False)


def _mpi_kind() -> str:
    """Which MPI `mpirun` belongs to, by where it lies and what lies beside it."""
    import shutil

    found = shutil.which("mpirun")
    if found is None:
        return "openmpi"
    beside = Path(found).resolve()
    hydra = beside.name.startswith("mpiexec.hydra") or (beside.parent / "mpiexec.hydra").exists()
    return "hydra" if hydra else "openmpi"
