"""Tar files as a source, with WebDataset's grouping.

Members whose path agrees up to the first dot of the base name are the parts of one sample: `cats/7.jpg`
and `cats/7.cls` make sample `cats/7` with the parts `jpg` and `cls`. They must stand side by side. A
`cls` part that holds an integer is also the sample's label.

`tarfile` reads headers only, and the members' bytes are used where they lie. A compressed tar has no such
places: it can be packed (front to back) but not indexed. Links, devices and sparse members cannot be samples;
folders and names that begin with a dot are left out.
"""

from __future__ import annotations

import itertools
import tarfile
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory import DirectoryColumns, columns_of, printable
from headrace.store.sources.scan import (
    Problem,
    Scan,
    SourceOptions,
    Stream,
    StreamItem,
    no_samples,
    raise_problems,
    refused,
    shard_labels,
    source_entry,
    unreadable,
)
from headrace.store.sources.shards import (
    Window,
    is_compressed,
    map_files,
    opened,
    read_head,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.store.manifest import VolumeEntry

T = TypeVar("T")

_LABEL_PART = b"cls"
_LABEL_BYTES_MAX = 32
_EXTENSION_BYTES_MAX = 1 << 20  # longest long name or pax header that is believed
_EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
_SPECIAL = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device",
    b"6": "a FIFO", b"M": "a piece of a multi-volume file",
    b"D": "an incremental folder", b"V": "a volume label",
}  # fmt: skip
_STREAM_STEP: Final = 64 << 10


class Member(NamedTuple):
    """A regular file in a tar."""

    name: bytes
    offset: int
    size: int


@dataclass(slots=True)
class _Listing:
    """What one tar file holds: samples, and the extents of their parts, in the file's order."""

    volume: VolumeEntry
    names: list[bytes] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("Q"))
    labels: array[int] = field(default_factory=lambda: array("q"))
    offset: array[int] = field(default_factory=lambda: array("Q"))
    length: array[int] = field(default_factory=lambda: array("Q"))
    parts: list[bytes] = field(default_factory=list)


