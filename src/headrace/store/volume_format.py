"""The packed volume's header page (`.hrv`), written and checked as docs/format.md says."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from headrace.base.checksum import crc32c
from headrace.store.format import PAGE_BYTES, check_page, corrupt

MAGIC = b"HRVOL\x00\r\n"
VERSION = 1
DATA_OFFSET = PAGE_BYTES
"""Where the first sample's bytes begin."""

_HEADER = struct.Struct("<8sII16s16sI")


@dataclass(frozen=True, slots=True)
class VolumeHeader:
    """Who a packed volume is: its own uuid, its segment's, and its number there."""

    uuid: bytes
    segment_uuid: bytes
    number: int

    def to_page(self) -> bytes:
        """The header's 4,096 bytes, CRC included."""
        page = bytearray(PAGE_BYTES)
        _HEADER.pack_into(page, 0, MAGIC, VERSION, 0, self.uuid, self.segment_uuid, self.number)
        page[12:16] = crc32c(page).to_bytes(4, "little")
        return bytes(page)


def volume_uuid(segment_uuid: bytes, number: int) -> bytes:
    """The uuid of volume `number` of a segment: made of its content, like the segment's."""
    return hashlib.sha256(b"headrace volume" + segment_uuid + struct.pack("<I", number)).digest()[
        :16
    ]


def parse_volume_header(page: bytes, path: str) -> VolumeHeader:
    """Parses a volume's first 4,096 bytes.

    Raises:
        CorruptStore: it is no volume, or its header is damaged.
    """
    check_page(page, MAGIC, VERSION, path, "packed volume")
    _, _, _, uuid, segment_uuid, number = _HEADER.unpack_from(page)
    if any(page[_HEADER.size : PAGE_BYTES]):
        raise corrupt(
            path, "rest of the header page", found="not zero", expected="zero", offset=_HEADER.size
        )
    return VolumeHeader(uuid, segment_uuid, number)


def check_volume_header(page: bytes, expected: VolumeHeader, path: str) -> None:
    """Checks that a volume is the one that the store means.

    Raises:
        CorruptStore: the header is damaged, or belongs to another volume or segment.
    """
    found = parse_volume_header(page, path)
    for what, offset in (("uuid", 16), ("segment_uuid", 32), ("number", 48)):
        have, want = getattr(found, what), getattr(expected, what)
        if have != want:
            raise corrupt(
                path, f"volume's {what.replace('_', ' ')}", offset=offset,
                found=have.hex() if isinstance(have, bytes) else have,
                expected=want.hex() if isinstance(want, bytes) else want,
                next_step="Another volume stands in its place: put the right file back.",
            )  # fmt: skip


def padded_size(data_end: int) -> int:
    """The size of a volume whose last sample ends at `data_end`."""
    return -(-data_end // PAGE_BYTES) * PAGE_BYTES
