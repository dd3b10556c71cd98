"""Catalog: the first bytes of a namespace that carries a store: where each of its files lies.

Bytes to structure and back, without a connection; docs/format.md has the layout. What is read may
come from anybody: the header is judged before memory is taken for the table, and the table as a whole
before anything that it names is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace import _native
from headrace.errors import CorruptStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "MAGIC",
    "PAGE_BYTES",
    "CatalogEntry",
    "CatalogHeader",
    "aligned",
    "lay_out",
    "pack_catalog",
    "parse_header",
    "parse_table",
]

MAGIC = b"HRNSCAT1"
VERSION = 1
PAGE_BYTES = 4096
ENTRIES_MAX = 1 << 20
TABLE_BYTES_MAX = 64 << 20
NAME_BYTES_MAX = 1024
BYTES_MAX = 1 << 62

_HEADER = struct.Struct("<8sIIQII")
_CRC_AT = 28
_ENTRY = struct.Struct("<IIQQ")
_ALIGNMENT = 8
_NEXT_STEP = "Write the image or export the store again."


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One file of the store.

    Attributes:
        name: relative path within the store's folder.
        nsid: the namespace that holds it; 0: the one of this catalog.
        offset: of its first byte in that namespace.
        length: its bytes.
    """

    name: str
    nsid: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class CatalogHeader:
    """What the first page says.

    Attributes:
        entries: files in the table.
        table_bytes: of the table, which begins with the second page.
        table_crc: its crc32c.
    """

    entries: int
    table_bytes: int
    table_crc: int


