"""JobStore: one store over all nodes' shares, in the source's order. Made by `open_job`.

Usable as soon as all nodes have planned: what is not staged yet is read from the source. The directories
come over the fabric once per node and are shared by its processes; this node's own share is read from
its file once it is staged.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import _native
from headrace.base.job import job_id, which_node
from headrace.errors import FabricError, JobError, SourceChanged, VolumeError
from headrace.fabric.engine import FabricEngine
from headrace.job.engine import (
    JobEngine,
    JobVolumes,
    SharePart,
    connect_options,
    copy_namespace,
    identity_of,
)
from headrace.job.local_files import Directories
from headrace.job.meeting import POLL_S, Meeting, meeting_folder
from headrace.job.nodes import answers
from headrace.job.share import plan_share, write_share_directory
from headrace.store import Store, open_store
from headrace.store.manifest import Manifest
from headrace.store.publish import disk_errors
from headrace.store.segment import OpenSegment, memory_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.job.meeting import JobDocument, NodeDocument, SegmentPlaces
    from headrace.store.manifest import Segment

SCHEME = "headrace://"
WAIT_S = 60.0  # how long opening waits for the job to begin


def open_job(
    where: str = "headrace://job",
    *,
    storage_options: Mapping[str, Any] | None = None,
    wait_s: float = WAIT_S,
) -> JobStore:
    """Opens the global store of a job.

    Args:
        where: `headrace://job` (the folder is in HEADRACE_JOB_FOLDER) or `headrace:///FOLDER`.
        storage_options: for a source at a URL.
        wait_s: how long to wait for the nodes.

    Raises:
        JobError: no job meets there, or it is another one than this process belongs to.
        ValueError: `where` is no such URL.
    """
    rest = where.removeprefix(SCHEME)
    if rest == where or not (rest == "job" or rest.startswith("/")):
        raise ValueError(f"{where!r} is no job, expected headrace://job or headrace:///FOLDER")
    folder = meeting_folder(None if rest == "job" else rest)
    meeting = Meeting(folder)
    document = _living_job(meeting, wait_s)
    here = job_id()
    if here is not None and document.job not in (here, document.session):
        raise JobError(
            f"{folder}: the job that met here is {document.job}, this process belongs to {here}.",
            path=str(folder),
            next_step="Name a folder of this job: HEADRACE_JOB_FOLDER.",
        )
    nodes = meeting.nodes(document.session)
    own = own_node(document, nodes)
    return _Opening(where, meeting, document, storage_options, nodes, own).store()


def _living_job(meeting: Meeting, wait_s: float) -> JobDocument:
    """The document of a job of which at least one node answers: the folder may hold a dead one's.

    A job that is about to begin replaces what a killed one left: its document is waited for.
    """
    until_s = time.monotonic() + wait_s
    while True:
        document = meeting.wait_for_job(max(0.0, until_s - time.monotonic()))
        if any(map(answers, meeting.nodes(document.session).values())):
            return document
        if time.monotonic() >= until_s:
            raise JobError(
                f"{meeting.folder}: no node of the job {document.job} answers any more.",
                path=str(meeting.folder),
                next_step="Start `headrace stage` on every node again.",
            )
        time.sleep(POLL_S)


class JobStore(Store):
    """The open store of a job; a `Store` like any other."""

    document: JobDocument  # `job.json` as it was when the store was opened
    directories: Directories  # where the node keeps the job's directories
    meeting: Meeting

    agrees = True
    appendable = False

    def resident_ranges(self, name: str = "") -> tuple[tuple[int, int], ...]:
        """Samples that the nodes have staged, as the first process found that asked with this name."""
        nodes = self.meeting.nodes(self.document.session)
        ranges, base = [], 0
        for segment in self.document.segments:
            node = nodes.get(segment.places[0].node)
            if node is not None and node.ready:
                ranges.append((base, base + node.ready))
            base += segment.entry.samples
        return self.meeting.agree(f"resident-{name}", self.document.session, tuple(ranges))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_job, (self.path, self.fingerprint)

    def close(self) -> None:
        """As `Store.close`; the node's last process removes the directories."""
        super().close()
        self.directories.close()


def _reopen_job(where: str, fingerprint: str) -> JobStore:
    store = open_job(where)
    if store.fingerprint != fingerprint:
        store.close()
        raise SourceChanged(
            f"{where}: the fingerprint is {store.fingerprint}, expected {fingerprint}: another job meets "
            "there.",
            path=where,
            next_step="Open it again in the main process.",
        )
    return store


