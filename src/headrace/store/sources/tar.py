"""Tar files as a source, with WebDataset's grouping.

Members whose path agrees up to the first dot of the base name are the parts of one sample: `cats/7.jpg`
and `cats/7.cls` make sample `cats/7` with the parts `jpg` and `cls`. They must stand side by side. A
`cls` part that holds an integer is also the sample's label.

Only headers are read, and the members' bytes are used where they lie. A compressed tar has no such
places: it can be packed (front to back, through `tarfile`) but not indexed. Links, devices and sparse
members cannot be samples; folders and names that begin with a dot are left out.
"""

from __future__ import annotations

import itertools
import tarfile
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self, TypeVar

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory import DirectoryColumns, columns_of, printable
from headrace.store.sources.scan import (
    Problem,
    Scan,
    SourceOptions,
    Stream,
    StreamItem,
    damaged,
    no_samples,
    raise_problems,
    refused,
    shard_labels,
    source_entry,
    unreadable,
)
from headrace.store.sources.shards import Window, is_compressed, map_files, opened, read_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.store.manifest import VolumeEntry

T = TypeVar("T")

_BLOCK = 512
_EXTENSION_BYTES_MAX = 1 << 20  # longest long name or pax header that is believed
_LABEL_PART = b"cls"
_LABEL_BYTES_MAX = 32
_EXTENSION_KINDS = (b"L", b"K", b"x", b"g", b"X")
_REGULAR_KINDS = (b"0", b"\0", b"7")
_FOLDER_KIND = b"5"
_SPECIAL = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device",
    b"6": "a FIFO", b"S": "a sparse file", b"M": "a piece of a multi-volume file",
    b"D": "an incremental folder", b"V": "a volume label",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
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


