"""Place: which of a job's nodes this is, from arguments or from what started the process.

Unlike a rank (`headrace.config.place_in_job`) it counts nodes. Launchers that number nodes themselves
(torchrun, Slurm) are believed. MPI numbers ranks only: with one process a node, or ranks that fill node
after node, the node follows; any other mapping is refused rather than guessed. (Open MPI's
OMPI_COMM_WORLD_NODE_RANK is a process's rank on its node, not the node's.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NodePlace", "is_first_on_node", "job_id", "node_place"]

_COUNTED = (
    ("HEADRACE_NODE_RANK", "HEADRACE_NODES"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),  # torchrun
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
)
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip
_LOCAL_RANKS = (
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID",
)  # fmt: skip
_JOB_IDS = ("HEADRACE_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node among a job's nodes."""

    rank: int
    nodes: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.nodes:
            raise ValueError(f"node rank is {self.rank}, expected 0 to {self.nodes - 1}")


def node_place(
    rank: int | None = None,
    nodes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> NodePlace | None:
    """This node's place: as given, else as the launcher says; None where nobody says.

    Args:
        rank: given with `nodes`, or not at all.
        nodes: how many there are.
        environment: defaults to `os.environ`.

    Raises:
        ValueError: only one of the two is given, or the environment contradicts itself, or is of an MPI
            whose ranks do not fill node after node.
    """
    if rank is not None and nodes is not None:
        return NodePlace(rank, nodes)
    if nodes == 1:
        return NodePlace(0, 1)
    if rank is not None:
        raise ValueError(
            f"node rank is {rank}, but how many nodes there are is not given (--nodes)"
        )
    environment = os.environ if environment is None else environment
    found = _counted(environment) or _of_mpi(environment)
    if found is not None and nodes is not None and found.nodes != nodes:
        raise ValueError(
            f"{nodes} nodes are given, but the launcher says {found.nodes}: pass the node rank too"
        )
    if found is None and nodes is not None:
        raise ValueError(f"{nodes} nodes are given, but not which of them this is (--node-rank)")
    return found


def is_first_on_node(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is the first of its launcher's on this node, or the only one."""
    environment = os.environ if environment is None else environment
    said = next((environment[name] for name in _LOCAL_RANKS if name in environment), "0")
    return said == "0"


def job_id(environment: Mapping[str, str] | None = None) -> str | None:
    """What the scheduler calls this job, where there is one."""
    environment = os.environ if environment is None else environment
    ids = (environment.get(name) for name in _JOB_IDS)
    # torchrun's default of a single node names no job.
    return next((found for found in ids if found and found != "none"), None)


def _counted(environment: Mapping[str, str]) -> NodePlace | None:
    for rank_name, nodes_name in _COUNTED:
        if rank_name in environment and nodes_name in environment:
            rank, nodes = environment[rank_name], environment[nodes_name]
            if not (rank.isdigit() and nodes.isdigit() and int(rank) < int(nodes)):
                raise ValueError(
                    f"{rank_name}={rank!r} and {nodes_name}={nodes!r} are not a node's rank and the "
                    "number of nodes; pass --node-rank and --nodes"
                )
            return NodePlace(int(rank), int(nodes))
    return None


def _of_mpi(environment: Mapping[str, str]) -> NodePlace | None:
    for names in _MPI:
        if not all(environment.get(name, "").isdigit() for name in names):
            continue
        rank, size, local_rank, local_size = (int(environment[name]) for name in names)
        if local_size < 1 or size % local_size or rank % local_size != local_rank:
            raise ValueError(
                f"{names[0]}={rank}, {names[2]}={local_rank} and {names[3]}={local_size}: the ranks do "
                "not fill node after node, so the node's rank cannot be told; pass --node-rank and "
                "--nodes"
            )
        return NodePlace(rank // local_size, size // local_size)
    return None