def open_tar(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Lists tar files; a stream where one is compressed."""
    compressed = any(_is_compressed(path) for path in paths)
    return _stream_tar(paths, options) if compressed else scan_tar(paths, options)


def scan_tar(paths: list[str], options: SourceOptions) -> Scan:
    """Lists uncompressed tar files without reading their members."""
    problems: list[Problem] = []
    prefix = _prefixes(paths, options)
    shards = map_files(paths, lambda p: _scan_shard(p, prefix[p], problems), options.workers)
    problems.sort(key=lambda p: (p.path, p.offset_bytes or 0))
    if options.on_error == "raise":
        raise_problems(paths[0], problems)
    shards = [s for s in shards if s.names]
    if not shards:
        raise no_samples(paths[0])
    _check_keys(shards)
    source = source_entry("tar", paths, options)
    return Scan(_join(shards), tuple(s.volume for s in shards), source, problems)


def _prefixes(paths: list[str], options: SourceOptions) -> dict[str, bytes]:
    """What stands before the keys of each file."""
    if not options.prefix_names:
        return dict.fromkeys(paths, b"")
    return {p: label + b"/" for p, label in zip(paths, shard_labels(paths), strict=True)}


def split_key(name: bytes) -> tuple[bytes, bytes]:
    """WebDataset's (key, part) of a member's name."""
    folder, slash, base = name.rpartition(b"/")
    key, _, part = base.partition(b".")
    return folder + slash + key, part


def _is_compressed(path: str) -> bool:
    try:
        return is_compressed(read_head(path, 8))
    except OSError as e:
        raise unreadable(path, e, "Make it readable.") from e


# -- one tar file -----------------------------------------------------------------------------------


def _scan_shard(path: str, prefix: bytes, problems: list[Problem]) -> _Listing:
    with Window(path) as window:
        listing = _Listing(window.volume())
        for key, parts in grouped(path, _labelled(window, problems)):
            listing.names.append(prefix + key)
            listing.counts.append(len(parts))
            listing.labels.append(next((n for _, (_, n) in parts if n is not None), -1))
            for part, (member, _) in parts:
                listing.parts.append(part)
                listing.offset.append(member.offset)
                listing.length.append(member.size)
    return listing


def _labelled(
    window: Window, problems: list[Problem]
) -> Iterator[tuple[bytes, int, tuple[Member, int | None]]]:
    """The members as `grouped` takes them, with the labels, which are read on the way."""
    for member in read_members(window, problems):
        label = None
        if split_key(member.name)[1] == _LABEL_PART and member.size <= _LABEL_BYTES_MAX:
            label = _parse_label(window.read(member.offset, member.size))
        yield member.name, member.offset, (member, label)


def _parse_label(data: bytes) -> int | None:
    text = data.strip()
    return int(text) if text.removeprefix(b"-").isdigit() and len(text) < 19 else None


def grouped(
    path: str, members: Iterable[tuple[bytes, int | None, T]]
) -> Iterator[tuple[bytes, list[tuple[bytes, T]]]]:
    """Adjacent members (name, offset, content) of one key: the key, and its parts, sorted by name."""
    named = ((*split_key(name), offset, content) for name, offset, content in members)
    for key, group in itertools.groupby(named, lambda member: member[0]):
        parts: dict[bytes, T] = {}
        for _, part, offset, content in group:
            if part in parts:
                where = "" if offset is None else f" (offset {offset:,})"
                raise refused(
                    path, f"sample {printable(key)} has the part {printable(part)} twice{where}.",
                    "Rename or remove one of the two members.", offset,
                )  # fmt: skip
            parts[part] = content
        yield key, sorted(parts.items(), key=lambda item: item[0])


class _Info(tarfile.TarInfo):
    """A header that is sound: the library takes one that is not for the tar's end, and believes all sizes."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as e:
            if buf and not any(buf):
                raise  # zeros are the end
            raise tarfile.ReadError(f"a header is none: {e}") from e
        if info.size < 0 or (info.type in _EXTENSIONS and info.size > _EXTENSION_BYTES_MAX):
            raise tarfile.ReadError(f"a header says {info.size:,} bytes")
        return info

    def _proc_gnusparse_10(self, member: tarfile.TarInfo, *_: object) -> None:
        """Leave the map alone: a sparse file is no sample."""
        member.sparse = []  # type: ignore[assignment]  # typeshed errs


def _members(
    path: str, file: Any, mode: Literal["r:", "r|"], problems: list[Problem],
    take: Callable[[tarfile.TarFile, tarfile.TarInfo], T],
) -> Iterator[tuple[bytes, T]]:  # fmt: skip
    """Names of the regular files of a tar, in its order, and what is taken of each.

    What cannot be a sample goes to `problems`. Raises SourceError if the tar is damaged or cut off.
    """
    at = 0
    try:
        with tarfile.open(
            fileobj=file, mode=mode, tarinfo=_Info, encoding="utf-8", errors="surrogateescape",
            bufsize=_STREAM_STEP,
        ) as tar:  # fmt: skip
            for info in tar:
                tar.members.clear()  # type: ignore[attr-defined]  # they would be kept
                if info.size < 0:
                    raise tarfile.ReadError(f"a header says {info.size} bytes")
                at = tar.offset
                name = _clean(info.name.encode("utf-8", "surrogateescape"))
                if info.isreg() and not info.issparse():
                    if not name.rpartition(b"/")[2].startswith(b"."):
                        yield name, take(tar, info)
                elif not info.isdir():
                    kind = "a sparse file" if info.issparse() else f"a member of type {info.type!r}"
                    what = f"{printable(name)} is {_SPECIAL.get(info.type, kind)}"
                    problems.append(Problem(path, what, info.offset if mode == "r:" else None))
    except (tarfile.TarError, EOFError, OSError, ValueError) as e:
        if isinstance(e, SourceError):
            raise
        place = at if mode == "r:" else None
        raise refused(
            path, f"is no sound tar: {e}{'' if place is None else f' (offset {place:,})'}.",
            "The file is truncated or damaged: fetch it again.", place,
        ) from e  # fmt: skip


def read_members(window: Window, problems: list[Problem]) -> Iterator[Member]:
    """The regular files of a tar, in its order. What cannot be a sample goes to `problems`."""
    places = _members(
        window.path, window.file(), "r:", problems, lambda _, m: (m.offset_data, m.size)
    )
    return (Member(name, *place) for name, place in places)


def _clean(name: bytes) -> bytes:
    """A member's name without a leading `./` or `/`."""
    while name.startswith((b"./", b"/")):
        name = name.removeprefix(b".").lstrip(b"/")
    return name


# -- several tar files ------------------------------------------------------------------------------


def _check_keys(shards: list[_Listing]) -> None:
    """Each key stands once: within a file its members are adjacent, and no two files share one."""
    seen: dict[bytes, str] = {}
    for shard in shards:
        path = shard.volume.path
        for name in shard.names:
            other = seen.setdefault(name, path)
            if other is not path:
                raise refused(
                    path, f"sample {printable(name)} stands in {other} too, expected unique keys.",
                    "Pass prefix_names=True to put the file's name before each key.",
                )  # fmt: skip
        if len(set(shard.names)) < len(shard.names):
            twice = Counter(shard.names).most_common(1)[0][0]
            raise refused(
                path, f"the members of sample {printable(twice)} do not stand side by side.",
                "Write the tar with the members sorted by name.",
            )  # fmt: skip


def _join(shards: list[_Listing]) -> DirectoryColumns:
    labels = np.concatenate([np.array(s.labels, np.int64) for s in shards])
    return columns_of(
        [n for s in shards for n in s.names],
        np.repeat(np.arange(len(shards), dtype=np.uint32), [len(s.offset) for s in shards]),
        np.concatenate([np.array(s.offset, np.uint64) for s in shards]),
        np.concatenate([np.array(s.length, np.uint64) for s in shards]),
        parts=[p for s in shards for p in s.parts],
        counts=np.concatenate([np.array(s.counts, np.uint64) for s in shards]),
        labels=labels if int(labels.max()) >= 0 else None,
    )


# -- compressed -------------------------------------------------------------------------------------


def _stream_tar(paths: list[str], options: SourceOptions) -> Stream:
    source = source_entry("compressed tar", paths, options)
    skipped: list[Problem] = []

    def items() -> Iterator[StreamItem]:
        skipped.clear()
        prefix = _prefixes(paths, options)
        for path in paths:
            members = ((name, None, data) for name, data in _stream_members(path, options, skipped))
            for key, parts in grouped(path, members):
                text = dict(parts).get(_LABEL_PART)
                label = None if text is None else _parse_label(text)
                yield StreamItem(prefix[path] + key, tuple(parts), -1 if label is None else label)

    return Stream(items, source, skipped=skipped)


def _stream_members(
    path: str, options: SourceOptions, skipped: list[Problem]
) -> Iterator[tuple[bytes, bytes]]:
    with opened(path) as f:
        for member in _members(path, f, "r|", skipped, _content):
            if options.on_error == "raise":
                raise_problems(path, skipped)
            yield member
        while f.read(_STREAM_STEP):
            pass  # behind the tar's end stands the checksum of all
    if options.on_error == "raise":
        raise_problems(path, skipped)


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    assert file is not None  # a regular file
    return file.read()