def aligned(nbytes: int) -> int:
    """`nbytes`, filled up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def lay_out(files: Iterable[tuple[str, int]]) -> list[CatalogEntry]:
    """Where files come to lie that share the catalog's namespace: each begins with a page.

    Args:
        files: names and bytes.
    """
    listed = list(files)
    at = PAGE_BYTES + aligned(sum(_entry_bytes(name) for name, _ in listed))
    entries = []
    for name, nbytes in listed:
        entries.append(CatalogEntry(name, 0, at, nbytes))
        at += aligned(nbytes)
    return entries


def pack_catalog(entries: Sequence[CatalogEntry]) -> bytes:
    """The header page and the table, filled up to whole pages."""
    table = b"".join(map(_pack_entry, entries))
    head = bytearray(PAGE_BYTES)
    _HEADER.pack_into(head, 0, MAGIC, VERSION, len(entries), len(table), _crc(table), 0)
    struct.pack_into("<I", head, _CRC_AT, _crc(head))
    return bytes(head) + table.ljust(aligned(len(table)), b"\0")


def parse_header(page: bytes, where: str, *, namespace_bytes: int) -> CatalogHeader:
    """Checks a namespace's first page.

    Args:
        page: `PAGE_BYTES` bytes.
        where: the namespace's URL, for errors.
        namespace_bytes: of the namespace that the catalog lies in.

    Raises:
        CorruptStore: it is no catalog, or a damaged one.
    """
    _expect(len(page) == PAGE_BYTES, where, "first page in bytes", len(page), PAGE_BYTES, 0)
    magic, version, entries, table_bytes, table_crc, crc = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise CorruptStore(
            f"{where}: no store lies here: the first bytes are {magic!r}, expected {MAGIC!r}.",
            path=where,
            offset_bytes=0,
            next_step="Write one with `headrace image`, or export one with `headrace export`.",
        )
    computed = _crc(page[:_CRC_AT] + bytes(4) + page[_CRC_AT + 4 :])
    _expect(crc == computed, where, "catalog header checksum", f"{computed:08x}", f"{crc:08x}", 28)
    _expect(version == VERSION, where, "catalog version", version, VERSION, 8)
    _expect(
        not any(page[_HEADER.size :]), where, "rest of the catalog's header", "not zero", "zero", 32
    )
    _expect(0 < entries <= ENTRIES_MAX, where, "catalog entries", f"{entries:,}",
            f"1 to {ENTRIES_MAX:,}", 12)  # fmt: skip
    most = min(TABLE_BYTES_MAX, namespace_bytes - PAGE_BYTES)
    least = entries * (_ENTRY.size + _ALIGNMENT)
    fits = least <= table_bytes <= most and table_bytes % _ALIGNMENT == 0
    _expect(fits, where, "catalog table in bytes", f"{table_bytes:,}",
            f"a multiple of 8 from {least:,} to {most:,}", 16)  # fmt: skip
    return CatalogHeader(entries, table_bytes, table_crc)


def parse_table(
    header: CatalogHeader, table: bytes, where: str, *, namespace_bytes: int
) -> dict[str, CatalogEntry]:
    """Checks the table.

    Args:
        header: what the first page said.
        table: its `table_bytes` bytes.
        where: the namespace's URL, for errors.
        namespace_bytes: of the namespace that the catalog lies in.

    Returns:
        The entries by name.

    Raises:
        CorruptStore: it is damaged or contradicts itself.
    """
    crc = _crc(table)
    _expect(crc == header.table_crc, where, "catalog table checksum", f"{crc:08x}",
            f"{header.table_crc:08x}", PAGE_BYTES)  # fmt: skip
    found: dict[str, CatalogEntry] = {}
    at = 0
    for number in range(header.entries):
        entry, nbytes = _parse_entry(table, at, number, where)
        _expect(entry.name not in found, where, f"entry {number} of the catalog",
                f"a second {entry.name!r}", "each name once", PAGE_BYTES + at)  # fmt: skip
        found[entry.name] = entry
        at += nbytes
    _expect(at == len(table), where, "end of the catalog's last entry", f"{at:,}",
            f"{len(table):,}", PAGE_BYTES + at)  # fmt: skip
    own = namespace_bytes, PAGE_BYTES + aligned(len(table))
    _check_places(found.values(), where, *own)
    return found


def _parse_entry(table: bytes, at: int, number: int, where: str) -> tuple[CatalogEntry, int]:
    """An entry, and the bytes that it takes."""
    what, offset = f"entry {number} of the catalog", PAGE_BYTES + at
    left = len(table) - at
    _expect(left >= _ENTRY.size, where, what, f"{left} bytes", f"{_ENTRY.size} or more", offset)
    nsid, name_bytes, first, length = _ENTRY.unpack_from(table, at)
    room = min(NAME_BYTES_MAX, left - _ENTRY.size)
    _expect(0 < name_bytes <= room, where, f"{what}: its name in bytes", f"{name_bytes:,}",
            f"1 to {room:,}", offset + 4)  # fmt: skip
    used = _ENTRY.size + -(-name_bytes // _ALIGNMENT) * _ALIGNMENT
    raw = table[at + _ENTRY.size : at + _ENTRY.size + name_bytes]
    _expect(used <= left, where, what, f"{left} bytes", f"{used}", offset)
    padding = table[at + _ENTRY.size + name_bytes : at + used]
    _expect(not any(padding), where, f"{what}: its padding", "not zero", "zero", offset)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = ""
    _expect(_is_name(name), where, f"{what}: its name", repr(raw), "a relative path", offset + 24)
    fits = length <= BYTES_MAX and first <= BYTES_MAX
    _expect(fits, where, f"{what}: its place", f"{length:,} bytes at {first:,}",
            f"at most {BYTES_MAX:,}", offset + 8)  # fmt: skip
    return CatalogEntry(name, nsid, first, length), used


def _is_name(name: str) -> bool:
    return (
        name.isprintable()
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def _check_places(
    entries: Iterable[CatalogEntry], where: str, namespace_bytes: int, first_byte: int
) -> None:
    """No file lies over another, over the catalog, or beyond the end of this namespace."""
    ends: dict[int, tuple[int, str]] = {0: (first_byte, "the catalog")}
    for entry in sorted(entries, key=lambda e: (e.nsid, e.offset, e.length)):
        end, before = ends.get(entry.nsid, (0, ""))
        _expect(entry.offset >= end, where, f"first byte of {entry.name!r}", f"{entry.offset:,}",
                f"{end:,} or more, where {before} ends", None)  # fmt: skip
        stop = entry.offset + entry.length
        _expect(entry.nsid != 0 or stop <= namespace_bytes, where, f"last byte of {entry.name!r}",
                f"{stop:,}", f"at most {namespace_bytes:,}", None)  # fmt: skip
        ends[entry.nsid] = (stop, repr(entry.name))


def _entry_bytes(name: str) -> int:
    return _ENTRY.size + -(-len(name.encode()) // _ALIGNMENT) * _ALIGNMENT


def _pack_entry(entry: CatalogEntry) -> bytes:
    raw = entry.name.encode()
    if not _is_name(entry.name) or not 0 < len(raw) <= NAME_BYTES_MAX:
        raise ValueError(f"{entry.name!r} cannot stand in a catalog, expected a relative path")
    fixed = _ENTRY.pack(entry.nsid, len(raw), entry.offset, entry.length)
    return (fixed + raw).ljust(_entry_bytes(entry.name), b"\0")


def _crc(data: bytes | bytearray) -> int:
    return _native.crc32c(np.frombuffer(data, np.uint8), 0)


def _expect(  # noqa: PLR0917 - a sentence, in the order of its words
    ok: bool, where: str, what: str, found: object, expected: object, offset: int | None
) -> None:
    if not ok:
        at = "" if offset is None else f" (offset {offset:,})"
        raise CorruptStore(
            f"{where}: {what} is {found}, expected {expected}{at}.",
            path=where,
            offset_bytes=offset,
            next_step=_NEXT_STEP,
        )
