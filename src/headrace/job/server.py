"""NodeServer: one node's part of a job, from meeting to end: `headrace stage`, or `staging` in a program.

Exports its share as planned before a byte is copied, so that training may start; copies it; then holds
it, and a neighbour's where asked, until the job ends. Its files have no names unless they are kept, so a
kill leaves none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.files import read_file, write_all
from headrace.base.job import NodePlace, job_id, which_node
from headrace.base.lifetime import Closing, Latch
from headrace.config import reader_options
from headrace.errors import HeadraceError, JobError, StoreNotFound
from headrace.io.objects.location import is_url, local_path
from headrace.job.local_files import Directories, LocalFile, sweep
from headrace.job.meeting import POLL_S, Meeting, NodeDocument, SharePlace, meeting_folder
from headrace.job.nodes import Registrar, answers, own_address
from headrace.job.share import (
    NodeExports,
    NodeShare,
    Stager,
    copy_share,
    cut_shares,
    plan_share,
    write_share_directory,
)
from headrace.store import Store, open_store
from headrace.store.format import PAGE_BYTES
from headrace.store.manifest import FILE_NAME, Manifest, fingerprint_of, segment_from_json
from headrace.store.opening import manifest_at
from headrace.store.pack import index
from headrace.store.publish import disk_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Progress = Callable[[int, int | None, int, int | None], None]

PUBLISH_S = 1.0
"""How often progress is published while a share is copied: one small file on the shared file system."""

_AGAIN = "Check the local disk (--local) and the meeting folder (--meet), and start the job again."


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How a node takes part."""

    local: str | None = None  # a folder on the local disk; by default that of temporary files
    replicas: int = 1  # places of each share, 1 or 2
    keep: bool = False  # leave the share on the local disk, as a store
    address: str | None = None  # where the others reach this node; found out if not given
    port: int = 0  # of the target; 0 takes a free one
    meet_s: float = 600.0  # how long to wait for the others
    bytes_per_s: float | None = None  # read no faster from the source: others need it too
    listing: Mapping[str, Any] | None = None
    """Options of `headrace.index` for a source that is no store."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """For a source at a URL."""

    def __post_init__(self) -> None:
        if self.replicas not in (1, 2):
            raise ValueError(f"replicas is {self.replicas}, expected 1 or 2")


class NodeServer(Closing):
    """Serves one node's share.

    Node 0 lists the source, the others may leave it out; `say` is told what goes on, in plain lines.
    """

    def __init__(
        self,
        source: Any,
        meeting: Meeting,
        place: NodePlace,
        options: StageOptions | None = None,
        say: Callable[[str], object] = len,
    ) -> None:
        self.place = place
        self.meeting = meeting
        self.options = options or StageOptions()
        self.stop = Latch()  # set it to end
        self.document: NodeDocument | None = None  # what we have published
        self._source = source
        self._say = say
        self._local = Path(self.options.local or tempfile.gettempdir()).absolute()
        self._session = ""
        self._listing: Store | None = None
        self._exports: NodeExports | None = None
        self._registrar: Registrar | None = None
        self._directories: Directories | None = None
        self._files: list[LocalFile] = []
        self._share: NodeShare | None = None
        self._volume: LocalFile | None = None
        self._kept: Path | None = None
        self._kept_whole = False
        self._nsid = 0
        self._published_s = 0.0
        self._ended_s = 0.0

    # -- the steps --------------------------------------------------------------------------------

    def plan(self) -> None:
        """Meets the others, and exports this node's share as it will be."""
        with disk_errors(self._local, _AGAIN):
            for folder in sweep(self._local):
                self._say(f"removed what a killed process left: {folder}")
            head = self._begin() if self.place.rank == 0 else self._join()
            self._session = head["session"]
            self._directories = Directories(self._local, self._session)
            self._listing = open_store(
                head["listing"], storage_options=self.options.storage_options
            )
            if self._listing.fingerprint != head["fingerprint"]:
                raise JobError(
                    f"{head['listing']}: the fingerprint is {self._listing.fingerprint} here, node 0 saw "
                    f"{head['fingerprint']}.",
                    path=str(head["listing"]),
                    next_step="All nodes must see the same source under the same path.",
                )
            begin, end = cut_shares(self._listing, self.place.nodes)[self.place.rank]
            address = self.options.address or own_address(self.place.nodes, head.get("address"))
            self._exports = NodeExports(self._session, self.place.rank, address, self.options.port)
            planned = NodeDocument(
                session=self._session, node=self.place.rank, host=socket.gethostname(), pid=os.getpid(),
                address=self._exports.address, nqn=self._exports.nqn, local=str(self._local),
                state="planned", samples=end - begin,
            )  # fmt: skip
            if end > begin:
                planned = self._export_share(planned, plan_share(self._listing, begin, end))
            self._publish(planned)
            self._say(
                f"node {self.place.rank} of {self.place.nodes}: samples {begin:,} to {end - 1:,}, "
                f"{planned.volume_bytes:,} bytes, served at {self._exports.address}"
            )

    def stage(self, progress: Progress | None = None) -> None:
        """Copies the share from the source.

        Raises:
            HeadraceError: a sample cannot be read; what is copied is still served.
        """
        with disk_errors(self._local, _AGAIN):
            assert self.document is not None
            assert self._exports is not None
            assert self._listing is not None
            share, volume, exports = self._share, self._volume, self._exports
            if share is None or volume is None:
                self._publish(replace(self.document, state="staged"))
                return
            move_mark = functools.partial(exports.set_written, self._nsid)
            stager = Stager(self._listing, share, volume.fd, move_mark, reader_options({})[0])
            started_s = time.monotonic()

            def go_on() -> bool:
                if self.options.bytes_per_s is not None:
                    due_s = started_s + stager.source_bytes / self.options.bytes_per_s
                    self.stop.wait(max(0.0, due_s - time.monotonic()))
                if progress is not None:
                    progress(
                        stager.samples_done, share.samples, stager.bytes_done, share.data_bytes
                    )
                if time.monotonic() - self._published_s > PUBLISH_S:
                    with contextlib.suppress(OSError):  # the next look says more, and is soon
                        self._publish_progress(stager, "staging")
                return not self.ended()

            try:
                if stager.run(go_on):
                    self._finish_share(share, volume, stager)
                else:
                    self._publish_progress(stager, "staging")
            except (HeadraceError, OSError) as e:
                self._publish_progress(stager, "failed", why=getattr(e, "message", str(e)))
                raise

    def replicate(self) -> None:
        """Copies the next node's share from it, once it is staged, and exports the copy; if asked to."""
        with disk_errors(self._local, _AGAIN):
            assert self.document is not None
            assert self._exports is not None
            if self.options.replicas == 1 or self.ended():
                return
            of = (self.place.rank + 1) % self.place.nodes
            if of == self.place.rank:
                return
            while (theirs := self.meeting.nodes(self._session).get(of)) is None or (
                theirs.state not in ("staged", "failed")
            ):
                if self.ended(POLL_S):
                    return
            if theirs.place is None or theirs.segment is None or theirs.state == "failed":
                return
            entry = segment_from_json(theirs.segment, str(self.meeting.folder))
            try:
                local, go_on = str(self._local), lambda: not self.ended()
                copies = copy_share(self._session, theirs.place, entry, local, go_on=go_on)
            except HeadraceError as e:
                self._say(f"node {of}'s share is not copied: {e.message}")
                return
            if copies is None:
                return
            self._files += copies
            (_, directory), (_, volume) = (self._exports.add(file) for file in copies)
            place = SharePlace(of, directory, (volume,))
            self._publish(replace(self.document, replicas=(place,)))
            self._say(f"node {self.place.rank}: holds a copy of node {of}'s share")

    def hold(self) -> None:
        """Serves until the job ends."""
        while not self.ended(PUBLISH_S):
            pass

    def ended(self, wait_s: float = 0.0) -> bool:
        """Whether to stop, or the job has ended; looks into the folder once a second at most."""
        if self.stop.wait(wait_s) if wait_s else self.stop.is_set():
            return True
        if time.monotonic() - self._ended_s >= PUBLISH_S:
            self._ended_s = time.monotonic()
            with contextlib.suppress(OSError):
                if self.meeting.ended(self._session):
                    self.stop.set()
        return self.stop.is_set()

    def close(self) -> None:
        """Serves no longer, and leaves nothing behind that is not kept."""
        self.stop.set()
        with disk_errors(self.meeting.folder, _AGAIN), contextlib.ExitStack() as stack:
            for opened in (self._listing, self._directories):
                if opened is not None:
                    stack.callback(opened.close)
            if self._kept is not None and not self._kept_whole:
                stack.callback(shutil.rmtree, self._kept, ignore_errors=True)
            for file in self._files:
                stack.callback(file.close)
            self._files = []
            if self._exports is not None:
                stack.callback(self._exports.close)
            if self._session:
                stack.callback(self.meeting.leave, self.place.rank, self._session, answers)
            if self._registrar is not None:
                stack.callback(self._registrar.close)

    # -- meeting ----------------------------------------------------------------------------------

    def _begin(self) -> dict[str, Any]:
        """Node 0: opens the session, lists the source, and looks after the job's document."""
        if self._source is None:
            raise JobError("Node 0 lists the source, but none is given.",
                           next_step="Give it to all nodes: headrace stage SOURCE.")  # fmt: skip
        self._session = self.meeting.open_session(self.place.nodes, job_id(), answers)
        where, fingerprint = self._list()
        address = self.options.address or own_address(self.place.nodes)
        head = {
            "listing": where, "fingerprint": fingerprint, "address": address,
            "source": str(self._source),
        }  # fmt: skip
        self._registrar = Registrar(self.meeting, self._session, self.place.nodes, head)
        return {**head, "session": self._session}

    def _list(self) -> tuple[str, str]:
        """Lists the source, unless it is a store already; returns where, and its fingerprint."""
        source, storage = self._source, self.options.storage_options
        if isinstance(source, (str, os.PathLike)) and is_store(local_path(source), storage):
            with open_store(source, storage_options=storage) as store:
                return store.path, store.fingerprint
        self._say(f"listing {source}")
        index(
            source, self.meeting.listing, checksum=False,
            storage_options=storage, **(self.options.listing or {}),
        )  # fmt: skip
        with open_store(self.meeting.listing, storage_options=storage) as store:
            return str(self.meeting.listing), store.fingerprint

    def _join(self) -> dict[str, Any]:
        """The others: greet, and wait until node 0 has seen it."""
        nonce = self.meeting.greet(self.place.rank, socket.gethostname())
        until_s = time.monotonic() + self.options.meet_s
        while (head := self.meeting.answer(self.place.rank, nonce)) is None:
            if self.stop.wait(POLL_S):
                raise JobError("Stopped before the nodes had met.", path=str(self.meeting.folder))
            if time.monotonic() > until_s:
                raise JobError(
                    f"{self.meeting.folder}: node 0 did not answer node {self.place.rank} within "
                    f"{self.options.meet_s:g} s.",
                    path=str(self.meeting.folder),
                    next_step="Start it there, with the same folder: headrace stage --meet.",
                )
        if head["nodes"] != self.place.nodes:
            raise JobError(
                f"{self.meeting.folder}: node 0 expects {head['nodes']} nodes, node "
                f"{self.place.rank} was told {self.place.nodes}.",
                path=str(self.meeting.folder),
            )
        return head

    # -- the share --------------------------------------------------------------------------------

    def _export_share(self, planned: NodeDocument, share: NodeShare) -> NodeDocument:
        assert self._exports is not None
        if self.options.keep:
            name = f"headrace-share-{self.place.rank:04d}-of-{self.place.nodes}.hr"
            self._kept = self._local / name
            if self._kept.exists():
                raise JobError(
                    f"{self._kept}: stands already, expected room for the share that is to be kept.",
                    path=str(self._kept),
                    next_step="Move it away, or name another folder: --local.",
                )
            self._kept.mkdir(parents=True)
        final = share.columns.crc is not None
        directory = self._file(0, "segment-0000.hrd" if final else None)
        volume = self._file(share.volume_bytes, "segment-0000-0000.hrv")
        entry, page = write_share_directory(share, directory.fd)
        write_all(volume.fd, page, 0)
        _, directory_url = self._exports.add(directory)
        self._nsid, volume_url = self._exports.add(volume, written=0)
        self._share, self._volume = share, volume
        return replace(
            planned, volume_bytes=share.volume_bytes, segment=entry.to_json(),
            place=SharePlace(self.place.rank, directory_url, (volume_url,)),
        )  # fmt: skip

    def _finish_share(self, share: NodeShare, volume: LocalFile, stager: Stager) -> None:
        """All is there: the directory with checksums, and the mark behind the end."""
        assert self.document is not None
        assert self._exports is not None
        assert self.document.place is not None
        place, segment = self.document.place, self.document.segment
        if share.columns.crc is None:
            directory = self._file(0, "segment-0000.hrd")
            entry, page = write_share_directory(share, directory.fd, stager.crc)
            # Readers that know the planned directory still find the same samples at the same places.
            write_all(volume.fd, page, 0)
            _, url = self._exports.add(directory)
            place, segment = replace(place, directory=url), entry.to_json()
        self._exports.set_written(self._nsid, share.volume_bytes)
        assert segment is not None
        if self._kept is not None:  # what is kept is a store of its own
            entry = segment_from_json(segment, str(self._kept))
            page = read_file(self._kept / entry.directory, PAGE_BYTES)
            Manifest(secrets.token_hex(16), fingerprint_of([page]), (entry,)).save(self._kept)
            self._kept_whole = True
        self._publish(replace(
            self.document, state="staged", written=share.volume_bytes, ready=share.samples,
            segment=segment, place=place, files=(volume.path,), source_bytes=stager.source_bytes,
        ))  # fmt: skip
        self._say(
            f"node {self.place.rank}: staged {share.samples:,} samples, {stager.bytes_done:,} bytes; "
            f"{stager.source_bytes:,} bytes read from the source"
        )

    def _file(self, size: int, name: str | None = None) -> LocalFile:
        """A new local file; with this name if the share is kept, else without one."""
        kept = name is not None and self._kept is not None
        file = LocalFile(str(self._kept if kept else self._local), size, name if kept else None)
        self._files.append(file)
        return file

    def _publish_progress(self, stager: Stager, state: str, why: str = "") -> None:
        assert self.document is not None
        self._publish(replace(
            self.document, state=state, why=why, source_bytes=stager.source_bytes,
            written=stager.bytes_done, ready=stager.samples_done,
        ))  # fmt: skip

    def _publish(self, document: NodeDocument) -> None:
        self.document = document
        self._published_s = time.monotonic()
        self.meeting.publish_node(document)


