"""This machine as a cluster of one node: what a request is laid out on where there is no Slurm."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path

from headrace.cluster.snapshot import ClusterSnapshot, Node, Partition

__all__ = ["local_snapshot"]

_DEVICE = re.compile(r"nvidia\d+")


def local_snapshot(gpus_least: int = 0) -> ClusterSnapshot:
    """One partition, `local`, with one node: this process's CPUs, the machine's memory and its GPUs.

    Args:
        gpus_least: on a machine without GPUs, say that it has so many: what a cluster would give GPUs are
            processes here, so that a job can be tried on a laptop.
    """
    cpus = len(os.sched_getaffinity(0))
    memory_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    name = platform.node().partition(".")[0] or "localhost"
    gpus = sum(_DEVICE.fullmatch(path.name) is not None for path in Path("/dev").glob("nvidia*"))
    node = Node(
        name=name, states=("idle",), cpus=cpus if gpus else max(cpus, gpus_least), sockets=1,
        cores_per_socket=cpus,
        threads_per_core=1, memory_mib=memory_mib, gpus=gpus or gpus_least, partitions=("local",),
        architecture=platform.machine(),
    )  # fmt: skip
    partition = Partition("local", (name,), is_default=True)
    return ClusterSnapshot("local", "", time.time(), (node,), (partition,), ())
