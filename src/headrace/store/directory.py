"""Writes a sample directory (`.hrd`) from columns.

Everything is vectorised and written in slices, straight into place: sizes are known before the first
byte goes out, so the file is laid out once and its page checksums are taken from the mapped result.
Peak memory is the columns plus the built name tree plus a few slices.

The segment's uuid is taken from its content (the page checksums), so equal samples packed twice make
equal directories, equal fingerprints, and orders that resume across both.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.base.files import NewFile, remove_leftovers, write_all
from headrace.errors import SourceError
from headrace.store.format import (
    CHECKSUM_BLOCK_BYTES,
    COLUMN_NAME_BYTES_MAX,
    COLUMN_PADDING_BYTES,
    NAME_BYTES_MAX,
    NAMES_PER_BLOCK,
    PAGE_BYTES,
    PARTS_MAX,
    SECTION_ALIGNMENT,
    SECTIONS_MAX,
    DirectoryHeader,
    RowLayout,
    Section,
    SectionKind,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    _Draft = tuple[Section, Iterator[NDArray[np.uint8]]]
    NameLevels = tuple[NDArray[np.int64] | None, list[tuple[NDArray[np.uint64], NDArray[np.uint8]]]]


_SLICE = 1 << 20
"""Elements converted at once: small enough for the L2 cache's neighbourhood, large enough for numpy."""


@dataclass(slots=True)
class DirectoryColumns:
    """All that a sample directory says of n samples and their m extents."""

    names: NDArray[np.uint8]  # (bytes,) uint8, the names back to back in index order
    name_offsets: NDArray[np.uint64]  # (n+1,) uint64, where each name begins
    volume: NDArray[Any]  # (m,) unsigned integers
    offset: NDArray[Any]  # (m,) unsigned integers, in the volume
    length: NDArray[Any]  # (m,) unsigned integers, in bytes
    crc: NDArray[np.uint32] | None = None  # (m,) uint32, or None for no checksums
    mtime: NDArray[np.int64] | None = None  # (m,) int64 nanoseconds, or None
    first_extent: NDArray[Any] | None = None
    """(n+1,) unsigned integers, or None where extent i is sample i's."""
    part: NDArray[Any] | None = None
    """(m,) unsigned integers into `part_names`, ascending within a sample, or None for one part."""
    part_names: tuple[bytes, ...] = (b"",)  # the names of the parts
    labels: NDArray[Any] | None = None  # (n,) integers, -1 for none, or None
    class_names: tuple[bytes, ...] | None = None  # the names of labels 0, 1, ..., or None
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """More columns of n numbers each, by name."""

    @property
    def samples(self) -> int:
        """The number of samples, n."""
        return len(self.name_offsets) - 1

    @property
    def extents(self) -> int:
        """The number of extents, m."""
        return len(self.length)

    def name(self, i: int) -> bytes:
        """The name of sample `i`."""
        return self.names[int(self.name_offsets[i]) : int(self.name_offsets[i + 1])].tobytes()

    @property
    def firsts(self) -> NDArray[Any]:
        """(n+1,) first extents, also where they are implied."""
        if self.first_extent is not None:
            return self.first_extent
        return np.arange(self.samples + 1, dtype=np.uint64)


def columns_of(
    names: Sequence[bytes],
    volume: NDArray[Any],
    offset: NDArray[Any],
    length: NDArray[Any],
    *,
    parts: Sequence[bytes] = (b"",),
    counts: NDArray[Any] | None = None,
    **more: Any,
) -> DirectoryColumns:
    """The columns of samples whose extents stand one behind the other.

    `volume`, `offset` and `length` are of the (m,) extents. Without `counts`, (n,) extents of each sample,
    `parts` are the names of those that every sample has, sorted; else of each extent. `more` are other
    fields.
    """
    blob, name_offsets = join_names(names)
    n, m = len(names), len(length)
    if counts is None:
        part_names, firsts = tuple(parts), np.arange(0, m + 1, len(parts), dtype=np.uint64)
        part = np.tile(np.arange(len(parts), dtype=np.uint32), n)
    else:
        part_names, firsts = tuple(sorted(set(parts))) or (b"",), np.zeros(n + 1, np.uint64)
        np.cumsum(counts.astype(np.uint64), out=firsts[1:])
        number = {name: i for i, name in enumerate(part_names)}
        part = np.fromiter((number[p] for p in parts), np.uint32, m)
    return DirectoryColumns(
        blob, name_offsets, volume, offset, length,
        first_extent=firsts if m != n else None,
        part=part if len(part_names) > 1 else None,
        part_names=part_names,
        **more,
    )  # fmt: skip


