"""The headers of a store's binary files, as docs/format.md says: sample directory (`.hrd`) and volume (`.hrv`).

Turns headers into 4,096 bytes and back. Parsing believes nothing: every number is checked against the
file's real size before anything is allocated or mapped from it, so that a reader may index the sections
without looking again; what contradicts itself is a `CorruptStore`. What the sections hold is the
directory's business.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.base.checksum import crc32c
from headrace.errors import CorruptStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAGIC = b"HRDIR\x00\r\n"
VERSION = 1
PAGE_BYTES = 4096
CHECKSUM_BLOCK_BYTES = 65_536
SECTION_ALIGNMENT = 64
COLUMN_PADDING_BYTES = 8
SAMPLES_MAX = 1 << 48
SECTIONS_MAX = 60
PARTS_MAX = 65_535
NAME_BYTES_MAX = 65_535
NAMES_PER_BLOCK = 16
COLUMN_NAME_BYTES_MAX = 24

_HEADER = struct.Struct("<8sIIQQQIIQQIIQ16s32s")
_SECTION = struct.Struct("<IIQQQ8s24s")
_CRC_FIELD = slice(12, 16)
_RESTORE = "Restore the file from a copy, or pack or index the source again."


class SectionKind(IntEnum):
    """What a section holds."""

    EXTENT_ROWS = 1
    FIRST_EXTENT = 2
    PART = 3
    PART_NAMES = 4
    LABEL = 5
    CLASS_NAMES = 6
    USER_COLUMN = 7
    NAME_OFFSETS = 8
    NAME_BLOCKS = 9
    RANK_TO_INDEX = 10
    INDEX_TO_RANK = 11


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


@dataclass(frozen=True, slots=True)
class Section:
    """One section entry of the header."""

    kind: SectionKind
    width: int
    offset: int
    size_bytes: int
    count: int
    parameters: bytes = bytes(8)
    name: str = ""

    @property
    def level(self) -> int:
        """The level of a name section."""
        return self.parameters[0]

    @property
    def end(self) -> int:
        """The first byte after the section and the padding that a reader may load."""
        padding = 0 if self.kind in _UNPADDED else COLUMN_PADDING_BYTES
        return self.offset + self.size_bytes + padding


class RowLayout(NamedTuple):
    """The width of each field of an extent row, in their order; 0 means absent."""

    volume: int
    offset: int
    length: int
    crc: int
    mtime: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class DirectoryHeader:
    """The header page of a `.hrd` file."""

    file_bytes: int
    samples: int
    extents: int
    payload_offset: int
    checksum_count: int
    checksum_crc: int
    part_count: int
    uuid: bytes
    sections: tuple[Section, ...] = field(default=())

    def section(self, kind: SectionKind) -> Section | None:
        """The section of `kind`, of a name tree's level 0, or None where the file has none."""
        for section in self.sections:
            if section.kind == kind and (kind not in _LEVELLED or section.level == 0):
                return section
        return None

    @property
    def rows(self) -> tuple[Section, RowLayout]:
        """The extent rows and the layout of a row."""
        section = self.section(SectionKind.EXTENT_ROWS)
        assert section is not None
        return section, RowLayout(*section.parameters[:5])

    def to_page(self) -> bytes:
        """The header's 4,096 bytes, CRC included."""
        page = bytearray(PAGE_BYTES)
        _HEADER.pack_into(
            page, 0, MAGIC, VERSION, 0, self.file_bytes, self.samples, self.extents,
            len(self.sections), CHECKSUM_BLOCK_BYTES, PAGE_BYTES, self.checksum_count,
            self.checksum_crc, self.part_count, self.payload_offset, self.uuid, bytes(32),
        )  # fmt: skip
        for i, section in enumerate(self.sections):
            _SECTION.pack_into(
                page, _HEADER.size + i * _SECTION.size, section.kind, section.width,
                section.offset, section.size_bytes, section.count, section.parameters,
                section.name.encode(),
            )  # fmt: skip
        page[_CRC_FIELD] = crc32c(page).to_bytes(4, "little")
        return bytes(page)


def corrupt(
    path: str,
    what: str,
    stated: object,
    expected: object,
    offset: int | None = None,
    *,
    next_step: str = _RESTORE,
) -> CorruptStore:
    """The error for a file of a store that contradicts itself: what, where, and what was expected."""
    where = "" if offset is None else f" (offset {offset:,})"
    return CorruptStore(
        f"{path}: {what} is {stated}, expected {expected}{where}.",
        path=path,
        offset_bytes=offset,
        next_step=next_step,
    )


