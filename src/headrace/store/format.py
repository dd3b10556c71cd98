"""The headers of a store's binary files, as docs/format.md says: sample directory (`.hrd`) and volume (`.hrv`).

Turns headers into 4,096 bytes, and those of volumes back; what contradicts itself is a `CorruptStore`. What a
directory's header says is parsed and checked by the native reader. What its sections hold is the directory's
business.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from headrace.base.checksum import crc32c
from headrace.errors import CorruptStore

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


def check_directory_page(page: bytes, file_bytes: int, path: str) -> None:
    """Checks that a page is the header of a directory of this size, before the rest is fetched."""
    check_page(page, MAGIC, VERSION, path, "sample directory")
    stated = int.from_bytes(page[16:24], "little")
    if stated != file_bytes:
        raise corrupt(path, "file size in bytes", f"{file_bytes:,}", f"{stated:,}", 16)
    end = min(_HEADER.size + int.from_bytes(page[40:44], "little") * _SECTION.size, PAGE_BYTES)
    if any(page[96:128]) or any(page[end:PAGE_BYTES]):
        raise corrupt(path, "rest of the header page", "not zero", "zero", 96)
    for at in range(_HEADER.size, end - _SECTION.size + 1, _SECTION.size):
        try:
            page[at + 40 : at + 64].rstrip(b"\0").decode()
        except UnicodeDecodeError as e:
            raise corrupt(
                path, "name of a section", page[at + 40 : at + 64], "UTF-8", at + 40
            ) from e


VOLUME_MAGIC = b"HRVOL\x00\r\n"
VOLUME_VERSION = 1
DATA_OFFSET = PAGE_BYTES  # where the first sample's bytes begin
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
    if any(page[rest:PAGE_BYTES]):
        raise corrupt(path, "rest of the header page", "not zero", "zero", rest)
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