def read_members(window: Window, problems: list[Problem]) -> Iterator[Member]:
    """The regular files of a tar, in its order. What cannot be a sample goes to `problems`."""
    at = 0
    common: dict[bytes, bytes] = {}  # what extension headers say of all members that follow
    own: dict[bytes, bytes] = {}  # and of the next one
    while header := _next_header(window, at):
        kind, size = header[156:157], _number(window.path, header[124:136], at)
        data = at + _BLOCK
        if kind in _EXTENSION_KINDS:
            _read_extension(window, kind, data, size, common if kind == b"g" else own)
            at = data + -(-size // _BLOCK) * _BLOCK
            continue
        stated, own = common | own, {}
        if b"size" in stated:  # its header has no room for it
            size = _pax_size(window.path, stated[b"size"], at)
        name = stated.get(b"path") or _short_name(header)
        if data + size > window.size:
            raise damaged(
                window.path, f"end of member {printable(name)}", f"{data + size:,}",
                f"at most the file's size {window.size:,}", at,
            )  # fmt: skip
        if any(key.startswith(b"GNU.sparse") for key in stated):
            kind = b"S"  # its bytes have holes that are not in the file
        if kind in _REGULAR_KINDS and not name.endswith(b"/"):
            if not name.rpartition(b"/")[2].startswith(b"."):
                yield Member(_clean(name), data, size)
        elif kind != _FOLDER_KIND and not name.endswith(b"/"):
            what = _SPECIAL.get(kind, f"a member of type {kind!r}")
            problems.append(Problem(window.path, f"{printable(name)} is {what}", at))
        at = data + -(-size // _BLOCK) * _BLOCK


def _next_header(window: Window, at: int) -> bytes | None:
    """The member's header at `at`, checked; None at the end marker."""
    header = window.read(at, _BLOCK)
    if len(header) < _BLOCK:
        size = f"{window.size:,} bytes long"
        raise damaged(window.path, "tar", size, "an end marker of zeros", at)
    if not any(header):
        return None
    _check_header(window.path, header, at)
    return header


def _read_extension(
    window: Window, kind: bytes, offset: int, size: int, into: dict[bytes, bytes]
) -> None:
    """Takes note of what an extension header says of the member, or the members, behind it."""
    if size > _EXTENSION_BYTES_MAX:
        most = f"at most {_EXTENSION_BYTES_MAX}"
        raise damaged(window.path, "size of an extended header", size, most, offset - _BLOCK)
    data = window.read(offset, size)
    if len(data) < size:
        raise damaged(window.path, "extended header", f"{len(data)} bytes", f"{size} bytes", offset)
    if kind == b"L":
        into.setdefault(b"path", data.rstrip(b"\0"))
    elif kind != b"K":
        into |= _parse_pax(window.path, data, offset)


def _pax_size(path: str, digits: bytes, at: int) -> int:
    if not digits.isdigit() or len(digits) > 19:
        raise damaged(path, "size in a pax header", digits[:30], "decimal digits", at)
    return int(digits)


def _clean(name: bytes) -> bytes:
    """A member's name without a leading `./` or `/`."""
    while name.startswith((b"./", b"/")):
        name = name.removeprefix(b".").lstrip(b"/")
    return name


def _check_header(path: str, header: bytes, at: int) -> None:
    stated = header[148:156]
    try:
        expected = int(stated.strip(b" \0") or b"0", 8)
    except ValueError:
        expected = -1
    blanked = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(blanked)
    signed = unsigned - 256 * sum(b > 127 for b in blanked)
    if expected not in (unsigned, signed):
        digits = stated.strip(b" \0").decode(errors="backslashreplace")
        raise damaged(path, "checksum of a member's header", digits, f"{unsigned:o}", at)


def _number(path: str, digits: bytes, at: int) -> int:
    """A size: octal text, or base 256 where the first bit is set."""
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    try:
        return int(digits.strip(b" \0") or b"0", 8)
    except ValueError:
        raise damaged(path, "size of a member", digits, "octal digits", at) from None


def _short_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    # Only POSIX ustar has a prefix there; GNU keeps times in the same bytes.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _parse_pax(path: str, data: bytes, at: int) -> dict[bytes, bytes]:
    """Records of the form `length key=value`, each with its newline."""
    out = {}
    i = 0
    while i < len(data) and data[i] != 0:
        digits, space, _ = data[i : i + 20].partition(b" ")
        size = int(digits) if space and digits.isdigit() else 0
        record = data[i + len(digits) + 1 : i + size]
        key, equals, value = record.partition(b"=")
        if not equals or not record.endswith(b"\n") or i + size > len(data):
            raise damaged(
                path, "record of a pax header", data[i : i + 20], "length key=value", at + i
            )
        out[key] = value[:-1]
        i += size
    return out


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


_STREAM_STEP: Final = 64 << 10


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


class _Member(tarfile.TarInfo):
    """A member whose header is sound: the library takes one that is not for the tar's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as e:
            if buf and not any(buf):
                raise  # zeros are the end
            raise tarfile.ReadError(f"a header is none: {e}") from e


def _stream_members(
    path: str, options: SourceOptions, skipped: list[Problem]
) -> Iterator[tuple[bytes, bytes]]:
    try:
        with opened(path) as f, tarfile.open(
            fileobj=f, mode="r|", tarinfo=_Member, encoding="utf-8", errors="surrogateescape",
            bufsize=_STREAM_STEP,
        ) as tar:  # fmt: skip
            for member in tar:
                name = _clean(member.name.encode("utf-8", "surrogateescape"))
                if member.isdir() or name.rpartition(b"/")[2].startswith(b"."):
                    continue
                file = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if file is not None:
                    yield name, file.read()
                else:
                    skipped.append(Problem(path, f"{printable(name)} is no regular file"))
                    if options.on_error == "raise":
                        raise_problems(path, skipped)
            while f.read(_STREAM_STEP):
                pass  # behind the tar's end stands the checksum of all
    except (tarfile.TarError, EOFError, OSError, ValueError) as e:
        if isinstance(e, SourceError):
            raise
        raise refused(
            path, f"cannot be unpacked: {e}.",
            "The file is truncated or damaged: fetch it again.",
        ) from e  # fmt: skip
