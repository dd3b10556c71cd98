"""DLFS's figure of many nodes: every node exports its share and reads from all of them.

Simulated: each node is a network namespace on one bridge, with a target and a reader in two
processes. All share this machine's cores, so that the sum cannot grow with the nodes: what shows is
what more connections and more targets cost.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.fabric_parts.ends import Case, Fabric, Seen
from benchmarks.fabric_parts.network import bridged

if TYPE_CHECKING:
    from pathlib import Path

LABEL = "simulated nodes: namespaces on one machine"


@dataclass(frozen=True, slots=True)
class Sum:
    """All nodes together."""

    nodes: int
    gb_per_s: float
    reads_per_s: float
    cpu_s_per_gb: float


def aggregate(files: list[Path], nodes: int, block: int, seconds: float) -> Sum:
    """What `nodes` readers bring together when each reads from all `nodes` targets."""
    with contextlib.ExitStack() as stack:
        networks = stack.enter_context(bridged(nodes))
        fabrics = [
            stack.enter_context(Fabric(network, [files[i % len(files)]]))
            for i, network in enumerate(networks)
        ]
        urls = [url for fabric in fabrics for url in fabric.urls]
        case = Case(urls=urls, block_bytes=block, depth=32, queues=1, digests=True, seconds=seconds)
        seen: dict[int, Seen] = {}

        def run(number: int) -> None:
            seen[number] = fabrics[number].run(case)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(nodes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    count = sum(each.bytes for each in seen.values())
    cpu_s = sum(each.client_cpu_s + each.server_cpu_s for each in seen.values())
    return Sum(
        nodes=nodes,
        gb_per_s=sum(each.gb_per_s for each in seen.values()),
        reads_per_s=sum(each.reads_per_s for each in seen.values()),
        cpu_s_per_gb=cpu_s / (count / 1e9),
    )
