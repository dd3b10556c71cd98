"""Snapshot: a cluster's nodes, partitions and jobs at one moment, and the file that holds one.

A file is JSON with a checksum, to look at later, elsewhere, or in a test. Types are checked, and it is read
fast: 50,000 jobs in a fifth of a second. Files need msgspec (`headrace[cluster]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.base.documents import seal, unseal
from headrace.base.files import replace_file
from headrace.cluster.executor import JobState  # noqa: TC001 - what reads a snapshot looks at its types
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        states: lower case, the base state first ("idle", "mixed", "allocated", "down"), then flags ("drain").
        cpus, sockets, cores_per_socket, threads_per_core: what the scheduler counts with.
        cpu_load: the one-minute load average; None if unknown.
        memory_mib, memory_allocated_mib, memory_free_mib: free is what the system says; None if unknown.
        gpu_type: as in GRES ("h100"); "" if there are none, or they have no type.
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
class ClusterJob:
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
    jobs: tuple[ClusterJob, ...]


# -- files ---------------------------------------------------------------------------------------------

FORMAT: Final = "headrace-cluster-snapshot-2"
_UNCHECKED: Final = "headrace-cluster-snapshot-1"
"""Of before snapshots had a checksum."""
_WRITE_ONE: Final = "Write one with `headrace cluster queue --save FILE`."


@dataclass(frozen=True, slots=True)
class _File:
    format: str
    snapshot: ClusterSnapshot


@dataclass(frozen=True, slots=True)
class _Head:
    format: str = ""


def save_snapshot(snapshot: ClusterSnapshot, path: Path) -> None:
    """Write a snapshot; the file is the old one or the new one, nothing between."""
    try:
        replace_file(path, snapshot_to_json(snapshot), sync=False)
    except OSError as e:
        raise ClusterError(f"{path}: {e.strerror}.", path=str(path)) from e


def load_snapshot(path: Path) -> ClusterSnapshot:
    """Read a snapshot."""
    try:
        return snapshot_from_json(path.read_bytes(), str(path))
    except OSError as e:
        raise ClusterError(f"{path}: {e.strerror}.", path=str(path)) from e


def snapshot_to_json(snapshot: ClusterSnapshot) -> bytes:
    """As text."""
    text: bytes = _msgspec().json.encode(_File(FORMAT, snapshot))
    return seal(text)


def snapshot_from_json(data: bytes, name: str = "the snapshot") -> ClusterSnapshot:
    """From text; `name` is for messages."""
    msgspec = _msgspec()
    sums = unseal(data)
    if sums is not None and sums[0] != sums[1]:
        raise ClusterError(
            f"{name}: the snapshot is damaged: its checksum is {sums[0]}, expected {sums[1]}.",
            path=name,
            next_step=_WRITE_ONE,
        )
    expected = FORMAT if sums is not None else _UNCHECKED
    try:
        content: _File = msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as e:
        _refuse_format(data, name, expected)
        raise ClusterError(f"{name}: {e}.", path=name) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ClusterError(f"{name}: it is no JSON: {e}.", path=name) from e
    if content.format != expected:
        _refuse_format(data, name, expected)
    return content.snapshot


def _refuse_format(data: bytes, name: str, expected: str) -> None:
    msgspec = _msgspec()
    try:
        written = msgspec.json.decode(data, type=_Head).format
    except msgspec.ValidationError:
        written = ""
    if written == FORMAT != expected:
        raise ClusterError(
            f"{name}: the snapshot's checksum is missing or damaged.",
            path=name,
            next_step=_WRITE_ONE,
        )
    if written != expected:
        raise ClusterError(
            f"{name}: format is {written!r}, expected {FORMAT!r}.", path=name, next_step=_WRITE_ONE
        )


def _msgspec() -> ModuleType:
    try:
        import msgspec.json
    except ModuleNotFoundError as e:
        raise ClusterError(
            "snapshot files need msgspec.", next_step="pip install 'headrace[cluster]'"
        ) from e
    return msgspec