@dataclass(slots=True)
class _Opening:
    """What opening needs on the way."""

    where: str
    meeting: Meeting
    document: JobDocument
    storage_options: Mapping[str, Any] | None
    nodes: Mapping[int, NodeDocument]
    own: int | None
    fabric: FabricEngine | None = None
    listing: Store | None = None
    silent: set[str] = field(default_factory=set)

    def store(self) -> JobStore:
        own = None if self.own is None else self.nodes.get(self.own)
        # Where this node keeps directories: where its server keeps its share, if we may write there.
        local = os.environ.get("HEADRACE_JOB_LOCAL") or tempfile.gettempdir()
        if own is not None and os.access(own.local, os.W_OK | os.X_OK):
            local = own.local
        next_step = "Check the local disk, or name another folder: HEADRACE_JOB_LOCAL."
        with disk_errors(Path(local), next_step):
            directories = Directories(Path(local), self.document.session)
            try:
                return self._store(directories, own)
            except BaseException:
                directories.close()
                raise
            finally:
                if self.fabric is not None:
                    self.fabric.close()
                if self.listing is not None:
                    self.listing.close()

    def _store(self, directories: Directories, own: NodeDocument | None) -> JobStore:
        document = self.document
        entries: list[Segment] = []
        parts: list[SharePart] = []
        base = 0
        for segment in document.segments:
            entry, directory = self._directory(directories, segment, base)
            entries.append(entry)
            parts.append(SharePart(directory, base))
            base += entry.samples
        engine = JobEngine(self.meeting, document, self.own, parts, self._open_source)
        opened = []
        for k, (entry, part) in enumerate(zip(entries, parts, strict=True)):
            volumes = JobVolumes(document.session, k, entry, engine, _local_volume(own, entry))
            opened.append(OpenSegment(entry, part.base, part.directory, volumes))
        manifest = Manifest(f"{document.session:0>32}", document.fingerprint, tuple(entries))
        objects: Any = engine
        store = JobStore(self.where, manifest, opened, objects=objects)
        store.document, store.directories, store.meeting = document, directories, self.meeting
        return store

    def _open_source(self) -> Store:
        return open_store(self.document.listing, storage_options=self.storage_options)

    # -- directories ------------------------------------------------------------------------------

    def _directory(
        self, directories: Directories, segment: SegmentPlaces, base: int
    ) -> tuple[Segment, _native.Directory]:
        """A segment's directory, from whoever has it; made anew from the listing if nobody answers."""
        entry, fetch = segment.entry, partial(self._fetch, segment)
        try:
            return entry, directories.open(entry, fetch)
        except VolumeError:
            return self._planned(base, entry.samples)

    def _fetch(self, segment: SegmentPlaces, fd: int) -> None:
        failure: VolumeError | None = None
        for place in sorted(segment.places, key=lambda p: p.node != self.own):
            target = place.directory.partition("?")[0]
            if target in self.silent:
                continue
            try:
                if self.fabric is None:
                    identity = identity_of(self.document.session)
                    self.fabric = FabricEngine(identity, connect_options())
                size, what = segment.entry.directory_bytes, "the directory cannot be read"
                copy_namespace(self.fabric, place.directory, size, fd, what=what)
            except VolumeError as e:
                self.silent.add(target)
                failure = e
            else:
                return
        raise failure or FabricError(f"{segment.places}: no node answers.")

    def _planned(self, base: int, samples: int) -> tuple[Segment, _native.Directory]:
        """A share's directory as its node planned it: it is a function of the listing."""
        if self.listing is None:
            self.listing = self._open_source()
        share = plan_share(self.listing, base, base + samples)
        with memory_file() as fd:
            entry, _ = write_share_directory(share, fd)
            return entry, _native.Directory.from_fd(fd, f"{self.where} (planned)")


def _local_volume(own: NodeDocument | None, entry: Segment) -> int | None:
    """A descriptor of this node's own volume, if this is it, whole and reachable."""
    if own is None or own.state != "staged" or own.segment is None or not own.files:
        return None
    if own.segment["uuid"] != entry.uuid:
        return None
    with contextlib.suppress(OSError):  # a server in another container: the fabric's way is open
        fd = os.open(own.files[0], os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(fd).st_size == entry.volumes[0].bytes:
            return fd
        os.close(fd)
    return None


def own_node(document: JobDocument, nodes: Mapping[int, NodeDocument]) -> int | None:
    """Which of the job's nodes this process runs on: as the launcher says, else by address."""
    try:
        place = which_node()
    except ValueError:
        place = None
    if place is not None and place.nodes == document.nodes and place.nodes > 1:
        return place.rank
    here = []
    for node in nodes.values():
        host = node.address.rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.bind((host, 0))  # only addresses of this network namespace can be bound
            here.append(node.node)
    return here[0] if len(here) == 1 else None
