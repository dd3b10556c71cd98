"""Sample directory and reader in plain Python: slow, obvious, and the measure for the native ones.

`ReferenceDirectory` maps a `.hrd` file and answers from it. The header and the page checksums are checked
when it is opened, each section's blocks of 65,536 bytes when the section is first used. Parsing believes
nothing: every number is checked against the file's real size before anything is allocated by it.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.errors import SampleNotFound
from headrace.store import Store, open_store
from headrace.store.directory import printable
from headrace.store.format import (
    _HEADER,
    _SECTION,
    CHECKSUM_BLOCK_BYTES,
    COLUMN_PADDING_BYTES,
    MAGIC,
    NAME_BYTES_MAX,
    NAMES_PER_BLOCK,
    PAGE_BYTES,
    PARTS_MAX,
    SAMPLES_MAX,
    SECTION_ALIGNMENT,
    SECTIONS_MAX,
    VERSION,
    DirectoryHeader,
    RowLayout,
    Section,
    SectionKind,
    check_page,
    corrupt,
)
from headrace.store.segment import Extent, read_extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray


def open_either(path, *, reference: bool = False, **options) -> Store:
    """Opens a store or a source; with `reference` with the plain directory and reader, for single reads."""
    if not reference:
        return open_store(path, **options)
    with mock.patch.object(_native, "Directory", ReferenceDirectory):
        store = open_store(path, **options)
    store._read_extent = partial(_read, store.segments)
    return store


def _read(segments, extent: Extent, start: int, size: int | None) -> memoryview:
    segment = next(s for s in reversed(segments) if s.base <= extent.index)
    return memoryview(read_extent(segment, extent, start, size)).toreadonly()


_LEVELLED = frozenset({SectionKind.NAME_OFFSETS, SectionKind.NAME_BLOCKS})
_BLOBS = frozenset({SectionKind.PART_NAMES, SectionKind.CLASS_NAMES, SectionKind.NAME_BLOCKS})
_UNPADDED = _BLOBS | {SectionKind.LABEL, SectionKind.USER_COLUMN}
_WIDTHS: dict[SectionKind, tuple[int, ...]] = {
    SectionKind.FIRST_EXTENT: tuple(range(1, 9)),
    SectionKind.PART: (1, 2),
    SectionKind.LABEL: (1, 2, 4, 8),
    SectionKind.NAME_OFFSETS: tuple(range(1, 9)),
    SectionKind.RANK_TO_INDEX: tuple(range(1, 9)),
    SectionKind.INDEX_TO_RANK: tuple(range(1, 9)),
}
_COLUMN_WIDTHS = {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}


def _level(section: Section) -> int:
    """The level of a name section."""
    return section.parameters[0]


def section_end(section: Section) -> int:
    """The first byte after the section and the padding that a reader may load."""
    padding = 0 if section.kind in _UNPADDED else COLUMN_PADDING_BYTES
    return section.offset + section.size_bytes + padding


def section_of(header: DirectoryHeader, kind: SectionKind) -> Section | None:
    """The section of `kind`, of a name tree's level 0, or None where the file has none."""
    for section in header.sections:
        if section.kind == kind and (kind not in _LEVELLED or _level(section) == 0):
            return section
    return None


def rows_of(header: DirectoryHeader) -> tuple[Section, RowLayout]:
    """The extent rows and the layout of a row."""
    section = section_of(header, SectionKind.EXTENT_ROWS)
    assert section is not None
    return section, RowLayout(*section.parameters[:5])


