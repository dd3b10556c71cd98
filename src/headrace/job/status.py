"""Status: how a job is doing, from its folder and by asking its nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import JobError
from headrace.job.liveness import answers

if TYPE_CHECKING:
    from headrace.job.meeting import Meeting

__all__ = ["JobStatus", "NodeStatus", "job_status"]

_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node.

    Attributes:
        node: its rank.
        state: `missing` (it has not come), `planned`, `staging`, `staged`, `failed` or `gone`.
        host: its name.
        address: of its target.
        samples: of its share.
        bytes: of its share's volume.
        written: of them, there already.
        source_bytes: read from the source.
        copies_of: nodes whose shares it holds too.
        why: what went wrong.
    """

    node: int
    state: str
    host: str = ""
    address: str = ""
    samples: int = 0
    bytes: int = 0
    written: int = 0
    source_bytes: int = 0
    copies_of: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The job.

    Attributes:
        folder: where it meets.
        session: of the meeting.
        job: the scheduler's id, if there is one.
        state: `meeting`, `staging`, `staged` or `ended`.
        source: what is staged.
        samples: in all.
        bytes: of all shares.
        written: of them, there already.
        source_bytes: read from the source so far.
        nodes: one by one.
    """

    folder: str
    session: str
    job: str | None
    state: str
    source: str
    samples: int
    bytes: int
    written: int
    source_bytes: int
    nodes: tuple[NodeStatus, ...]


def job_status(meeting: Meeting) -> JobStatus:
    """Looks into the folder and asks every node.

    Raises:
        JobError: no job meets there.
    """
    head = meeting.head()
    if head is None:
        raise JobError(
            f"{meeting.folder}: no job meets here.",
            path=str(meeting.folder),
            next_step="Start `headrace stage SOURCE --meet` on every node.",
        )
    session = str(head["session"])
    there = meeting.nodes(session)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        alive = dict(zip(there, pool.map(answers, there.values()), strict=True))
    nodes = []
    for rank in range(int(head["nodes"])):
        found = there.get(rank)
        if found is None:
            nodes.append(NodeStatus(rank, "missing"))
            continue
        nodes.append(
            NodeStatus(
                rank, found.state if alive[rank] else "gone", found.host, found.address, found.samples,
                found.volume_bytes, found.written, found.source_bytes,
                tuple(p.node for p in found.replicas), found.why,
            )
        )  # fmt: skip
    document = meeting.job()
    state = "meeting" if document is None else document.state
    return JobStatus(
        str(meeting.folder), session, head.get("job"),
        "ended" if meeting.ended(session) else state, str(head.get("source", "")),
        sum(n.samples for n in nodes), sum(n.bytes for n in nodes), sum(n.written for n in nodes),
        sum(n.source_bytes for n in nodes), tuple(nodes),
    )  # fmt: skip
