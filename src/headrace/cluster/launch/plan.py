"""LaunchPlan: which nodes run how many ranks on which GPUs: what is asked, laid out on what the job has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import LaunchError

if TYPE_CHECKING:
    from headrace.cluster.launch.options import LaunchOptions
    from headrace.cluster.place import JobPlace

__all__ = ["LaunchPlan", "lay_out"]

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