def check_page(page: bytes, magic: bytes, version: int, path: str, what: str) -> None:
    """Checks length, magic, version and CRC of a header page."""
    if len(page) < PAGE_BYTES:
        raise corrupt(path, "file size in bytes", len(page), f"{PAGE_BYTES:,} or more")
    if page[:8] != magic:
        raise corrupt(
            path, "magic", page[:8].hex(" "), magic.hex(" "), 0,
            next_step=f"This file is no {what} of a headrace store.",
        )  # fmt: skip
    stated_version = int.from_bytes(page[8:12], "little")
    stated = int.from_bytes(page[_CRC_FIELD], "little")
    computed = crc32c(page[:12] + bytes(4) + page[16:])
    if computed != stated:
        raise corrupt(path, "header checksum", f"{computed:08x}", f"{stated:08x}", 12)
    if stated_version != version:
        raise corrupt(
            path, "format version", stated_version, version, 8,
            next_step="Use the version of headrace that wrote it, or a newer one.",
        )  # fmt: skip


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
        end = section.end
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
        names = counts[section.level] if section.level < len(counts) else 0
        return names if kind == SectionKind.NAME_BLOCKS else -(-names // NAMES_PER_BLOCK) + 1
    return header.samples


def _check_presence(header: DirectoryHeader, path: str) -> None:
    """Each section stands once, and those that depend on others stand exactly where they must."""
    keys = [
        (
            s.kind,
            s.level if s.kind in _LEVELLED else s.name if s.kind == SectionKind.USER_COLUMN else 0,
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


VOLUME_MAGIC = b"HRVOL\x00\r\n"
VOLUME_VERSION = 1
DATA_OFFSET = PAGE_BYTES
"""Where the first sample's bytes begin."""

_VOLUME_HEADER = struct.Struct("<8sII16s16sI")


@dataclass(frozen=True, slots=True)
class VolumeHeader:
    """Who a packed volume is: its own uuid, its segment's, and its number there."""

    uuid: bytes
    segment_uuid: bytes
    number: int

    def to_page(self) -> bytes:
        """The header's 4,096 bytes, CRC included."""
        page = bytearray(PAGE_BYTES)
        _VOLUME_HEADER.pack_into(
            page, 0, VOLUME_MAGIC, VOLUME_VERSION, 0, self.uuid, self.segment_uuid, self.number
        )
        page[12:16] = crc32c(page).to_bytes(4, "little")
        return bytes(page)


def volume_uuid(segment_uuid: bytes, number: int) -> bytes:
    """The uuid of volume `number` of a segment: made of its content, like the segment's."""
    return hashlib.sha256(b"headrace volume" + segment_uuid + struct.pack("<I", number)).digest()[
        :16
    ]


def parse_volume_header(page: bytes, path: str) -> VolumeHeader:
    """Parses a volume's first 4,096 bytes."""
    check_page(page, VOLUME_MAGIC, VOLUME_VERSION, path, "packed volume")
    _, _, _, uuid, segment_uuid, number = _VOLUME_HEADER.unpack_from(page)
    rest = _VOLUME_HEADER.size
    zero = not any(page[rest:PAGE_BYTES])
    _require(path, [(zero, "rest of the header page", "not zero", "zero", rest)])
    return VolumeHeader(uuid, segment_uuid, number)


def check_volume_header(page: bytes, expected: VolumeHeader, path: str) -> None:
    """Checks that a volume is the one that the store means."""
    header = parse_volume_header(page, path)
    for what, offset in (("uuid", 16), ("segment_uuid", 32), ("number", 48)):
        have, want = getattr(header, what), getattr(expected, what)
        if have != want:
            raise corrupt(
                path, f"volume's {what.replace('_', ' ')}",
                have.hex() if isinstance(have, bytes) else have,
                want.hex() if isinstance(want, bytes) else want, offset,
                next_step="Another volume stands in its place: put the right file back.",
            )  # fmt: skip


def padded_size(data_end: int) -> int:
    """The size of a volume whose last sample ends at `data_end`."""
    return -(-data_end // PAGE_BYTES) * PAGE_BYTES
