"""Fit: which of a cluster's nodes a job could have, and how its GPUs lie on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.cluster.request import Request
    from headrace.cluster.site import Site
    from headrace.cluster.snapshot import Node

__all__ = ["ARCHITECTURES", "Fit", "eligible", "fit_gpus", "fit_nodes", "is_away", "most_gpus"]

ARCHITECTURES: Final = {
    "x86": "x86_64", "x86_64": "x86_64", "amd64": "x86_64", "arm": "aarch64", "arm64": "aarch64",
    "aarch64": "aarch64", "ppc64le": "ppc64le", "power": "ppc64le",
}  # fmt: skip
"""HAL's words for kinds of nodes, and others', as nodes report them."""

_AWAY: Final = frozenset({
    "down", "drain", "drained", "draining", "fail", "failing", "error", "future", "maint",
    "powered_down", "powering_down", "reboot", "unknown", "not_responding", "no_respond",
    "invalid_reg",
})  # fmt: skip
_FEATURES = re.compile(r"[\w.+-]+(?:[&,][\w.+-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a job lies on nodes.

    Attributes:
        count: of nodes.
        gpus_per_node: on each; where `even` is false, at most.
        even: all nodes have as many.
        gpu_type: of all of them; "" if they have no type.
        nodes: all that could be taken, `count` or more.
    """

    count: int
    gpus_per_node: int
    even: bool
    gpu_type: str
    nodes: tuple[Node, ...]


def is_away(node: Node) -> bool:
    """Whether it takes no job now."""
    return any(state.rstrip("*~#!%$@^-+") in _AWAY for state in node.states)


def eligible(nodes: Sequence[Node], request: Request, site: Site) -> list[Node]:
    """The nodes that have what is asked for, apart from sizes."""
    found = [node for node in nodes if "future" not in node.states]
    if request.gpu_type:
        found = [n for n in found if n.gpu_type.lower() == request.gpu_type.lower()]
    features = request.constraint
    if request.node_type in site.node_types:
        features = ",".join(filter(None, (features, site.node_types[request.node_type].constraint)))
    elif request.node_type:
        kind = ARCHITECTURES.get(request.node_type.lower(), "?")
        found = [n for n in found if n.architecture == kind or request.node_type in n.features]
    if _FEATURES.fullmatch(features):
        # Anything else ("[a|b]", "a*2") is for Slurm to judge.
        wanted = set(re.split("[&,]", features))
        found = [n for n in found if wanted <= set(n.features)]
    return found


def fit_gpus(
    nodes: Sequence[Node], gpus: int, count: int | None = None, count_max: int | None = None
) -> Fit | None:
    """GPUs on as few nodes as can hold them, or on `count`; None: there are not so many.

    Where nodes have GPUs of several types, one is chosen: the one that needs the fewest nodes, and of these
    the one of which most nodes are free.
    """
    best: tuple[tuple[int, int], Fit] | None = None
    for gpu_type in sorted({node.gpu_type for node in nodes if node.gpus}):
        same = [node for node in nodes if node.gpus and node.gpu_type == gpu_type]
        having = _having(same)
        most = min(gpus, len(same), count_max or gpus)
        for k in [count] if count else range(-(-gpus // (len(having) - 2)), most + 1):
            per_node = -(-gpus // k)
            if k > most or having[min(per_node, len(having) - 1)] < k:
                continue
            able = tuple(n for n in same if n.gpus >= per_node)
            free = sum(not n.gpus_allocated and not is_away(n) for n in able)
            fit = Fit(k, per_node, gpus % k == 0, gpu_type, able)
            if best is None or (k, -free) < best[0]:
                best = (k, -free), fit
            break
    return best[1] if best else None


def _having(nodes: Sequence[Node]) -> list[int]:
    """At `g`: how many nodes have `g` GPUs or more. The last entry is 0."""
    most = max((node.gpus for node in nodes), default=0)
    having = [0] * (most + 2)
    for node in nodes:
        having[node.gpus] += 1
    for g in range(most, -1, -1):
        having[g] += having[g + 1]
    return having


def most_gpus(
    nodes: Sequence[Node], below: int, count: int | None = None, count_max: int | None = None
) -> int:
    """The most GPUs, fewer than `below`, that one job can have; 0: none."""
    limit = count or count_max or len(nodes)
    top = 0
    for gpu_type in {node.gpu_type for node in nodes}:
        sizes = sorted((n.gpus for n in nodes if n.gpu_type == gpu_type), reverse=True)[:limit]
        top = max(top, sum(sizes))
    for gpus in range(min(top, below - 1), 0, -1):
        if fit_gpus(nodes, gpus, count, count_max) is not None:
            return gpus
    return 0


def fit_nodes(nodes: Sequence[Node], count: int) -> Fit | None:
    """Nodes without regard to GPUs: those without any where there are enough of them."""
    plain = [node for node in nodes if not node.gpus]
    able = plain if len(plain) >= count else list(nodes)
    return Fit(count, 0, True, "", tuple(able)) if len(able) >= count else None
