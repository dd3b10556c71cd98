"""Snapshot: a cluster's nodes, partitions and jobs at one moment, however they were read."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cluster.executor import JobState  # noqa: TC001 - what reads a snapshot looks at its types

__all__ = ["Allocation", "ClusterSnapshot", "Job", "Node", "Partition"]


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        states: lower case, the base state first ("idle", "mixed", "allocated", "down"), then flags ("drain").
        reason: why it is drained or down.
        cpus, sockets, cores_per_socket, threads_per_core: what the scheduler counts with.
        cpus_allocated: of these, by jobs.
        cpu_load: the one-minute load average; None if unknown.
        memory_mib, memory_allocated_mib, memory_free_mib: free is what the system says; None if unknown.
        gpu_type: as in GRES ("h100"); "" if there are none, or they have no type.
        gpus: how many there are.
        gpus_allocated: the indices in use.
        features: of the node, as constraints name them.
        architecture: "x86_64", "aarch64", "ppc64le"; "" if unknown.
    """

    name: str
    states: tuple[str, ...]
    cpus: int
    sockets: int
    cores_per_socket: int
    threads_per_core: int
    memory_mib: int
    gpus: int = 0
    gpu_type: str = ""
    gpus_allocated: tuple[int, ...] = ()
    cpus_allocated: int = 0
    cpu_load: float | None = None
    memory_allocated_mib: int = 0
    memory_free_mib: int | None = None
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    reason: str = ""
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition; times in minutes, None where there is no limit."""

    name: str
    nodes: tuple[str, ...]
    is_default: bool = False
    state: str = "up"
    max_minutes: int | None = None
    default_minutes: int | None = None
    max_nodes: int | None = None
    default_memory_per_cpu_mib: int | None = None
    max_memory_per_cpu_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a job has on one node; empty `gpus` with a `gpu_count` where the indices are not known."""

    node: str
    cpus: int
    memory_mib: int
    gpu_count: int = 0
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One job, or task of an array; times in Unix seconds, limits in minutes (None: none)."""

    job_id: str
    name: str
    user: str
    account: str
    partition: str
    state: JobState
    reason: str = ""
    qos: str = ""
    nodes: tuple[str, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    node_count: int = 1
    cpu_count: int = 1
    gpu_count: int = 0
    memory_mib: int = 0
    submitted_s: float | None = None
    started_s: float | None = None
    limit_minutes: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All of it. `taken_s` is Unix seconds by the clock of the machine that read it."""

    cluster: str
    version: str
    taken_s: float
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    jobs: tuple[Job, ...]
