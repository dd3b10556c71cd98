"""Meeting: the shared folder in which a job's nodes find each other. No server, no locks.

    FOLDER/
      meeting.json   node 0: the session, the source, and whose greetings it has seen
      hello-R.json   node R: a nonce, so that it can tell that node 0 lives now
      node-R.json    node R: its share, address and progress (`NodeDocument`)
      job.json       node 0, when all nodes have planned: what readers open (`JobDocument`)
      agreed-*.json  whoever comes first: what all must see alike
      ended          whoever ends the job
      listing/       node 0: the source's directory, unless the source is a store already

The folder is this user's alone (mode 0700): who can read it can read the samples. Every file is replaced as
a whole, and all of it works on file systems without locks. A folder may hold what a killed job left: node 0
takes it over when nobody serves it any more, and the others believe a `meeting.json` only once it repeats
the nonce that they have just written. The documents are plain JSON, read by other programs too
(docs/howto/global-store.md has the fields), and are checked before they are believed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headrace.base.documents import DocumentKind
from headrace.base.files import (
    NewFile,
    is_temporary,
    make_folder,
    read_file,
    remove_leftovers,
    replace_file,
)
from headrace.errors import JobError, VolumeError
from headrace.store.manifest import segment_from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.base.documents import Fields
    from headrace.store.manifest import Segment

NODES_MAX = 1 << 20
KIND = DocumentKind(
    name="a document of the meeting folder",
    version=2,
    unchecked=1,
    error=JobError,
    next_step="Take another meeting folder, or end the job there: headrace stage --end.",
    bytes_max=64 << 20,
)


@dataclass(frozen=True, slots=True)
class SharePlace:
    """Where a segment can be read: the URL of its directory and of each of its volumes."""

    node: int
    directory: str
    volumes: tuple[str, ...]

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """From JSON."""
        return cls(
            fields.integer("node", 0, NODES_MAX), fields.text("directory"), fields.texts("volumes")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDocument:
    """What a node says of itself: `node-R.json`."""

    session: str  # of the meeting; files of an earlier one have another
    node: int  # its rank
    host: str
    pid: int
    address: str  # of its target
    nqn: str  # of its subsystem
    local: str  # the folder on its local disk
    state: str  # `planned`, `staging`, `staged` or `failed`
    samples: int = 0
    ready: int = 0  # the first samples of its share, which are there already
    volume_bytes: int = 0
    written: int = 0  # bytes of the share's volume that are there
    source_bytes: int = 0  # read from the source so far
    why: str = ""
    segment: dict[str, Any] | None = None
    """The manifest's entry of its share; None for a share without samples, as `place`."""
    place: SharePlace | None = None
    files: tuple[str, ...] = ()
    """Paths of the share's volumes for processes on the node, once it is staged."""
    replicas: tuple[SharePlace, ...] = ()
    """Copies of other nodes' shares that it holds; `node` is the share's."""

    def to_bytes(self) -> bytes:
        """The file's content."""
        return KIND.encode(asdict(self), indent=1)

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Checks a file's content; raises JobError if it is no such document."""
        fields = KIND.decode(data, path)
        texts = ("session", "host", "address", "nqn", "local", "why")
        counts = ("pid", "samples", "ready", "volume_bytes", "written", "source_bytes")
        values: dict[str, Any] = {name: fields.text(name) for name in texts}
        values |= {name: fields.integer(name, 0, 1 << 62) for name in counts}
        return cls(
            **values,
            node=fields.integer("node", 0, NODES_MAX),
            state=fields.one_of("state", ("planned", "staging", "staged", "failed")),
            segment=None if fields.value("segment") is None else fields.inner("segment").plain(),
            place=None if fields.value("place") is None else SharePlace.of(fields.inner("place")),
            files=fields.texts("files"),
            replicas=tuple(map(SharePlace.of, fields.each("replicas"))),
        )


