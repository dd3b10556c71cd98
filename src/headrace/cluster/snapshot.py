"""Snapshot: a cluster's nodes, partitions and jobs at one moment; the file that holds one; the queue in it.

A file is JSON with a checksum, to look at later, elsewhere, or in a test. Types are checked, and it is read
fast: 50,000 jobs in a fifth of a second.

The queue says who has which GPUs of which nodes, who waits for what, and until when. It knows no terminal:
`headrace cluster queue` draws what stands there, or prints it as JSON.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.base.documents import seal, unseal
from headrace.base.files import explained, replace_file
from headrace.cluster.executor import ON_NODES, WAITING, JobState
from headrace.cluster.notation import expand_indices
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        states: lower case, the base state first ("idle", "mixed", "allocated", "down"), then flags ("drain").
        cpus: what the scheduler counts with: threads, where `threads_per_core` is above 1.
        cpu_load: the one-minute load average; None if unknown.
        gpu_type: as in GRES ("h100"); "" if there are none, or they have no type.
        gpus_allocated: the indices in use.
        features: of the node, as constraints name them.
        architecture: "x86_64", "aarch64", "ppc64le"; "" if unknown.
    """

    name: str
    states: tuple[str, ...]
    cpus: int
    memory_mib: int
    threads_per_core: int = 1
    gpus: int = 0
    gpu_type: str = ""
    gpus_allocated: tuple[int, ...] = ()
    cpus_allocated: int = 0
    cpu_load: float | None = None
    memory_allocated_mib: int = 0
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
    max_nodes: int | None = None
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


def occupied(nodes: Iterable[Node], jobs: Iterable[ClusterJob]) -> tuple[Node, ...]:
    """Idle nodes of a scheduler that does not say what is in use there, with what jobs hold of them."""
    held: dict[str, list[Allocation]] = defaultdict(list)
    for part in (part for job in jobs for part in job.allocations):
        held[part.node].append(part)
    out = []
    for node in nodes:
        if not (parts := held.get(node.name)):
            out.append(node)
            continue
        cpus = min(node.cpus, sum(part.cpus for part in parts))
        gpus = {index for part in parts for index in part.gpus}
        # Of those whose numbers are not known, any that are left.
        unplaced = sum(part.gpu_count for part in parts) - len(gpus)
        gpus.update([i for i in range(node.gpus) if i not in gpus][: max(0, unplaced)])
        busy = "allocated" if cpus == node.cpus else "mixed"
        states = tuple(busy if state == "idle" else state for state in node.states)
        used = tuple(sorted(gpus))
        out.append(replace(node, states=states, cpus_allocated=cpus, gpus_allocated=used))
    return tuple(out)


# -- files ---------------------------------------------------------------------------------------------

FORMAT: Final = "headrace-cluster-snapshot-2"
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
    with explained(ClusterError, path):
        replace_file(path, snapshot_to_json(snapshot), sync=False)


def load_snapshot(path: Path) -> ClusterSnapshot:
    """Read a snapshot."""
    with explained(ClusterError, path):
        data = path.read_bytes()
    return snapshot_from_json(data, str(path))


def snapshot_to_json(snapshot: ClusterSnapshot) -> bytes:
    """As text."""
    import msgspec  # what submits needs none of it

    text: bytes = msgspec.json.encode(_File(FORMAT, snapshot))
    return seal(text)


def snapshot_from_json(data: bytes, name: str = "the snapshot") -> ClusterSnapshot:
    """From text; `name` is for messages."""
    import msgspec

    sums, written, why = unseal(data), "", ""
    try:
        if sums is not None and sums[0] != sums[1]:
            why = f"the snapshot is damaged: its checksum is {sums[0]}, expected {sums[1]}"
        else:
            with contextlib.suppress(msgspec.ValidationError):
                written = msgspec.json.decode(data, type=_Head).format
            if written != FORMAT:
                why = f"format is {written!r}, expected {FORMAT!r}"
            elif sums is None:
                why = "the snapshot's checksum is missing or damaged"
        if why:
            raise ClusterError(f"{name}: {why}.", path=name, next_step=_WRITE_ONE)
        content: _File = msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as e:
        raise ClusterError(f"{name}: {e}.", path=name) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ClusterError(f"{name}: it is no JSON: {e}.", path=name) from e
    return content.snapshot


