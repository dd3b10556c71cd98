"""Registrar: node 0's clerk: answers greetings, and writes `job.json` from what the nodes publish.

The document is a function of the nodes' documents, so it matters little who writes it, or whether it is
written again: if node 0 dies, the last one stays true, but for replicas that come later.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from headrace.base.job import job_id
from headrace.closing import Closing
from headrace.errors import HeadraceError
from headrace.job.document import JobDocument, NodeDocument, Place, SegmentPlaces
from headrace.job.meeting import POLL_S, Meeting
from headrace.store.manifest import segment_from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Registrar", "compose"]

_LATER_S = 0.5
"""Between looks once the job has begun."""


class Registrar(Closing):
    """A thread that looks into the folder until `close`.

    Args:
        meeting: the folder.
        session: ours.
        nodes: how many there are.
        head: what `meeting.json` tells the nodes.
    """

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
        found = compose(self._session, self._nodes, self._head, there, generation)
        if self._last is not None:
            if len(found.segments) < len(self._last.segments):
                return  # a node has left: its replicas and the source serve its share
            if found == self._last:
                return
            found = compose(self._session, self._nodes, self._head, there, generation + 1)
        self._meeting.publish_job(found)
        self._last = found


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
        places = [own.place]
        for other in there.values():
            places += [
                Place(other.node, copy.directory, copy.volumes)
                for copy in other.replicas
                if copy.node == node
            ]
        segments.append(SegmentPlaces(segment_from_json(own.segment, session), tuple(places)))
    staged = len(there) == nodes and all(n.state == "staged" for n in there.values())
    return JobDocument(
        session=session,
        job=job_id() or session,
        generation=generation,
        state="staged" if staged else "staging",
        nodes=nodes,
        fingerprint=str(head["fingerprint"]),
        source=str(head["source"]),
        listing=str(head["listing"]),
        segments=tuple(segments),
    )
