"""The manifest, `store.json`: which segments and volumes make up a store.

Loading trusts nothing: size cap, checksum, types, counts and path rules are checked before any
file that it names is touched. Saving replaces the file atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.base.checksum import crc32c
from headrace.base.documents import DocumentKind, Fields
from headrace.base.files import read_file, remove_leftovers, replace_file
from headrace.errors import CorruptStore, StoreNotFound, VolumeError
from headrace.io.objects.location import is_url
from headrace.store.format import PAGE_BYTES, SAMPLES_MAX

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.store.format import DirectoryHeader

FILE_NAME = "store.json"
BYTES_MAX = 64 << 20
SEGMENTS_MAX = 10_000

_ETAG_CHARACTERS_MAX = 1024
_HEX = re.compile(r"[0-9a-f]{32}")
_HEX_DIGITS = "32 hexadecimal digits"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_KIND = DocumentKind(
    name="the manifest",
    version=1,
    error=CorruptStore,
    next_step="Restore the manifest from a copy, or pack or index the source again.",
)
"""Its checksum is over the content, not over the text: see docs/format.md."""


@dataclass(frozen=True, slots=True)
class VolumeEntry:
    """One volume of a segment."""

    kind: str  # `packed`, `file`, `tree` or `object` (somebody's object, named by its URL)
    path: str  # absolute, or relative to the store's folder
    bytes: int | None = None  # exact size; None for a tree
    mtime_ns: int | None = None
    """Modification time of a `file`, and of an `object` where known; else None."""
    uuid: str | None = None  # 32 hexadecimal digits of a `packed` volume; else None
    etag: str | None = None  # version of an `object` as its store names it, where known; else None


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: a directory and its volumes."""

    directory: str
    directory_bytes: int
    uuid: str
    samples: int
    extents: int
    volumes: tuple[VolumeEntry, ...]
    source: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `store.json`: without what is None."""

        def known(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {k: list(v) if isinstance(v, tuple) else v for k, v in items if v is not None}

        return asdict(self, dict_factory=known)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of `store.json`."""

    uuid: str
    fingerprint: str
    segments: tuple[Segment, ...]

    @property
    def samples(self) -> int:
        """Samples of all segments."""
        return sum(s.samples for s in self.segments)

    def to_bytes(self) -> bytes:
        """The file's content, checksum included."""
        document = {
            "format": "headrace-store",
            "version": 1,
            "uuid": self.uuid,
            "fingerprint": self.fingerprint,
            "samples": self.samples,
            "segments": [s.to_json() for s in self.segments],
        }
        document["crc32c"] = _document_crc(document)
        return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"

    def save(self, folder: Path) -> None:
        """Replaces the folder's `store.json` atomically and durably."""
        data = self.to_bytes()
        if len(data) > BYTES_MAX:
            raise VolumeError(
                f"{folder / FILE_NAME} would take {len(data):,} bytes, expected at most "
                f"{BYTES_MAX:,}.",
                path=str(folder),
                next_step="Use fewer, larger volumes, or several stores.",
            )
        remove_leftovers(folder)
        replace_file(folder / FILE_NAME, data)


def segment_of_header(
    directory: str,
    header: DirectoryHeader,
    volumes: tuple[VolumeEntry, ...],
    source: dict[str, Any],
) -> Segment:
    """The entry of a segment whose directory was written as the file `directory`."""
    return Segment(
        directory, header.file_bytes, header.uuid.hex(), header.samples, header.extents,
        volumes, source,
    )  # fmt: skip