# -- the queue -----------------------------------------------------------------------------------------

_AWAY: Final = frozenset({
    "down", "drain", "drained", "draining", "fail", "failing", "error", "future", "maint",
    "powered_down", "powering_down", "reboot", "unknown", "not_responding", "no_respond",
    "invalid_reg",
})  # fmt: skip


def is_away(node: Node) -> bool:
    """Whether it takes no job now."""
    return any(state.rstrip("*~#!%$@^-+") in _AWAY for state in node.states)


_REASONS: Final = {
    "Resources": "first in line: waits until enough is free",
    "Priority": "others are ahead",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job it waits for failed: it will never start",
    "BeginTime": "its time to begin has not come",
    "JobHeldUser": "held by its user: scontrol release",
    "JobHeldAdmin": "held by an administrator",
    "JobArrayTaskLimit": "as many of its array run as it allows",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs",
    "PartitionTimeLimit": "asks for longer than its partition gives: it will never start",
    "PartitionNodeLimit": "asks for more nodes than its partition gives: it will never start",
    "PartitionConfig": "asks for what its partition does not give",
    "BadConstraints": "no node has what it asks for: it will never start",
    "InvalidAccount": "its account does not hold: it will never start",
    "InvalidQOS": "its QoS does not hold: it will never start",
    "NodeDown": "its node is down",
    "FrontEndDown": "the front end is down",
    "Cleaning": "its last run is being cleaned up",
    "Prolog": "its nodes are being made ready",
    "RaisedSignal": "it sent itself a signal before",
    "JobLaunchFailure": "it could not be started; held",
    "SystemFailure": "Slurm, the network or a node failed",
    "": "the scheduler has not looked at it yet",
}  # fmt: skip

_LIMITED: Final = (
    ("QOSMaxJobsPerUser", "as many jobs as its QoS lets a user run"),
    ("QOSMaxGRESPerUser", "as many GPUs as its QoS lets a user have"),
    ("QOSMaxCpuPerUser", "as many CPUs as its QoS lets a user have"),
    ("QOSMax", "more than its QoS lets a job or user have"),
    ("QOSGrp", "all that its QoS has is in use"),
    ("QOSMin", "less than its QoS asks of a job"),
    ("AssocMax", "more than its account lets a job or user have"),
    ("AssocGrp", "all that its account has is in use"),
    ("MaxGRESPerAccount", "as many GPUs as an account may have"),
    ("Max", "more than a limit allows"),
    ("ReqNodeNotAvail", "nodes it asks for are away or reserved"),
)