def is_store(where: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Whether a store, packed or indexed, stands at a path or URL."""
    if not is_url(where):
        return os.path.lexists(Path(where) / FILE_NAME)
    try:
        _, engine = manifest_at(where, None, storage_options)
    except StoreNotFound:
        return False
    if engine is not None:
        engine.close()
    return True


@contextlib.contextmanager
def staging(
    source: Any,
    meet: str | os.PathLike[str] | None = None,
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    options: StageOptions | None = None,
) -> Iterator[NodeServer]:
    """Stages and serves this node's share while the block runs. Call it in one process of each node.

    Args:
        source: what is staged: whatever `headrace.index` takes, or a store.
        meet: the meeting folder; HEADRACE_JOB_FOLDER if not given.
        nodes: how many; as the launcher says if not given, else 1.
        node_rank: which of them this is.
        options: everything else.

    Yields:
        The server; its `document` says how far it is.

    Raises:
        HeadraceError: what the server met, when the block ends.
    """
    place = which_node(node_rank, nodes) or NodePlace(0, 1)
    failures: list[BaseException] = []
    with NodeServer(source, Meeting(meeting_folder(meet)), place, options) as server:

        def run() -> None:
            try:
                server.plan()
                server.stage()
                server.replicate()
                server.hold()
            except BaseException as e:  # noqa: BLE001 - raised where the block ends
                failures.append(e)

        thread = threading.Thread(target=run, name="headrace-stage", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stop.set()
            thread.join()
    if failures:
        raise failures[0]
