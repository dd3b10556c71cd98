"""Layout: which job holds which GPU of which node, from what the scheduler or the agents say. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.cluster.layout import is_away
from headrace.cluster.queue_view import queue_board
from headrace.web.picture import IDLE, Cluster, JobBox, NodeBox, levels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.cluster.snapshot import ClusterSnapshot
    from headrace.telemetry.history import JobRecord

__all__ = ["Layout", "cluster_of", "nodes_of_agents", "nodes_of_scheduler"]

LITTLE = 0.03
"""Who waits for less than this share of its time has no cause to speak of."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes and who is on them.

    Attributes:
        nodes: in the order in which they are shown.
        holders: of each node, the job of each GPU; '' for none.
        jobs: by id, what is known of them without the history.
        waiting: jobs that wait for GPUs.
    """

    nodes: Sequence[NodeBox]
    holders: Sequence[Sequence[str]]
    jobs: dict[str, JobBox]
    waiting: int = 0


def nodes_of_scheduler(snapshot: ClusterSnapshot) -> Layout:
    """As the scheduler says; GPUs whose number it does not tell are the first that are free."""
    board = queue_board(snapshot)
    order = {name: at for at, name in enumerate(p.name for p in snapshot.partitions)}

    def first(partitions: Iterable[str]) -> str:
        return min(partitions, key=lambda name: order.get(name, len(order)), default="")

    boxes, holders = [], []
    for row in sorted(board.nodes, key=lambda r: order.get(first(r.node.partitions), len(order))):
        node = row.node
        away = " ".join([*node.states, node.reason]).strip() if is_away(node) else ""
        boxes.append(NodeBox(node.name, first(node.partitions), node.gpus, away))
        held = list(row.holders)[: node.gpus]
        held += [""] * (node.gpus - len(held))
        for job in row.jobs:
            for part in job.allocations:
                if part.node == node.name and not part.gpus:
                    # "?" is one that is taken, by a job whose numbers are not told: such as this.
                    taken = [at for at, holder in enumerate(held) if holder == "?"]
                    free = [at for at, holder in enumerate(held) if not holder]
                    for at in (taken + free)[: part.gpu_count]:
                        held[at] = job.job_id
        holders.append(held)
    jobs = {
        row.job.job_id: JobBox(
            job_id=row.job.job_id, name=row.job.name, user=row.job.user, account=row.job.account,
            partition=row.job.partition, gpus=row.job.gpu_count, nodes=max(1, len(row.job.nodes)),
            started_s=row.job.started_s,
        )
        for row in board.running
    }  # fmt: skip
    if any("?" in held for held in holders):
        jobs["?"] = JobBox(job_id="?", name="a job that is not known")
    return Layout(boxes, holders, jobs, board.totals.waiting)


def nodes_of_agents(parts: Sequence[tuple[str, JobRecord]]) -> Layout:
    """As agents tell: the jobs of each node, on as many GPUs as they say; a CPU job is one cell."""
    by_node: dict[str, list[JobRecord]] = {}
    for node, record in parts:
        for name in [node] if node else record.nodes:
            by_node.setdefault(name, []).append(record)
    boxes, holders = [], []
    jobs: dict[str, JobBox] = {}
    for name in sorted(by_node):
        held: list[str] = []
        for record in sorted(by_node[name], key=lambda r: r.job_id):
            count = max(1, min(64, round(record.total("gpus") or _gpus(record))))
            held += [record.job_id] * count
            known = jobs.get(record.job_id)
            jobs[record.job_id] = JobBox(
                job_id=record.job_id, name=record.name, user=record.user, account=record.account,
                gpus=count + (known.gpus if known else 0), nodes=1 + (known.nodes if known else 0),
                started_s=record.first_s,
            )  # fmt: skip
        boxes.append(NodeBox(name, "", len(held)))
        holders.append(held)
    return Layout(boxes, holders, jobs)


def _gpus(record: JobRecord) -> float:
    return record.total("gpu_s") / record.seconds if record.seconds else 0.0


def cluster_of(
    layout: Layout,
    parts: Sequence[tuple[str, JobRecord]],
    taken_s: float,
    notes: tuple[str, ...] = (),
) -> Cluster:
    """The picture: who is where, and how long each waits there.

    Args:
        layout: who is where.
        parts: what the history knows of now, with the node, or '' for all nodes of a job.
        taken_s: Unix seconds.
        notes: what could not be seen.
    """
    on_node: dict[tuple[str, str], JobRecord] = {}
    of_job: dict[str, JobRecord] = {}
    for node, record in parts:
        for name in (record.job_id, record.alias):
            if name:
                on_node[node, name] = of_job[name] = record
    boxes = [_box(job, of_job.get(job.job_id)) for job in layout.jobs.values()]
    place = {job: at for at, job in enumerate(layout.jobs)}
    holders: list[int] = []
    stall: list[float] = []
    busy: list[float] = []
    for box, held in zip(layout.nodes, layout.holders, strict=True):
        for job in held:
            known = on_node.get((box.name, job)) or of_job.get(job)
            holders.append(place.get(job, IDLE))
            stall.append(_known(known.stall if known else None))
            busy.append(_known(known.gpu_use if known else None))
    return Cluster(
        taken_s=taken_s, nodes=layout.nodes, jobs=boxes, holders=np.array(holders, np.int32),
        stall=levels(np.array(stall, np.float64)), busy=levels(np.array(busy, np.float64)),
        waiting=layout.waiting, notes=notes,
    )  # fmt: skip


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def _box(job: JobBox, record: JobRecord | None) -> JobBox:
    if record is None:
        return job
    waits = (record.stall or 0.0) >= LITTLE
    systems = [name for name in record.lost_by_file_system if name]
    return JobBox(
        job_id=job.job_id, name=job.name or record.name, user=job.user or record.user,
        account=job.account or record.account, partition=job.partition, gpus=job.gpus,
        nodes=job.nodes, cause=next(iter(record.waited), "") if waits else "",
        file_system=systems[0] if systems and waits else "", measured=record.measured,
        started_s=job.started_s,
    )  # fmt: skip
