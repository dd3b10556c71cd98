"""Settings: variables that ranks get so that they neither crowd each other nor look for the wrong network.

Each has its reason, `headrace launch --dry-run` prints both, and what the user has set stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.launch.plan import LaunchPlan

__all__ = ["Setting", "settings_for"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable.

    Attributes:
        name: of the variable.
        value: it gets; what the user has set where `kept`.
        reason: why.
        kept: the user has set it: it stays.
    """

    name: str
    value: str
    reason: str
    kept: bool = False


def settings_for(
    plan: LaunchPlan, framework: str, interface: str | None, environment: Mapping[str, str]
) -> tuple[Setting, ...]:
    """What the ranks of one node get.

    Args:
        plan: the layout.
        framework: of the ranks.
        interface: the network interface that the other nodes reach this one by; None: not known.
        environment: of the user.
    """
    wanted = [*_threads(plan, framework), *_network(plan, framework, interface)]
    wanted.append(("PYTHONUNBUFFERED", "1", "what a rank prints is in the log when it happens"))
    return tuple(
        Setting(name, environment[name], reason, kept=True)
        if name in environment
        else Setting(name, value, reason)
        for name, value, reason in wanted
    )


def _threads(plan: LaunchPlan, framework: str) -> list[tuple[str, str, str]]:
    cpus = str(plan.cpus_per_rank)
    shared = f"{plan.ranks_per_node} ranks on a node: its CPUs, shared out evenly"
    if framework == "tensorflow":
        return [("TF_NUM_INTRAOP_THREADS", cpus, shared), ("OMP_NUM_THREADS", cpus, shared)]
    return [("OMP_NUM_THREADS", cpus, shared)]


def _network(plan: LaunchPlan, framework: str, interface: str | None) -> list[tuple[str, str, str]]:
    if framework == "mpi":
        return []
    out = []
    if interface is not None:
        reason = (
            "the interface by which the nodes reach each other; a host's name may stand for another one"
            if len(plan.nodes) > 1
            else "one node: no other interface is needed"
        )
        if framework in ("torch", "plain"):
            out.append(("GLOO_SOCKET_IFNAME", interface, reason))
        if plan.gpus_per_node and len(plan.nodes) > 1:
            # "=": this one exactly; InfiniBand is found by NCCL itself, this is for its bootstrap.
            out.append(("NCCL_SOCKET_IFNAME", f"={interface}", reason))
    if plan.gpus_per_node and framework in ("torch", "plain", "jax"):
        out.append(("NCCL_DEBUG", "WARN", "a failing network says so in the job's log"))
    if plan.gpus_per_node and framework == "torch":
        out.append(
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a rank whose peer is gone ends instead of waiting")
        )  # fmt: skip
    return out