def write_directory(columns: DirectoryColumns, target: str | Path | int) -> DirectoryHeader:
    """Writes the directory to a new file, or into an open empty one, and syncs it; returns its header.

    Raises SourceError if two samples have the same name, or a column cannot be stored.
    """
    _check(columns)
    if isinstance(target, int):
        return _write(columns, target)
    remove_leftovers(os.path.dirname(target))
    with NewFile(target) as new:
        header = _write(columns, new.fd)
        new.publish()
    return header


def width_of(largest: int) -> int:
    """Bytes that hold `largest`, at least 1."""
    return max(1, (largest.bit_length() + 7) // 8)


def pack_unsigned(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """(n,) integers as (n, width) little-endian bytes."""
    wide = np.ascontiguousarray(values, dtype="<u8")
    return np.ascontiguousarray(wide.view(np.uint8).reshape(len(wide), 8)[:, :width])


def _check(columns: DirectoryColumns) -> None:
    n, m = columns.samples, columns.extents
    shapes = {"volume": m, "offset": m, "length": m, "crc": m, "mtime": m, "part": m, "labels": n}
    for name, count in shapes.items():
        values = getattr(columns, name)
        if values is not None and len(values) != count:
            raise ValueError(f"column {name} has {len(values)} elements, expected {count}")
    if columns.first_extent is None and n != m:
        raise ValueError(f"first_extent is missing for {n} samples with {m} extents")
    if columns.first_extent is not None and len(columns.first_extent) != n + 1:
        raise ValueError(f"first_extent has {len(columns.first_extent)} elements, expected {n + 1}")
    if not 1 <= len(columns.part_names) <= PARTS_MAX:
        raise SourceError(
            f"The samples have {len(columns.part_names):,} different parts, expected 1 to "
            f"{PARTS_MAX:,}.",
            next_step="Check that the parts of a sample are named alike in all samples.",
        )
    for name, values in columns.columns.items():
        _check_user_column(name, values, n)


def _check_user_column(name: str, values: NDArray[Any], n: int) -> None:
    if values.shape != (n,) or values.dtype.kind not in "iuf" or values.dtype.itemsize > 8:
        raise SourceError(
            f"Column {name!r} has shape {values.shape} and type {values.dtype}, expected ({n},) and "
            "an integer or float of at most 8 bytes.",
            next_step="Store what is larger as a part of the sample.",
        )
    if not 1 <= len(name.encode()) <= COLUMN_NAME_BYTES_MAX:
        raise SourceError(
            f"The name of column {name!r} is {len(name.encode())} bytes long, expected 1 to "
            f"{COLUMN_NAME_BYTES_MAX}.",
            next_step="Rename the column.",
        )


def _rows(columns: DirectoryColumns, layout: RowLayout) -> Iterator[NDArray[np.uint8]]:
    """The extent rows' bytes, slice by slice."""
    for i in range(0, columns.extents, _SLICE):
        count = min(_SLICE, columns.extents - i)
        rows = np.empty((count, layout.row_bytes), np.uint8)
        at = 0
        for name, width in layout._asdict().items():
            if width:
                values = getattr(columns, name)[i : i + count]
                signed = np.ascontiguousarray(values, dtype="<i8" if name == "mtime" else "<u8")
                rows[:, at : at + width] = signed.view(np.uint8).reshape(count, 8)[:, :width]
                at += width
        yield rows.reshape(-1)


def _row_layout(columns: DirectoryColumns) -> RowLayout:
    def width(values: NDArray[Any]) -> int:
        largest = int(values.max()) if len(values) else 0
        return width_of(largest) if largest else 0

    return RowLayout(
        volume=width(columns.volume),
        offset=width(columns.offset),
        # At least 1, so that a row is never empty.
        length=max(1, width(columns.length)),
        crc=0 if columns.crc is None else 4,
        mtime=0 if columns.mtime is None else 8,
    )


def _section(
    kind: SectionKind, width: int, count: int, parameters: bytes, name: str = ""
) -> Section:
    """A section that has no place yet, of `width` bytes an element."""
    return Section(kind, width, 0, width * count, count, parameters.ljust(8, b"\0"), name)


def _unsigned(kind: SectionKind, values: NDArray[Any], largest: int, level: int = 0) -> _Draft:
    """Integers of as few bytes as the largest takes."""
    width = width_of(largest)
    slices = (values[i : i + _SLICE] for i in range(0, len(values), _SLICE))
    chunks = (pack_unsigned(each, width).reshape(-1) for each in slices)
    return _section(kind, width, len(values), bytes([level])), chunks


def _numbers(
    kind: SectionKind, values: NDArray[Any], parameters: bytes = b"", name: str = ""
) -> _Draft:
    """Numbers as they are."""
    slices = (values[i : i + _SLICE] for i in range(0, len(values), _SLICE))
    chunks = (np.ascontiguousarray(each).view(np.uint8) for each in slices)
    return _section(kind, values.itemsize, len(values), parameters, name), chunks


def _strings(kind: SectionKind, strings: Sequence[bytes]) -> _Draft:
    blob = b"".join(len(s).to_bytes(2, "little") + s for s in strings)
    return Section(kind, 0, 0, len(blob), len(strings)), iter([np.frombuffer(blob, np.uint8)])


def _drafts(columns: DirectoryColumns) -> Iterator[_Draft]:
    """The sections, and the chunks of bytes that fill each."""
    n, m, parts = columns.samples, columns.extents, len(columns.part_names)
    layout = _row_layout(columns)
    rows = _section(SectionKind.EXTENT_ROWS, layout.row_bytes, m, bytes(layout))
    yield rows, _rows(columns, layout)
    if columns.first_extent is not None and m != n:
        yield _unsigned(SectionKind.FIRST_EXTENT, columns.first_extent, m)
    if columns.part is not None and parts > 1:
        yield _unsigned(SectionKind.PART, columns.part, parts - 1)
    yield _strings(SectionKind.PART_NAMES, columns.part_names)
    labels = columns.labels
    if labels is not None and len(labels) and int(labels.max()) >= 0:
        low, high = int(labels.min()), int(labels.max())
        types = (np.dtype(f"<i{w}") for w in (1, 2, 4, 8))
        fits = (t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
        yield _numbers(SectionKind.LABEL, labels.astype(next(fits), copy=False))
    if columns.class_names is not None:
        yield _strings(SectionKind.CLASS_NAMES, columns.class_names)
    for name, values in columns.columns.items():
        stored = values.astype(values.dtype.newbyteorder("<"), copy=False)
        yield _numbers(SectionKind.USER_COLUMN, stored, stored.dtype.kind.encode(), name)
    ranks, levels = build_levels(columns.names, columns.name_offsets)
    count = n
    for level, (offsets, blob) in enumerate(levels):
        yield _unsigned(SectionKind.NAME_OFFSETS, offsets, len(blob), level)
        parameters = bytes([level]) + bytes(7)
        blocks = Section(SectionKind.NAME_BLOCKS, 0, 0, len(blob), count, parameters)
        yield blocks, iter([blob])
        count = -(-count // NAMES_PER_BLOCK)
    if ranks is not None:
        inverse = np.empty(n, np.uint64)
        inverse[ranks] = np.arange(n, dtype=np.uint64)
        yield _unsigned(SectionKind.RANK_TO_INDEX, ranks, n - 1)
        yield _unsigned(SectionKind.INDEX_TO_RANK, inverse, n - 1)


def _place(sections: list[Section], payload_offset: int) -> tuple[list[Section], int]:
    placed = []
    end = payload_offset
    for section in sections:
        offset = -(-end // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        placed.append(replace(section, offset=offset))
        end = offset + section.size_bytes + (COLUMN_PADDING_BYTES if section.width else 0)
    return placed, end


def _write(columns: DirectoryColumns, fd: int) -> DirectoryHeader:
    drafts = list(_drafts(columns))
    if len(drafts) > SECTIONS_MAX:
        raise SourceError(
            f"The directory needs {len(drafts)} sections, expected at most {SECTIONS_MAX}.",
            next_step=f"Store {len(drafts) - SECTIONS_MAX} columns fewer.",
        )
    # The payload begins behind as many page checksums as it needs itself.
    sections, end = _place([section for section, _ in drafts], 0)
    blocks = -(-end // CHECKSUM_BLOCK_BYTES)
    payload_offset = -(-(PAGE_BYTES + 4 * blocks) // PAGE_BYTES) * PAGE_BYTES
    sections, end = _place(sections, payload_offset)
    os.ftruncate(fd, end)
    for section in sections:
        at = section.offset
        for chunk in drafts.pop(0)[1]:  # what is written is needed no more
            write_all(fd, chunk, at)
            at += len(chunk)
    checksums = _page_checksums(fd, payload_offset, end)
    write_all(fd, checksums.view(np.uint8), PAGE_BYTES)
    header = DirectoryHeader(
        file_bytes=end,
        samples=columns.samples,
        extents=columns.extents,
        payload_offset=payload_offset,
        checksum_count=len(checksums),
        checksum_crc=crc32c(checksums.tobytes()),
        part_count=len(columns.part_names),
        uuid=_content_uuid(columns, checksums),
        sections=tuple(sections),
    )
    write_all(fd, np.frombuffer(header.to_page(), np.uint8), 0)
    return header


def _content_uuid(columns: DirectoryColumns, checksums: NDArray[np.uint32]) -> bytes:
    counts = np.array([columns.samples, columns.extents], "<u8").tobytes()
    return hashlib.sha256(b"headrace segment" + counts + checksums.tobytes()).digest()[:16]


def _page_checksums(fd: int, payload_offset: int, end: int) -> NDArray[np.uint32]:
    if end == payload_offset:
        return np.zeros(0, "<u4")
    with mmap.mmap(fd, end, access=mmap.ACCESS_READ) as mapped:
        payload = np.frombuffer(mapped, np.uint8)[payload_offset:end]
        checksums = _native.crc32c_blocks(payload, CHECKSUM_BLOCK_BYTES).astype("<u4")
        del payload  # the map cannot close while an array looks into it
    return checksums


# -- names ------------------------------------------------------------------------------------------

_RENAME = "Rename one of them, or pass prefix_names=True where the source is several files."


def build_levels(blob: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> NameLevels:
    """Builds the name tree of n unique names: front-coded in blocks of 16, searchable from the top down.

    Returns:
        (n,) int64 indices by rank, or None when the names came sorted; and for each level from 0 upwards,
        where its blocks begin in its blob ((blocks+1,) uint64), and the blob ((bytes,) uint8).
    """
    lengths = np.diff(offsets)
    if len(lengths) and int(lengths.max()) > NAME_BYTES_MAX:
        i = int(lengths.argmax())
        raise SourceError(
            f"The name of sample {i} is {int(lengths[i]):,} bytes long, expected at most "
            f"{NAME_BYTES_MAX:,}.",
            next_step="Give the sample a shorter name.",
        )
    try:
        return _native.build_names(blob, offsets)
    except ValueError as e:
        raise SourceError(
            f"The names cannot be stored: {e}.",
            next_step=_RENAME,
        ) from e


def duplicate_name(name: bytes, detail: str = "") -> SourceError:
    """The error for two samples of one name."""
    return SourceError(
        f"Two samples have the name {printable(name)}{detail}, expected unique names.",
        next_step=_RENAME,
        name=printable(name),
    )


def printable(name: bytes) -> str:
    """A name as a message shows it: quoted, undecodable bytes escaped, long ones shortened."""
    text = repr(name.decode(errors="backslashreplace"))
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def split_names(blob: NDArray[np.uint8], offsets: NDArray[np.uint64]) -> list[bytes]:
    """The names of a blob, as a list."""
    data = blob.tobytes()
    return [data[a:b] for a, b in pairwise(offsets.tolist())]


def join_names(names: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """The inverse of `split_names`: blob (bytes,) uint8 and offsets (n+1,) uint64."""
    offsets = np.zeros(len(names) + 1, np.uint64)
    np.cumsum(np.fromiter(map(len, names), np.uint64, len(names)), out=offsets[1:])
    return np.frombuffer(b"".join(names), np.uint8), offsets


def select_samples(columns: DirectoryColumns, numbers: NDArray[np.int64]) -> DirectoryColumns:
    """The columns of the samples with these numbers, (k,), in this order."""
    all_names = split_names(columns.names, columns.name_offsets)
    names, offsets = join_names([all_names[i] for i in numbers.tolist()])
    firsts = columns.firsts.astype(np.int64)
    counts = np.diff(firsts)[numbers]
    new_firsts = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(counts, out=new_firsts[1:])
    extents = np.arange(new_firsts[-1]) + np.repeat(firsts[numbers] - new_firsts[:-1], counts)

    def of_extents(values: Any) -> Any:
        return None if values is None else values[extents]

    return DirectoryColumns(
        names, offsets, columns.volume[extents], columns.offset[extents], columns.length[extents],
        crc=of_extents(columns.crc),
        mtime=of_extents(columns.mtime),
        first_extent=None if columns.first_extent is None else new_firsts.astype(np.uint64),
        part=of_extents(columns.part),
        part_names=columns.part_names,
        labels=None if columns.labels is None else columns.labels[numbers],
        class_names=columns.class_names,
        columns={k: v[numbers] for k, v in columns.columns.items()},
    )  # fmt: skip
