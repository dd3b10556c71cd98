"""The nodes of a job: their addresses, whether they answer, and what they hold together.

Node 0 writes `job.json` from what the nodes publish (`Registrar`). The document is a function of theirs, so
it matters little who writes it, or whether it is written again: if node 0 dies, the last one stays true,
but for replicas that come later.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.base.job import job_id
from headrace.base.lifetime import Closing
from headrace.errors import FabricError, HeadraceError, JobError
from headrace.fabric.host import Host
from headrace.job.engine import host_options, identity_of
from headrace.job.meeting import POLL_S, JobDocument, SegmentPlaces
from headrace.store.manifest import segment_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.job.meeting import Meeting, NodeDocument

_DISCARD = 9
_ANYWHERE = "192.0.2.1"
"""Reserved for documentation: nobody is there, but a route to it is one to the outside."""


def own_address(nodes: int, toward: str | None = None) -> str:
    """The address of this node that others can reach; a job of one node stays on loopback.

    `toward` is another node's address, if one is known: the way there begins at ours.
    """
    if nodes == 1:
        return "127.0.0.1"
    if toward is not None and (address_there := _from(toward)):
        return address_there
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            host = str(address[0])
            if not host.startswith("127.") and host != "::1" and "%" not in host:
                return host
    return _from(_ANYWHERE) or "127.0.0.1"


def _from(toward: str) -> str | None:
    """The address that packets to `toward` carry. Nothing is sent."""
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((toward, _DISCARD))
        return str(s.getsockname()[0])
    return None


def answers(document: NodeDocument) -> bool:
    """Whether the server that a document speaks of, and no other, listens at its address."""
    host, _, port = document.address.rpartition(":")
    identity, options = identity_of(document.session), host_options(0)
    try:
        with Host((host.strip("[]"), int(port)), document.nqn, identity, options):
            return True
    except (FabricError, ValueError):
        return False


_LATER_S = 0.5  # between looks once the job has begun


class Registrar(Closing):
    """A thread that looks into the folder until `close`."""

    def __init__(self, meeting: Meeting, session: str, nodes: int, head: Mapping[str, Any]) -> None:
        self._meeting = meeting
        self._session = session
        self._nodes = nodes
        self._head = dict(head)
        self._stop = threading.Event()
        self._last: JobDocument | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-registrar", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            # A shared file system that fails for a moment: the next look may succeed.
            with contextlib.suppress(OSError, HeadraceError):
                self._look()
            if self._stop.wait(POLL_S if self._last is None else _LATER_S):
                return

    def _look(self) -> None:
        self._meeting.announce(self._session, **self._head)
        there = self._meeting.nodes(self._session)
        if self._last is None and len(there) < self._nodes:
            return
        generation = 1 if self._last is None else self._last.generation
        document = compose(self._session, self._nodes, self._head, there, generation)
        if self._last is not None:
            # If there are fewer, a node has left: its replicas and the source serve its share.
            if document == self._last or len(document.segments) < len(self._last.segments):
                return
            document = replace(document, generation=generation + 1)
        self._meeting.publish_job(document)
        self._last = document


def compose(
    session: str,
    nodes: int,
    head: Mapping[str, Any],
    there: Mapping[int, NodeDocument],
    generation: int,
) -> JobDocument:
    """The job's document: the owner's place of each share first, its replicas behind."""
    segments = []
    for node in sorted(there):
        own = there[node]
        if own.segment is None or own.place is None:
            continue
        copies = [
            replace(copy, node=other.node)
            for other in there.values()
            for copy in other.replicas
            if copy.node == node
        ]
        entry = segment_from_json(own.segment, session)
        segments.append(SegmentPlaces(entry, (own.place, *copies)))
    staged = len(there) == nodes and all(n.state == "staged" for n in there.values())
    return JobDocument(
        session=session, job=job_id() or session, generation=generation, nodes=nodes,
        state="staged" if staged else "staging", fingerprint=str(head["fingerprint"]),
        source=str(head["source"]), listing=str(head["listing"]), segments=tuple(segments),
    )  # fmt: skip


_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node."""

    node: int
    state: str  # `missing` (it has not come), `planned`, `staging`, `staged`, `failed` or `gone`
    host: str = ""
    address: str = ""
    samples: int = 0
    bytes: int = 0  # of its share's volume
    written: int = 0  # of them, there already
    source_bytes: int = 0
    copies_of: tuple[int, ...] = ()  # nodes whose shares it holds too
    why: str = ""


@dataclass(frozen=True, slots=True)
class StagingStatus:
    """A job that stages."""

    folder: str  # where it meets
    session: str
    job: str | None  # the scheduler's id, if there is one
    state: str  # `meeting`, `staging`, `staged` or `ended`
    source: str
    samples: int
    bytes: int  # of all shares
    written: int  # of them, there already
    source_bytes: int
    nodes: tuple[NodeStatus, ...]


def job_status(meeting: Meeting) -> StagingStatus:
    """Looks into the folder and asks every node; raises JobError if no job meets there."""
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
    nodes = [NodeStatus(rank, "missing") for rank in range(int(head["nodes"]))]
    for rank, node in there.items():
        if rank >= len(nodes):
            continue  # of a folder that somebody else has written in
        nodes[rank] = NodeStatus(
            rank, node.state if alive[rank] else "gone", node.host, node.address, node.samples,
            node.volume_bytes, node.written, node.source_bytes,
            tuple(p.node for p in node.replicas), node.why,
        )  # fmt: skip
    document = meeting.job()
    state = "meeting" if document is None else document.state
    return StagingStatus(
        str(meeting.folder), session, head.get("job"),
        "ended" if meeting.ended(session) else state, str(head.get("source", "")),
        sum(n.samples for n in nodes), sum(n.bytes for n in nodes), sum(n.written for n in nodes),
        sum(n.source_bytes for n in nodes), tuple(nodes),
    )  # fmt: skip