def parse_header(page: bytes, file_bytes: int, path: str) -> DirectoryHeader:
    """Parses and checks the header page of a directory."""
    check_page(page, MAGIC, VERSION, path, "sample directory")
    (
        _, _, _, stated_bytes, samples, extents, section_count, block_bytes, checksum_offset,
        checksum_count, checksum_crc, part_count, payload_offset, uuid, reserved,
    ) = _HEADER.unpack_from(page)  # fmt: skip

    end = _HEADER.size + section_count * _SECTION.size
    blocks = -(-(file_bytes - payload_offset) // CHECKSUM_BLOCK_BYTES)
    checksums_end = PAGE_BYTES + 4 * checksum_count
    payload_good = payload_offset % PAGE_BYTES == 0 and PAGE_BYTES <= payload_offset <= file_bytes
    _require(path, (
        (stated_bytes == file_bytes, "file size in bytes", f"{file_bytes:,}", f"{stated_bytes:,}", 16),
        (samples <= SAMPLES_MAX, "number of samples", samples, f"at most {SAMPLES_MAX}", 24),
        # An extent's row takes a byte at least.
        (samples <= extents <= file_bytes, "number of extents", extents,
         f"{samples} to {file_bytes}", 32),
        (section_count <= SECTIONS_MAX, "number of sections", section_count,
         f"at most {SECTIONS_MAX}", 40),
        (block_bytes == CHECKSUM_BLOCK_BYTES, "checksum block size", block_bytes,
         CHECKSUM_BLOCK_BYTES, 44),
        (checksum_offset == PAGE_BYTES, "offset of the checksums", checksum_offset, PAGE_BYTES, 48),
        (payload_good, "payload offset", payload_offset,
         f"a multiple of {PAGE_BYTES} inside the file", 72),
        (checksum_count == blocks, "number of page checksums", checksum_count, blocks, 56),
        (checksums_end <= payload_offset, "end of the page checksums", checksums_end,
         f"at most the payload offset {payload_offset}", 56),
        (1 <= part_count <= PARTS_MAX, "number of parts", part_count, f"1 to {PARTS_MAX}", 68),
        (not any(reserved), "reserved field", reserved.hex(), "zero", 96),
        (not any(page[end:PAGE_BYTES]), "rest of the header page", "not zero", "zero", end),
    ))  # fmt: skip
    header = DirectoryHeader(
        file_bytes, samples, extents, payload_offset, checksum_count, checksum_crc, part_count, uuid,
        tuple(_parse_section(page, i, path) for i in range(section_count)),
    )  # fmt: skip
    _require(path, _section_checks(header))
    _check_presence(header, path)
    return header


def _require(path: str, checks: Iterable[tuple[Any, ...]]) -> None:
    """Raises the error for the first check (good, what, stated, expected, offset) that is not good.

    Later checks may rely on the earlier ones; the offset may be left out.
    """
    for good, what, stated, expected, *offset in checks:
        if not good:
            raise corrupt(path, what, stated, expected, *offset)


def _parse_section(page: bytes, i: int, path: str) -> Section:
    at = _HEADER.size + i * _SECTION.size
    kind, width, offset, size_bytes, count, parameters, name = _SECTION.unpack_from(page, at)
    try:
        section_kind = SectionKind(kind)
    except ValueError:
        raise corrupt(path, "kind of a section", kind, "1 to 11", at) from None
    try:
        text = name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise corrupt(path, "name of a section", name, "UTF-8", at + 40) from None
    return Section(section_kind, width, offset, size_bytes, count, parameters, text)


def _section_checks(header: DirectoryHeader) -> Iterator[tuple[Any, ...]]:
    """The sections do not overlap; width, count and size of each agree with its kind and the header."""
    end = header.payload_offset
    for section in sorted(header.sections, key=lambda s: s.offset):
        kind, width, size, count = section.kind, section.width, section.size_bytes, section.count
        what, at = f"section {kind.name.lower()}", section.offset
        yield at % SECTION_ALIGNMENT == 0, f"offset of {what}", at, "a multiple of 64"
        yield at >= end, f"offset of {what}", at, f"{end} or more: sections must not overlap"
        end = section_end(section)
        yield end <= header.file_bytes, f"end of {what}", end, f"at most {header.file_bytes}"
        if kind in _BLOBS:
            yield width == 0, f"width of {what}", width, 0
        elif kind == SectionKind.EXTENT_ROWS:
            layout = RowLayout(*section.parameters[:5])
            good = max(layout) <= 8 and layout.volume <= 4 and layout.row_bytes == width > 0
            good = good and layout.crc in (0, 4) and layout.mtime in (0, 8)
            expected = "widths up to 8 that add up to the row"
            yield good, "layout of the extent rows", (layout, width), expected
        elif kind == SectionKind.USER_COLUMN:
            dtype = chr(section.parameters[0])
            good = width in _COLUMN_WIDTHS.get(dtype, ())
            what_type = f"type of column {section.name!r}"
            yield good, what_type, (dtype, width), "a numpy integer or float"
        else:
            yield width in _WIDTHS[kind], f"width of {what}", width, _WIDTHS[kind]
        wanted = _expected_count(header, section)
        yield wanted in (None, count), f"elements of {what}", count, wanted
        if kind not in _BLOBS:
            yield size == count * width, f"bytes of {what}", size, count * width
        else:
            # A string takes two bytes of length, a name at least one of a block: no count may promise more.
            most = size if kind == SectionKind.NAME_BLOCKS else size // 2
            yield count <= most, f"strings of {what}", count, f"at most {most} in {size} bytes"


def level_counts(samples: int) -> list[int]:
    """Names in each level of a name tree over `samples` names, from level 0 upwards."""
    if samples == 0:
        return []
    counts = [samples]
    while counts[-1] > NAMES_PER_BLOCK:
        counts.append(-(-counts[-1] // NAMES_PER_BLOCK))
    return counts


def _expected_count(header: DirectoryHeader, section: Section) -> int | None:
    kind = section.kind
    if kind in (SectionKind.EXTENT_ROWS, SectionKind.PART):
        return header.extents
    if kind == SectionKind.FIRST_EXTENT:
        return header.samples + 1
    if kind == SectionKind.PART_NAMES:
        return header.part_count
    if kind == SectionKind.CLASS_NAMES:
        return None
    if kind in _LEVELLED:
        counts = level_counts(header.samples)
        names = counts[_level(section)] if _level(section) < len(counts) else 0
        return names if kind == SectionKind.NAME_BLOCKS else -(-names // NAMES_PER_BLOCK) + 1
    return header.samples


def _check_presence(header: DirectoryHeader, path: str) -> None:
    """Each section stands once, and those that depend on others stand exactly where they must."""
    keys = [
        (
            s.kind,
            _level(s)
            if s.kind in _LEVELLED
            else s.name
            if s.kind == SectionKind.USER_COLUMN
            else 0,
        )
        for s in header.sections
    ]
    present = set(keys)
    if len(present) != len(keys):
        raise corrupt(path, "list of sections", "a section twice", "each once")
    required = {(SectionKind.EXTENT_ROWS, 0), (SectionKind.PART_NAMES, 0)}
    for level in range(len(level_counts(header.samples))):
        required |= {(SectionKind.NAME_OFFSETS, level), (SectionKind.NAME_BLOCKS, level)}
    missing = [f"{kind.name.lower()} {level or ''}".strip() for kind, level in required - present]
    if header.extents > header.samples and (SectionKind.FIRST_EXTENT, 0) not in present:
        missing.append("first_extent")
    if header.part_count > 1 and (SectionKind.PART, 0) not in present:
        missing.append("part")
    ranks = {(SectionKind.RANK_TO_INDEX, 0), (SectionKind.INDEX_TO_RANK, 0)}
    if len(ranks & present) == 1:
        missing.append("the other of rank_to_index and index_to_rank")
    surplus = [key for key in present if key[0] in _LEVELLED and key not in required]
    if missing or surplus:
        raise corrupt(
            path, "list of sections", f"without {', '.join(missing)}" if missing else surplus,
            "every section that the counts ask for",
        )  # fmt: skip


class ReferenceDirectory:
    """A mapped sample directory, with the face of `headrace._native.Directory`.

    Raises:
        CorruptStore: the header, the page checksums or, later, a section that is used are damaged.
    """

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.path = path
        self._map = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._header = parse_header(data[:PAGE_BYTES], len(self._bytes), path)
        self.samples, self.extents = self._header.samples, self._header.extents
        self.uuid = self._header.uuid
        raw = self._bytes[PAGE_BYTES : PAGE_BYTES + 4 * self._header.checksum_count]
        computed, stated = crc32c(raw.tobytes()), self._header.checksum_crc
        self._agree("checksum of the page checksums", computed, stated, PAGE_BYTES)
        self._checksums = raw.view("<u4")
        self._checked = np.zeros(len(self._checksums), bool)
        self._rows, self._layout = rows_of(self._header)
        self.has_crc = self._layout.crc > 0
        self.part_names = self._strings(SectionKind.PART_NAMES)
        self.class_names = self._strings(SectionKind.CLASS_NAMES)

    @classmethod
    def open(cls, path: bytes) -> ReferenceDirectory:
        """The directory in the file at `path`."""
        with Path(os.fsdecode(path)).open("rb") as file:
            return cls.from_fd(file.fileno(), os.fsdecode(path))

    @classmethod
    def from_fd(cls, fd: int, label: str) -> ReferenceDirectory:
        """The directory in an open file; `fd` stays the caller's."""
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            raise corrupt(label, "file size in bytes", size, f"{PAGE_BYTES:,} or more")
        return cls(mmap.mmap(fd, size, access=mmap.ACCESS_READ), label)

    def header(self) -> bytes:
        """The header page: what the fingerprint is made of."""
        return self._map[:PAGE_BYTES]

    @property
    def labels(self) -> NDArray[Any] | None:
        """(n,) signed integers, -1 for none, read-only; None where no sample has a label."""
        section = section_of(self._header, SectionKind.LABEL)
        return None if section is None else self._content(section).view(f"<i{section.width}")

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The user's columns by name, each (n,) and read-only."""
        columns = [s for s in self._header.sections if s.kind == SectionKind.USER_COLUMN]
        return {s.name: self._content(s).view(f"<{chr(s.parameters[0])}{s.width}") for s in columns}

    def name(self, i: int) -> bytes:
        """The name of sample `i`."""
        return self._sorted_names[self._permuted(SectionKind.INDEX_TO_RANK, self._index(i))]

    def names(self, indices: Sequence[int] | NDArray[Any]) -> list[bytes]:
        """The names of many samples."""
        return [self.name(int(i)) for i in indices]

    def index_at_rank(self, rank: int) -> int:
        """The sample at a rank of the sorted name order."""
        return self._permuted(SectionKind.RANK_TO_INDEX, self._index(rank))

    def find(self, name: str | bytes) -> int:
        """The index of a name; -1: no sample has it."""
        return self._find(os.fsencode(name))

    def find_many(self, names: Sequence[str | bytes]) -> NDArray[np.int64]:
        """The indices of `names`, (k,) int64; -1 for a name that no sample has."""
        return np.array([self._find(os.fsencode(name)) for name in names], np.int64)

    def children(
        self, prefix: bytes, first: int, limit: int
    ) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Entries of a folder: names, samples, ranks to go on at, kinds; see `_native.Directory`."""
        rows: list[tuple[bytes, int, int, int]] = []
        names = self._sorted_names
        rank = max(first, self.seek(prefix))
        while rank < self.samples and len(rows) < limit:
            name = names[rank]
            if not name.startswith(prefix):
                break
            entry, slash, _ = name[len(prefix) :].partition(b"/")
            end = prefix + entry + b"0"  # "/" is followed by "0"
            after = max(rank + 1, self.seek(end)) if slash else rank + 1
            goes_on = after < self.samples and names[after].startswith(name)
            kind = 1 if slash else 2 if goes_on else 0
            rows.append((entry, self.index_at_rank(rank), after, kind))
            rank = after
        numbers = np.array([row[1:] for row in rows], np.int64).reshape(-1, 3).T
        return [row[0] for row in rows], numbers[0], numbers[1], numbers[2].astype(np.uint8)

    def seek(self, key: bytes) -> int:
        """The first rank whose name is not less than `key`."""
        return bisect_left(self._sorted_names, key)

    def lookup(self, path: bytes) -> tuple[int, int]:
        """The sample of this name and the first sample below it; -1 for none."""
        below = self.seek(path + b"/")
        has_below = below < self.samples and self._sorted_names[below].startswith(path + b"/")
        return self._find(path), self.index_at_rank(below) if has_below else -1

    def lengths(self, indices: NDArray[np.int64], part: int) -> NDArray[np.int64]:
        """The length of a part of each sample in bytes, (k,) int64; -1 where it has none."""
        extents = self.extents_of(indices)
        begin, end = self._extent_bounds(indices)
        which = np.repeat(np.arange(len(indices)), end - begin)
        out = np.full(len(indices), -1, np.int64)
        mine = extents["part"] == part
        out[which[mine]] = extents["length"][mine]
        return out

    def extents_of(self, indices: Sequence[int] | NDArray[Any]) -> dict[str, NDArray[np.int64]]:
        """Where samples lie.

        Returns:
            One int64 element per extent, in order: `sample`, `part`, `volume`, `offset`, `length`,
            `crc` (0 where there is none) and `mtime_ns` (-1 where there is none).
        """
        wanted = np.asarray(indices, np.int64)
        for i in wanted[(wanted < 0) | (wanted >= self.samples)][:1]:
            self._index(int(i))
        begin, end = self._extent_bounds(wanted)
        counts = end - begin
        ends = np.cumsum(counts)
        rows = np.repeat(begin - (ends - counts), counts) + np.arange(int(counts.sum()))
        table = self._content(self._rows).reshape(-1, self._rows.width)[rows]
        fields = {"sample": np.repeat(wanted, counts), "part": self._parts(rows)}
        at = 0
        for name in RowLayout._fields:
            width = getattr(self._layout, name)
            fields[name] = _widen(table[:, at : at + width])
            at += width
        mtime = fields.pop("mtime")
        fields["mtime_ns"] = mtime if self._layout.mtime else np.full(len(rows), -1, np.int64)
        return fields

    def verify(self) -> list[int]:
        """Checks every block; returns the file offsets of the damaged ones."""
        payload = self._bytes[self._header.payload_offset :]
        computed = _native.crc32c_blocks(payload, CHECKSUM_BLOCK_BYTES)
        bad = np.flatnonzero(computed != self._checksums)
        return [self._header.payload_offset + int(b) * CHECKSUM_BLOCK_BYTES for b in bad]

    # -- sections -------------------------------------------------------------------------------

    def _content(self, section: Section) -> NDArray[np.uint8]:
        """A section's bytes, checked."""
        start, end = section.offset, section.offset + section.size_bytes
        base = self._header.payload_offset
        first = (start - base) // CHECKSUM_BLOCK_BYTES
        behind = -(-(end - base) // CHECKSUM_BLOCK_BYTES) if end > start else first
        for b in (first + np.flatnonzero(~self._checked[first:behind])).tolist():
            at = base + b * CHECKSUM_BLOCK_BYTES
            computed = crc32c(self._bytes[at : at + CHECKSUM_BLOCK_BYTES])
            self._agree(f"checksum of block {b}", computed, int(self._checksums[b]), at)
            self._checked[b] = True
        return self._bytes[start:end]

    def _agree(self, what: str, computed: int, stated: int, at: int) -> None:
        if computed != stated:
            raise corrupt(self.path, what, f"{computed:08x}", f"{stated:08x}", at)

    def _integers(self, section: Section, elements: Any) -> NDArray[np.int64]:
        """Elements of a column of unsigned integers of any width."""
        return _widen(self._content(section).reshape(section.count, section.width)[elements])

    def _strings(self, kind: SectionKind) -> list[bytes]:
        section = section_of(self._header, kind)
        if section is None:
            return []
        data = self._content(section).tobytes()
        strings: list[bytes] = []
        at = 0
        while len(strings) < section.count and at <= len(data):
            size = int.from_bytes(data[at : at + 2], "little")
            strings.append(data[at + 2 : at + 2 + size])
            at += 2 + size
        if at != len(data):
            raise corrupt(
                self.path, f"strings of {kind.name.lower()}", f"{at} bytes", f"{len(data)} bytes",
                section.offset,
            )  # fmt: skip
        return strings

    @cached_property
    def _sorted_names(self) -> list[bytes]:
        """All names by rank: the lowest level of the name tree. The levels above it only save reads."""
        offsets = section_of(self._header, SectionKind.NAME_OFFSETS)
        blob = section_of(self._header, SectionKind.NAME_BLOCKS)
        if offsets is None or blob is None:
            return []
        data, names = self._content(blob).data, list[bytes]()
        for block, (start, end) in enumerate(pairwise(self._integers(offsets, ...).tolist())):
            if not 0 <= start <= end <= len(data):
                raise corrupt(
                    self.path, f"name block {block} of level 0", (start, end),
                    f"within {len(data)} bytes", offsets.offset,
                )  # fmt: skip
            count = min(NAMES_PER_BLOCK, self.samples - len(names))
            names += decode_block(data[start:end], count, self.path, blob.offset + start)
        return names

    def _find(self, name: bytes) -> int:
        rank = self.seek(name)
        exists = rank < self.samples and self._sorted_names[rank] == name
        return self.index_at_rank(rank) if exists else -1

    def _index(self, i: int) -> int:
        if not 0 <= i < self.samples:
            raise SampleNotFound(
                f"{self.path}: sample index {i}, expected 0 to {self.samples - 1}.", path=self.path
            )
        return i

    def _permuted(self, kind: SectionKind, i: int) -> int:
        section = section_of(self._header, kind)
        if section is None:
            return i
        value = int(self._integers(section, [i])[0])
        if not 0 <= value < self.samples:
            raise corrupt(
                self.path, f"element {i} of {kind.name.lower()}", value, f"0 to {self.samples - 1}",
                section.offset + i * section.width,
            )  # fmt: skip
        return value

    def _extent_bounds(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        section = section_of(self._header, SectionKind.FIRST_EXTENT)
        if section is None:
            return indices, indices + 1
        begin, end = self._integers(section, indices), self._integers(section, indices + 1)
        bad = np.flatnonzero((begin < 0) | (begin >= end) | (end > self.extents))
        if len(bad):
            i = int(bad[0])
            raise corrupt(
                self.path, f"extents of sample {int(indices[i])}", (int(begin[i]), int(end[i])),
                f"one or more within 0 to {self.extents}", section.offset,
            )  # fmt: skip
        return begin, end

    def _parts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        section = section_of(self._header, SectionKind.PART)
        if section is None:
            return np.zeros(len(rows), np.int64)
        parts = self._integers(section, rows)
        if len(parts) and int(parts.max()) >= len(self.part_names):
            raise corrupt(
                self.path, "part of an extent", int(parts.max()), f"below {len(self.part_names)}",
                section.offset,
            )  # fmt: skip
        return parts


def _widen(columns: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(k, width) little-endian bytes as (k,) int64."""
    wide = np.zeros((len(columns), 8), np.uint8)
    wide[:, : columns.shape[1]] = columns
    return wide.view("<i8").reshape(-1)


def decode_block(data: memoryview, count: int, path: str, offset: int) -> list[bytes]:
    """Decodes the `count` names of one front-coded block."""

    def bad(what: str, stated: object, expected: object, at: int) -> Exception:
        return corrupt(path, what, stated, expected, offset + at)

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while at < len(data) and shift < 21:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise bad("number in a name block", "cut off or too long", "a varint below 2^21", at)

    names: list[bytes] = []
    at = 0
    before = b""
    for i in range(count):
        shared = 0
        if i:
            shared, at = varint(at)
        size, at = varint(at)
        if shared > len(before) or at + size > len(data) or shared + size > NAME_BYTES_MAX:
            raise bad(
                "length of a name", (shared, size), "within the block and the name before", at
            )
        name = before[:shared] + bytes(data[at : at + size])
        at += size
        if i and name <= before:
            raise bad("order of names", printable(name), f"after {printable(before)}", at)
        names.append(name)
        before = name
    if at != len(data):
        raise bad("bytes of a name block", len(data), at, at)
    return names