def fingerprint_of(header_pages: list[bytes]) -> str:
    """The fingerprint of segments with these header pages: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for page in header_pages:
        digest.update(page[:PAGE_BYTES])
    return digest.hexdigest()[:32]


def load_manifest(folder: str | Path) -> Manifest:
    """Loads and checks `store.json` of a store's folder.

    Raises StoreNotFound if there is none, and CorruptStore if it is damaged or contradicts itself.
    """
    path = os.path.join(os.fspath(folder), FILE_NAME)
    try:
        data = read_file(path, BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFound(
            f"{path}: there is no store here.",
            path=path,
            next_step="Make one with headrace.pack() or headrace.index().",
        ) from None
    except OSError as e:
        raise VolumeError(
            f"{path}: cannot be read: {e.strerror}.",
            path=path,
            errno=e.errno,
            next_step="Check the file's permissions and its disk.",
        ) from e
    if len(data) > BYTES_MAX:
        _KIND.refuse(path, "the size", f"more than {BYTES_MAX:,} bytes", f"at most {BYTES_MAX:,}")
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Checks the content of a `store.json`."""
    try:
        document = json.loads(data)
        stated = document.pop("crc32c", None)
        computed = _document_crc(document)
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        _KIND.refuse(path, "the text", f"unreadable ({e})", "a JSON object")
    if computed != stated:
        _KIND.refuse(path, "the checksum", str(computed), stated)
    fields = Fields(_KIND, path, document)
    fields.one_of("format", ["headrace-store"])
    fields.integer("version", 1, 1)
    segments = tuple(_segment(each) for each in fields.each("segments", 1, SEGMENTS_MAX))
    samples = sum(s.samples for s in segments)
    fields.integer("samples", samples, samples)
    names = [s.directory for s in segments]
    names += [v.path for s in segments for v in s.volumes if v.kind == "packed"]
    if len(set(names)) != len(names):
        fields.refuse("segments", "each file name once")
    return Manifest(
        fields.matching("uuid", _HEX, _HEX_DIGITS),
        fields.matching("fingerprint", _HEX, _HEX_DIGITS),
        segments,
    )


def segment_from_json(entry: Any, path: str) -> Segment:
    """Checks a segment's entry that stands in another document, `path`."""
    if not isinstance(entry, dict):
        _KIND.refuse(path, "entry", entry, "an object")
    return _segment(Fields(_KIND, path, entry, "entry."))


def _segment(fields: Fields) -> Segment:
    samples = fields.integer("samples", 0, SAMPLES_MAX)
    return Segment(
        directory=_file_name(fields, "directory"),
        directory_bytes=fields.integer("directory_bytes", 0, 1 << 62),
        uuid=fields.matching("uuid", _HEX, _HEX_DIGITS),
        samples=samples,
        extents=fields.integer("extents", samples, SAMPLES_MAX * 16),
        volumes=tuple(_volume(each) for each in fields.each("volumes", 1)),
        source=fields.inner("source").plain() if "source" in fields else {},
    )


def _volume(fields: Fields) -> VolumeEntry:
    kind = fields.one_of("kind", ("packed", "file", "tree", "object"))
    path = _file_name(fields, "path") if kind == "packed" else fields.text("path")
    if not path or "\0" in path or (kind == "object" and not is_url(path)):
        fields.refuse("path", "a URL" if kind == "object" else "a path")
    mtime = etag = None
    if kind == "file" or (kind == "object" and "mtime_ns" in fields):
        mtime = fields.integer("mtime_ns", 1 - (1 << 63), (1 << 63) - 1)
    if kind == "object" and fields.value("etag") is not None:
        etag = fields.text("etag", characters_max=_ETAG_CHARACTERS_MAX)
        if not etag.isprintable():
            fields.refuse("etag", "an etag")
    return VolumeEntry(
        kind,
        path,
        None if kind == "tree" else fields.integer("bytes", 0, 1 << 62),
        mtime,
        fields.matching("uuid", _HEX, _HEX_DIGITS) if kind == "packed" else None,
        etag,
    )


def _file_name(fields: Fields, key: str) -> str:
    """A file in the store's own folder: a plain name that cannot lead out of it."""
    return fields.matching(key, _FILE, "a file name without '/'")


def _document_crc(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{crc32c(canonical.encode('ascii')):08x}"