def _span(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else max(0.0, end_s - begin_s)


class QueueJobRow(NamedTuple):
    """One job, and what is derived when it is looked at: of 50,000 jobs a screen shows forty.

    Attributes:
        stall: the share of its time spent waiting for data, where it is known.
    """

    job: ClusterJob
    now_s: float
    stall: float | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits; else it has nodes."""
        return self.job.state in WAITING

    @property
    def why(self) -> str:
        """Why it waits, in words; "" if it does not."""
        return reason_text(self.job.reason) if self.waits else ""

    @property
    def waited_s(self) -> float | None:
        """Since it was submitted, where it waits."""
        return _span(self.job.submitted_s, self.now_s) if self.waits else None

    @property
    def starts_in_s(self) -> float | None:
        """Until it is expected to begin, where Slurm said so."""
        return _span(self.now_s, self.job.started_s) if self.waits else None

    @property
    def ran_s(self) -> float | None:
        """Since it began, where it runs."""
        return None if self.waits else _span(self.job.started_s, self.now_s)

    @property
    def ends_in_s(self) -> float | None:
        """Until its time is over."""
        ran_s, limit = self.ran_s, self.job.limit_minutes
        return None if ran_s is None or limit is None else limit * 60 - ran_s

    @property
    def gpu_indices(self) -> dict[str, tuple[int, ...]]:
        """By node; the real ones. A node is not there where they are not known."""
        return {part.node: part.gpus for part in self.job.allocations if part.gpus}


class NodeRow(NamedTuple):
    """One node and who is on it.

    Attributes:
        holders: of each GPU by its index, the job that has it; "" if none, "?" if a job that is not known.
        unplaced_gpus: of jobs whose indices are not known.
    """

    node: Node
    away: bool
    holders: tuple[str, ...]
    jobs: tuple[ClusterJob, ...]
    unplaced_gpus: int = 0

    @property
    def gpus_held(self) -> int:
        """GPUs that are known to be in use, by their indices."""
        return len(self.holders) - self.holders.count("")

    @property
    def gpus_free(self) -> int:
        """GPUs that a job could get now."""
        return 0 if self.away else max(0, self.holders.count("") - self.unplaced_gpus)


class UserRow(NamedTuple):
    """What one user has and wants."""

    user: str
    running: int
    gpus: int
    cpus: int
    waiting: int
    gpus_wanted: int


class QueueTotals(NamedTuple):
    """Of the whole cluster, whatever is selected. GPUs of nodes that are away are neither used nor free."""

    nodes: int
    nodes_free: int
    nodes_away: int
    gpus: int
    gpus_used: int
    gpus_free: int
    gpus_away: int
    cpus: int
    cpus_used: int
    running: int
    waiting: int
    gpus_wanted: int


class QueueBoard(NamedTuple):
    """All of it; `nodes`, `running` and `waiting` hold what is selected."""

    cluster: str
    version: str
    taken_s: float
    totals: QueueTotals
    nodes: tuple[NodeRow, ...]
    running: list[QueueJobRow]
    waiting: list[QueueJobRow]
    users: tuple[UserRow, ...]


def queue_board(
    snapshot: ClusterSnapshot,
    *,
    users: Collection[str] = (),
    nodes: Collection[str] = (),
    partitions: Collection[str] = (),
    stalls: Mapping[str, float] | None = None,
) -> QueueBoard:
    """The view of a snapshot.

    Args:
        snapshot: of a cluster.
        users: only their jobs, and the nodes that these are on.
        nodes: only these, and the jobs on them; no jobs that wait.
        partitions: only these.
        stalls: by job id, the share of its time that the job waited for data.

    Returns:
        Running jobs with the most GPUs first, waiting ones in the order of their priority.
    """
    on_node: dict[str, list[ClusterJob]] = defaultdict(list)
    running: list[ClusterJob] = []
    waiting: list[ClusterJob] = []
    for job in snapshot.jobs:
        if job.state in WAITING:
            waiting.append(job)
        elif job.state in ON_NODES:
            running.append(job)
            for name in _places(job):
                on_node[name].append(job)
    rows = [_node_row(node, on_node.get(node.name, ())) for node in snapshot.nodes]
    totals = _totals(rows, running, waiting)
    users, nodes, partitions = frozenset(users), frozenset(nodes), frozenset(partitions)

    def is_picked(job: ClusterJob) -> bool:
        return (not users or job.user in users) and (
            not partitions or not partitions.isdisjoint(job.partition.split(","))
        )

    rows = [
        row for row in rows
        if (not nodes or row.node.name in nodes)
        and (not partitions or not partitions.isdisjoint(row.node.partitions))
        and (not users or any(job.user in users for job in row.jobs))
    ]  # fmt: skip
    running = [
        j for j in running if is_picked(j) and (not nodes or not nodes.isdisjoint(_places(j)))
    ]
    waiting = [] if nodes else [job for job in waiting if is_picked(job)]
    running.sort(key=lambda j: (-j.gpu_count, -j.cpu_count, j.started_s or 0.0))
    waiting.sort(key=lambda j: (-j.priority, j.submitted_s or 0.0))
    now_s, known = snapshot.taken_s, stalls or {}
    return QueueBoard(
        snapshot.cluster, snapshot.version, now_s, totals, tuple(rows),
        [QueueJobRow(job, now_s, known.get(job.job_id)) for job in running],
        [QueueJobRow(job, now_s) for job in waiting], _user_rows(running, waiting),
    )  # fmt: skip


def _places(job: ClusterJob) -> Iterable[str]:
    """Nodes that it holds; several that a local job is told of are one."""
    return dict.fromkeys(part.node for part in job.allocations) or job.nodes


def _node_row(node: Node, jobs: Sequence[ClusterJob]) -> NodeRow:
    holders = [""] * node.gpus
    for index in node.gpus_allocated:
        if index < node.gpus:
            holders[index] = "?"
    unplaced = 0
    for job in jobs:
        for part in job.allocations:
            if part.node == node.name:
                for index in part.gpus:
                    if index < node.gpus:
                        holders[index] = job.job_id
                unplaced += max(0, part.gpu_count - len(part.gpus))
    # Indices that the node knows to be in use and no job claims belong to those that do not say which.
    unplaced = max(0, unplaced - holders.count("?"))
    ranked = sorted(jobs, key=lambda job: -job.gpu_count) if len(jobs) > 1 else jobs
    return NodeRow(node, is_away(node), tuple(holders), tuple(ranked), unplaced)


def _totals(
    rows: Sequence[NodeRow], running: Sequence[ClusterJob], waiting: Sequence[ClusterJob]
) -> QueueTotals:
    here = [row for row in rows if not row.away]
    used = sum(row.gpus_held + row.unplaced_gpus for row in rows)
    free = sum(row.gpus_free for row in here)
    total = sum(row.node.gpus for row in rows)
    return QueueTotals(
        nodes=len(rows), nodes_free=sum(not row.jobs and not row.node.cpus_allocated for row in here),
        nodes_away=len(rows) - len(here), gpus=total, gpus_used=used, gpus_free=free,
        gpus_away=max(0, total - used - free), cpus=sum(row.node.cpus for row in rows),
        cpus_used=sum(row.node.cpus_allocated for row in rows), running=len(running),
        waiting=sum(task_count(job.job_id) for job in waiting),
        gpus_wanted=sum(job.gpu_count * task_count(job.job_id) for job in waiting),
    )  # fmt: skip


def task_count(job_id: str) -> int:
    """How many jobs a line stands for: "17_[2-9%4]" are the eight tasks of an array that wait together."""
    if not job_id.endswith("]"):
        return 1
    indices = job_id.partition("[")[2].removesuffix("]").partition("%")[0]
    try:
        return max(1, len(expand_indices(indices)))
    except ValueError:
        return 1  # Slurm cuts long lists short with dots


@cache
def reason_text(reason: str) -> str:
    """Why a job waits, in words; Slurm's own word where there are none for it."""
    word = reason.split(",", 1)[0].strip("() ")
    limited = next((text for start, text in _LIMITED if word.startswith(start)), reason)
    return _REASONS.get(word, limited)


def _user_rows(running: Iterable[ClusterJob], waiting: Iterable[ClusterJob]) -> tuple[UserRow, ...]:
    """Those with the most GPUs first."""
    has: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for job in running:
        counts = has[job.user]
        counts[:3] = counts[0] + 1, counts[1] + job.gpu_count, counts[2] + job.cpu_count
    for job in waiting:
        counts, tasks = has[job.user], task_count(job.job_id)
        counts[3:] = counts[3] + tasks, counts[4] + job.gpu_count * tasks
    rows = [UserRow(user, *counts) for user, counts in has.items()]
    return tuple(sorted(rows, key=lambda row: (-row.gpus, -row.gpus_wanted, -row.cpus, row.user)))
