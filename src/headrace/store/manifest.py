"""The manifest, `store.json`: which segments and volumes make up a store.

Loading trusts nothing: size cap, checksum, types, counts and path rules are checked before any
file that it names is touched. Saving replaces the file atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.base.checksum import crc32c
from headrace.base.files import read_file, remove_leftovers, replace_file
from headrace.errors import CorruptStore, StoreNotFound, VolumeError
from headrace.io.objects.location import is_url
from headrace.store.format import PAGE_BYTES, SAMPLES_MAX, corrupt

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from headrace.store.sources.scan import SourceVolume

FILE_NAME = "store.json"
BYTES_MAX = 64 << 20
SEGMENTS_MAX = 10_000

_KINDS = ("packed", "file", "tree", "object")
_ETAG_CHARACTERS_MAX = 1024
_HEX = re.compile(r"[0-9a-f]{32}\Z")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True, slots=True)
class VolumeEntry:
    """One volume of a segment.

    Attributes:
        kind: `packed`, `file`, `tree` or `object` (somebody's object, named by its URL).
        path: absolute, or relative to the store's folder.
        bytes: exact size; None for a tree.
        mtime_ns: modification time of a `file`, and of an `object` where known; else None.
        uuid: 32 hexadecimal digits of a `packed` volume; else None.
        etag: version of an `object` as its store names it, where known; else None.
    """

    kind: str
    path: str
    bytes: int | None = None
    mtime_ns: int | None = None
    uuid: str | None = None
    etag: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in `store.json`."""
        keys = ("kind", "path", "bytes", "mtime_ns", "uuid", "etag")
        return {k: getattr(self, k) for k in keys if getattr(self, k) is not None}


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
        """As it stands in `store.json`."""
        return {
            "directory": self.directory,
            "directory_bytes": self.directory_bytes,
            "uuid": self.uuid,
            "samples": self.samples,
            "extents": self.extents,
            "volumes": [v.to_json() for v in self.volumes],
            "source": self.source,
        }


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

    def first_segments(self, count: int, fingerprint: str) -> Manifest:
        """The store as it was when it had `count` segments."""
        return replace(self, segments=self.segments[:count], fingerprint=fingerprint)


def volume_entries(volumes: Iterable[SourceVolume]) -> tuple[VolumeEntry, ...]:
    """A source's volumes as a manifest records them."""
    return tuple(VolumeEntry(v.kind, v.path, v.bytes, v.mtime_ns, etag=v.etag) for v in volumes)


def fingerprint_of(header_pages: list[bytes]) -> str:
    """The fingerprint of segments with these header pages: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for page in header_pages:
        digest.update(page[:PAGE_BYTES])
    return digest.hexdigest()[:32]


def load_manifest(folder: str | Path) -> Manifest:
    """Loads and checks `store.json` of a store's folder.

    Raises:
        StoreNotFound: there is none.
        CorruptStore: it is damaged or contradicts itself.
    """
    path = os.path.join(os.fspath(folder), FILE_NAME)
    return parse_manifest(_read(path), path)


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Checks the content of a `store.json`.

    Raises:
        CorruptStore: it is damaged or contradicts itself.
    """
    try:
        document = json.loads(data)
        stated = document.pop("crc32c", None)
        computed = _document_crc(document)
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise corrupt(
            path, "manifest", found=f"unreadable ({e})", expected="a JSON object"
        ) from None
    if computed != stated:
        raise corrupt(path, "manifest checksum", found=computed, expected=stated)
    return _Checker(path).manifest(document)


def segment_from_json(entry: Any, path: str) -> Segment:
    """Checks a segment's entry that stands in another document, `path`.

    Raises:
        CorruptStore: it contradicts itself.
    """
    return _Checker(path).segment(entry, "entry")


def _read(path: str) -> bytes:
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
        raise corrupt(
            path, "manifest size in bytes", found=f"more than {BYTES_MAX:,}",
            expected=f"at most {BYTES_MAX:,}",
        )  # fmt: skip
    return data


def _document_crc(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{crc32c(canonical.encode('ascii')):08x}"


class _Checker:
    """Turns a parsed document into a `Manifest`, or says what is wrong in it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def manifest(self, document: dict[str, Any]) -> Manifest:
        self._expect(document.get("format") == "headrace-store", "format", document.get("format"),
                     "headrace-store")  # fmt: skip
        self._expect(document.get("version") == 1, "version", document.get("version"), 1)
        entries = self._list(document, "segments", 1, SEGMENTS_MAX)
        segments = tuple(self.segment(s, f"segments[{i}]") for i, s in enumerate(entries))
        manifest = Manifest(
            self._hex(document, "uuid"), self._hex(document, "fingerprint"), segments
        )
        samples = self._number(document, "samples", SAMPLES_MAX)
        self._expect(samples == manifest.samples, "samples", samples, manifest.samples)
        names = [s.directory for s in segments]
        names += [v.path for s in segments for v in s.volumes if v.kind == "packed"]
        self._expect(len(set(names)) == len(names), "file names", "one twice", "each once")
        return manifest

    def segment(self, entry: Any, where: str) -> Segment:
        """One segment's entry."""
        self._expect(isinstance(entry, dict), where, type(entry).__name__, "an object")
        volumes = self._list(entry, "volumes", 1, 1 << 32, where)
        source = entry.get("source", {})
        self._expect(isinstance(source, dict), f"{where}.source", source, "an object")
        samples = self._number(entry, "samples", SAMPLES_MAX, where)
        extents = self._number(entry, "extents", SAMPLES_MAX * 16, where)
        self._expect(extents >= samples, f"{where}.extents", extents, f"{samples} or more")
        return Segment(
            directory=self._file_name(entry, "directory", where),
            directory_bytes=self._number(entry, "directory_bytes", 1 << 62, where),
            uuid=self._hex(entry, "uuid", where),
            samples=samples,
            extents=extents,
            volumes=tuple(self._volume(v, f"{where}.volumes[{i}]") for i, v in enumerate(volumes)),
            source=source,
        )

    def _volume(self, entry: Any, where: str) -> VolumeEntry:
        self._expect(isinstance(entry, dict), where, type(entry).__name__, "an object")
        kind = entry.get("kind")
        self._expect(kind in _KINDS, f"{where}.kind", kind, _KINDS)
        if kind == "packed":
            path = self._file_name(entry, "path", where)
        else:
            path = entry.get("path")
            good = isinstance(path, str) and path != "" and "\0" not in path
            self._expect(good, f"{where}.path", path, "a path")
            self._expect(kind != "object" or is_url(path), f"{where}.path", path, "a URL")
        size = None if kind == "tree" else self._number(entry, "bytes", 1 << 62, where)
        mtime = None
        if kind == "file" or (kind == "object" and "mtime_ns" in entry):
            mtime = entry.get("mtime_ns")
            good = isinstance(mtime, int) and not isinstance(mtime, bool) and abs(mtime) < 1 << 63
            self._expect(good, f"{where}.mtime_ns", mtime, "an integer")
        uuid = self._hex(entry, "uuid", where) if kind == "packed" else None
        etag = entry.get("etag") if kind == "object" else None
        good = etag is None or (isinstance(etag, str) and len(etag) <= _ETAG_CHARACTERS_MAX)
        self._expect(good and (etag or "").isprintable(), f"{where}.etag", etag, "an etag")
        return VolumeEntry(str(kind), str(path), size, mtime, uuid, etag)

    def _file_name(self, entry: dict[str, Any], key: str, where: str) -> str:
        """A file in the store's own folder: a plain name that cannot lead out of it."""
        value = entry.get(key)
        good = isinstance(value, str) and len(value) < 256 and _FILE.match(value) is not None
        self._expect(good, f"{where}.{key}", value, "a file name without '/'")
        return str(value)

    def _hex(self, entry: dict[str, Any], key: str, where: str = "store") -> str:
        value = entry.get(key)
        good = isinstance(value, str) and _HEX.match(value) is not None
        self._expect(good, f"{where}.{key}", value, "32 hexadecimal digits")
        return str(value)

    def _number(self, entry: dict[str, Any], key: str, limit: int, where: str = "store") -> int:
        value = entry.get(key)
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit
        self._expect(good, f"{where}.{key}", value, f"an integer from 0 to {limit}")
        return int(value)  # type: ignore[arg-type]  # checked the line before

    def _list(
        self, entry: dict[str, Any], key: str, low: int, high: int, where: str = "store"
    ) -> list[Any]:
        value = entry.get(key)
        good = isinstance(value, list) and low <= len(value) <= high
        found = len(value) if isinstance(value, list) else value
        self._expect(good, f"{where}.{key}", found, f"a list of {low} to {high}")
        return list(value or [])

    def _expect(self, ok: bool, what: str, found: object, expected: object) -> None:
        if not ok:
            shown = repr(found)
            raise CorruptStore(
                f"{self._path}: {what} is {shown[:200]}, expected {expected}.",
                path=self._path,
                next_step="Restore the manifest from a copy, or pack or index the source again.",
            )
