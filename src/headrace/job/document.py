"""Documents of the meeting folder: what nodes say of themselves, and what the job is.

Plain JSON, read by other programs too (docs/howto/global-store.md has the fields). What is read is
checked before it is believed: the folder may hold files of an earlier job, or half of one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, Self

from headrace.base.documents import DocumentKind
from headrace.errors import JobError
from headrace.store.manifest import segment_from_json

if TYPE_CHECKING:
    from headrace.base.documents import Fields
    from headrace.store.manifest import Segment

__all__ = ["KIND", "JobDocument", "NodeDocument", "Place", "SegmentPlaces"]

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
class Place:
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
    """What a node says of itself: `node-R.json`.

    Attributes:
        session: of the meeting; files of an earlier one have another.
        node: its rank.
        host: its name, for people.
        pid: of its server.
        address: `host:port` of its target.
        nqn: of its subsystem.
        local: the folder on its local disk.
        state: `planned`, `staging`, `staged` or `failed`.
        samples: of its share.
        ready: of them, there already: the first ones.
        volume_bytes: of their volume.
        written: bytes of the volume that are there.
        source_bytes: read from the source so far.
        why: what went wrong, of `failed`.
        segment: the manifest's entry of its share; None for a share without samples.
        place: where its share is read; None as above.
        files: paths of the share's volumes for processes on the node, once it is staged.
        replicas: copies of other nodes' shares that it holds; `node` is the share's.
    """

    session: str
    node: int
    host: str
    pid: int
    address: str
    nqn: str
    local: str
    state: str
    samples: int = 0
    ready: int = 0
    volume_bytes: int = 0
    written: int = 0
    source_bytes: int = 0
    why: str = ""
    segment: dict[str, Any] | None = None
    place: Place | None = None
    files: tuple[str, ...] = ()
    replicas: tuple[Place, ...] = ()

    def to_bytes(self) -> bytes:
        """The file's content."""
        return KIND.encode(asdict(self), indent=1)

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Checks a file's content.

        Raises:
            JobError: it is no such document.
        """
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
            place=None if fields.value("place") is None else Place.of(fields.inner("place")),
            files=fields.texts("files"),
            replicas=tuple(map(Place.of, fields.each("replicas"))),
        )


@dataclass(frozen=True, slots=True)
class SegmentPlaces:
    """A segment of the job and where it lies, in the order in which places are asked."""

    entry: Segment
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDocument:
    """What the job is: `job.json`.

    Attributes:
        session: of the meeting.
        job: the scheduler's id of the job, or the session.
        generation: grows with each change.
        state: `staging`, or `staged` once all shares are.
        nodes: how many there are.
        fingerprint: of the source's listing: equal sources have equal orders.
        source: what was staged, for people.
        listing: the store that lists the source; the last resort of reads.
        segments: in the source's order.
    """

    session: str
    job: str
    generation: int
    state: str
    nodes: int
    fingerprint: str
    source: str
    listing: str
    segments: tuple[SegmentPlaces, ...] = field(default=())

    @property
    def samples(self) -> int:
        """Of all segments."""
        return sum(s.entry.samples for s in self.segments)

    def to_bytes(self) -> bytes:
        """The file's content."""
        out = {f.name: getattr(self, f.name) for f in fields_of(self) if f.name != "segments"}
        out["samples"] = self.samples
        out["segments"] = [
            {"entry": s.entry.to_json(), "places": [asdict(p) for p in s.places]}
            for s in self.segments
        ]
        return KIND.encode(out, indent=1)

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Checks a file's content.

        Raises:
            JobError: it is no such document.
            CorruptStore: a segment's entry contradicts itself.
        """
        fields = KIND.decode(data, path)
        segments = tuple(
            SegmentPlaces(
                segment_from_json(s.inner("entry").plain(), path),
                tuple(map(Place.of, s.each("places"))),
            )
            for s in fields.each("segments")
        )
        return cls(
            **{
                name: fields.text(name)
                for name in ("session", "job", "fingerprint", "source", "listing")
            },
            generation=fields.integer("generation", 0, 1 << 62),
            nodes=fields.integer("nodes", 1, NODES_MAX),
            state=fields.one_of("state", ("staging", "staged")),
            segments=segments,
        )