@dataclass(frozen=True, slots=True)
class SegmentPlaces:
    """A segment of the job and where it lies, in the order in which places are asked."""

    entry: Segment
    places: tuple[SharePlace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDocument:
    """What the job is: `job.json`."""

    session: str
    job: str  # the scheduler's id of the job, or the session
    generation: int  # grows with each change
    state: str  # `staging`, or `staged` once all shares are
    nodes: int
    fingerprint: str  # of the source's listing: equal sources have equal orders
    source: str  # what was staged, for people
    listing: str  # the store that lists the source; the last resort of reads
    segments: tuple[SegmentPlaces, ...] = field(default=())  # in the source's order

    @property
    def samples(self) -> int:
        """Of all segments."""
        return sum(s.entry.samples for s in self.segments)

    def to_bytes(self) -> bytes:
        """The file's content."""
        out = {f.name: getattr(self, f.name) for f in fields_of(self) if f.name != "segments"}
        segments = [
            {"entry": s.entry.to_json(), "places": [asdict(p) for p in s.places]}
            for s in self.segments
        ]
        return KIND.encode({**out, "samples": self.samples, "segments": segments}, indent=1)

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Checks a file's content.

        Raises JobError if it is no such document, and CorruptStore if a segment's entry contradicts
        itself.
        """
        fields = KIND.decode(data, path)
        segments = tuple(
            SegmentPlaces(
                segment_from_json(s.inner("entry").plain(), path),
                tuple(map(SharePlace.of, s.each("places"))),
            )
            for s in fields.each("segments")
        )
        texts = ("session", "job", "fingerprint", "source", "listing")
        return cls(
            **{name: fields.text(name) for name in texts},
            generation=fields.integer("generation", 0, 1 << 62),
            nodes=fields.integer("nodes", 1, NODES_MAX),
            state=fields.one_of("state", ("staging", "staged")),
            segments=segments,
        )


FOLDER_VARIABLE = "HEADRACE_JOB_FOLDER"
POLL_S = 0.1  # how often files are looked for: a look-up of one name, also on a network file system
_OURS = ("meeting.json", "job.json", "ended")
_NUMBERED = ("hello-", "node-", "agreed-")


def meeting_folder(
    given: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """The folder as given, else as HEADRACE_JOB_FOLDER says; raises JobError if nobody says."""
    folder = given or environment.get(FOLDER_VARIABLE)
    if not folder:
        raise JobError(
            "The job's meeting folder is not given.",
            next_step=f"Set {FOLDER_VARIABLE} to a folder that all nodes see, or pass it: "
            "headrace stage --meet FOLDER, headrace.open('headrace:///FOLDER').",
        )
    return Path(folder).absolute()


class Meeting:
    """The files of one folder. Reads and writes; waits only where it says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def listing(self) -> Path:
        """Where node 0 lists a source that is no store."""
        return self.folder / "listing"

    # -- node 0 -----------------------------------------------------------------------------------

    def open_session(
        self, nodes: int, job: str | None, alive: Callable[[NodeDocument], bool]
    ) -> str:
        """Begins a session; takes a folder over that nobody serves any more.

        `alive` says whether the server that a document speaks of still answers.

        Raises JobError if a living job has the folder, or something else lies in it.
        """
        self._make_folder()
        remove_leftovers(self.folder)
        ours = ("listing", *_OURS, *_NUMBERED)
        strange = [
            p.name for p in self.folder.iterdir()
            if not p.name.startswith(ours) and not is_temporary(p.name)
        ]  # fmt: skip
        if strange:
            raise JobError(
                f"{self.folder}: {strange[0]!r} and {len(strange) - 1} others lie there, expected a "
                "folder for this job alone.",
                path=str(self.folder),
                next_step="Name a new folder: --meet.",
            )
        for document in self.nodes().values():
            if alive(document):
                raise JobError(
                    f"{self.folder}: another job meets here: node {document.node} of session "
                    f"{document.session} answers at {document.address}.",
                    path=str(self.folder),
                    next_step="Name another folder, or end that job: headrace stage --end --meet "
                    f"{self.folder}",
                )
        # Greetings stay: this job's own nodes may have come first.
        for path in self._files():
            if not path.name.startswith("hello-"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.listing, ignore_errors=True)
        session = secrets.token_hex(8)
        self._write("meeting.json", {"session": session, "job": job, "nodes": nodes, "seen": {}})
        return session

    def announce(self, session: str, **more: Any) -> None:
        """Repeats the nonces of all greetings, and says what else the nodes must know.

        Nothing is said in a folder that is another session's by now, or nobody's.
        """
        before = self.head()
        if before is None or before.get("session") != session:
            return
        seen = {}
        for path in self._files("hello-"):
            if (hello := self._read(path.name)) is not None:
                seen[str(hello.get("node"))] = hello.get("nonce")
        after = {**before, **more, "seen": seen}
        if after != before:
            self._write("meeting.json", after)

    # -- the others -------------------------------------------------------------------------------

    def greet(self, node: int, host: str) -> str:
        """Says that node `node` is here; returns its nonce."""
        self._make_folder()
        nonce = secrets.token_hex(8)
        self._write(f"hello-{node}.json", {"node": node, "nonce": nonce, "host": host})
        return nonce

    def head(self) -> dict[str, Any] | None:
        """`meeting.json` as it is; None while there is none."""
        return self._read("meeting.json")

    def answer(self, node: int, nonce: str) -> dict[str, Any] | None:
        """`meeting.json`, once node 0 has seen our greeting and listed the source; else None."""
        head = self.head()
        if head is None or head.get("seen", {}).get(str(node)) != nonce or "listing" not in head:
            return None
        return head

    # -- everybody --------------------------------------------------------------------------------

    def publish_node(self, document: NodeDocument) -> None:
        """Replaces a node's document."""
        self._replace(f"node-{document.node}.json", document.to_bytes())

    def publish_job(self, document: JobDocument) -> None:
        """Replaces the job's document."""
        self._replace("job.json", document.to_bytes())

    def nodes(self, session: str | None = None) -> dict[int, NodeDocument]:
        """The nodes' documents by rank, of one session or of any."""
        out = {}
        for path in self._files("node-"):
            with contextlib.suppress(JobError):
                if (data := self._bytes(path.name)) is not None:
                    document = NodeDocument.parse(data, str(path))
                    if session in (None, document.session):
                        out[document.node] = document
        return out

    def job(self) -> JobDocument | None:
        """The job's document; None while there is none; raises JobError if it cannot be understood."""
        data = self._bytes("job.json")
        return None if data is None else JobDocument.parse(data, str(self.folder / "job.json"))

    def agree(
        self, name: str, session: str, proposal: tuple[tuple[int, int], ...]
    ) -> tuple[tuple[int, int], ...]:
        """What the first process of the session proposed under `name`: to all the same."""
        target = self.folder / f"agreed-{session}-{name}.json"
        if not target.exists():
            with NewFile(target) as new, contextlib.suppress(FileExistsError):
                os.write(new.fd, KIND.encode({"agreed": proposal}))
                new.publish(sync=False, replace=False)  # whole or not at all, and once
        fields = KIND.decode(read_file(target, KIND.bytes_max + 1), str(target))
        try:
            return tuple((int(a), int(b)) for a, b in fields.value("agreed"))
        except (TypeError, ValueError):
            fields.refuse("agreed", "pairs of integers")

    def wait_for_job(self, deadline_s: float) -> JobDocument:
        """The job's document; waits for it.

        Raises JobError if it does not come; says who is missing.
        """
        until_s = time.monotonic() + deadline_s
        while (document := self.job()) is None and time.monotonic() < until_s:
            time.sleep(POLL_S)
        if document is not None:
            return document
        head = self.head()
        if head is None:
            raise JobError(
                f"{self.folder}: no job meets here (waited {deadline_s:g} s).",
                path=str(self.folder),
                next_step="Start `headrace stage SOURCE --meet` on every node first.",
            )
        there = self.nodes(head.get("session"))
        missing = [str(r) for r in range(int(head.get("nodes", 0))) if r not in there]
        raise JobError(
            f"{self.folder}: the job has not begun: "
            f"{'nodes ' + ', '.join(missing) + ' are' if missing else 'node 0 is'} missing "
            f"(waited {deadline_s:g} s).",
            path=str(self.folder),
            next_step="Look at `headrace stage` on these nodes.",
        )

    def end(self, session: str) -> None:
        """Says that the job has ended."""
        self._write("ended", {"session": session})

    def ended(self, session: str) -> bool:
        """Whether somebody said so; also when the folder is gone, or another session has it."""
        ended = self._read("ended")
        return (ended or {}).get("session") == session or not self._is_ours(session)

    def _is_ours(self, session: str) -> bool:
        head = self.head()
        return head is not None and head.get("session") == session

    def leave(self, node: int, session: str, alive: Callable[[NodeDocument], bool]) -> None:
        """Removes what node `node` wrote; the last one that lives removes the rest, the folder too."""
        if not self._is_ours(session):
            return
        for name in (f"node-{node}.json", f"hello-{node}.json"):
            (self.folder / name).unlink(missing_ok=True)
        others = self.nodes(session).values()
        # Whoever does not answer may only be out of our reach: without an end that somebody called, its
        # files stay.
        if others and (not self.ended(session) or any(map(alive, others))):
            return
        for path in self._files():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.listing, ignore_errors=True)
        try:
            remove_leftovers(self.folder)
            self.folder.rmdir()
        except OSError:
            # Somebody who lives was just writing, and has to hear of the end.
            if self._files(unfinished=True):
                self.end(session)

    # -- files ------------------------------------------------------------------------------------

    def _files(self, prefix: str = "", *, unfinished: bool = False) -> list[Path]:
        names = []
        with contextlib.suppress(FileNotFoundError):
            names = sorted(path.name for path in self.folder.iterdir())
        starts = prefix or (*_OURS, *_NUMBERED)
        return [
            self.folder / name for name in names
            if name.startswith(starts) or (unfinished and is_temporary(name))
        ]  # fmt: skip

    def _make_folder(self) -> None:
        """Makes the folder, or closes it to others, if it is this user's.

        Raises JobError if others may enter it, and it is not ours to close.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(self.folder, mode=0o700, exist_ok=True)
        status = self.folder.stat()
        if status.st_mode & 0o077:
            if status.st_uid != os.geteuid():
                raise JobError(
                    f"{self.folder}: mode is {status.st_mode & 0o777:04o} and user {status.st_uid}, expected "
                    f"mode 0700 of user {os.geteuid()}.",
                    path=str(self.folder),
                    next_step="Name a folder that does not exist yet: --meet.",
                )
            self.folder.chmod(0o700)

    def _bytes(self, name: str) -> bytes | None:
        try:
            return read_file(self.folder / name, KIND.bytes_max + 1)
        except FileNotFoundError:
            return None
        except VolumeError:
            raise
        except OSError as e:
            raise VolumeError(
                f"{self.folder / name}: cannot be read: {e.strerror}.",
                path=str(self.folder / name),
                errno=e.errno,
                next_step="Check the shared file system of the meeting folder.",
            ) from e

    def _read(self, name: str) -> dict[str, Any] | None:
        data = self._bytes(name)
        return None if data is None else KIND.decode(data, str(self.folder / name)).plain()

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        self._replace(name, KIND.encode(data, indent=1))

    def _replace(self, name: str, data: bytes) -> None:
        """Replaces a file as a whole. Not synced: after a power cut the job is gone anyway."""
        replace_file(self.folder / name, data, sync=False)
