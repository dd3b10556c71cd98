"""Directory and reader in plain Python: slow, obvious, and the measure for the native ones.

`ReferenceDirectory` maps a `.hrd` file and answers from it. The header and the page checksums are checked
when it is opened, each section's blocks of 65,536 bytes when the section is first used, so opening costs the
same for any size. `read_extent` reads samples with `pread`; `verify` and `repair` trust it. Every whole
extent is compared with its checksum, and foreign files with their recorded size and time before their bytes
are used.
"""

from __future__ import annotations

import mmap
import os
import stat
from bisect import bisect_left
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c, crc32c_blocks
from headrace.errors import CorruptStore, HeadraceError, SampleNotFound
from headrace.store.directory import printable, read_fully
from headrace.store.format import (
    CHECKSUM_BLOCK_BYTES,
    NAME_BYTES_MAX,
    NAMES_PER_BLOCK,
    PAGE_BYTES,
    RowLayout,
    Section,
    SectionKind,
    corrupt,
    parse_header,
)
from headrace.store.segment import read_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.store.manifest import VolumeEntry
    from headrace.store.segment import Extent, OpenSegment


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
        self._rows, self._layout = self._header.rows
        self.has_crc = self._layout.crc > 0
        self.part_names = self._strings(SectionKind.PART_NAMES)
        self.class_names = self._strings(SectionKind.CLASS_NAMES)

    @classmethod
    def open(cls, path: bytes) -> ReferenceDirectory:
        """The directory in the file at `path`."""
        with open(path, "rb") as file:
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
        section = self._header.section(SectionKind.LABEL)
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
        computed = crc32c_blocks(payload, CHECKSUM_BLOCK_BYTES)
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
        section = self._header.section(kind)
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
        offsets = self._header.section(SectionKind.NAME_OFFSETS)
        blob = self._header.section(SectionKind.NAME_BLOCKS)
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
        section = self._header.section(kind)
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
        section = self._header.section(SectionKind.FIRST_EXTENT)
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
        section = self._header.section(SectionKind.PART)
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


def read_extent(
    segment: OpenSegment, extent: Extent, start: int = 0, size: int | None = None
) -> bytearray:
    """The bytes `start` to `start + size - 1` of one extent, fewer at its end.

    Raises:
        CorruptSample: the bytes differ from the checksum, or end early.
        SourceChanged: a foreign file is not as it was indexed.
        VolumeError: the system refuses the read.
    """
    begin = min(start, extent.length)
    end = extent.length if size is None else min(extent.length, begin + size)
    entry, path = _place(segment, extent)

    def failure(kind: str, actual: str = "", expected: str = "", code: int = 0) -> HeadraceError:
        return read_error(
            kind, extent.index, extent.name, path, extent.offset,
            actual=actual, expected=expected, code=code, foreign=entry.kind != "packed",
        )  # fmt: skip

    data = bytearray(end - begin)
    try:
        if entry.kind == "tree":
            with _open_tree_file(segment, extent, path, failure) as fd:
                count = read_fully(fd, memoryview(data), begin)
        else:
            count = segment.volumes.read_into(
                extent.volume, memoryview(data), extent.offset + begin
            )
    except HeadraceError:
        raise
    except OSError as e:
        raise failure("system", code=e.errno or 0) from e
    if count < len(data):
        raise failure("short", str(count), str(len(data)))
    if extent.crc is not None and end - begin == extent.length:
        computed = f"{crc32c(data):08x}"
        if computed != f"{extent.crc:08x}":
            raise failure("checksum", computed, f"{extent.crc:08x}")
    return data


def _place(segment: OpenSegment, extent: Extent) -> tuple[VolumeEntry, str]:
    """The volume and the file of an extent, which lies in it: known before memory is allocated for it."""
    volumes = segment.volumes
    if extent.volume < len(volumes.entries) and extent.length >= 0 and extent.offset >= 0:
        entry, path = volumes.entries[extent.volume], volumes.paths[extent.volume]
        if entry.kind == "tree":
            return entry, os.path.join(path, os.fsdecode(extent.name))
        if extent.offset + extent.length <= (entry.bytes or 0):
            return entry, path
    where = segment.entry.directory
    raise CorruptStore(
        f"{where}: sample {extent.index} lies in volume {extent.volume} at {extent.offset:,} with "
        f"{extent.length:,} bytes, which leaves the volumes.",
        path=where, next_step="The directory belongs to other volumes: pack or index again.",
    )  # fmt: skip


@contextmanager
def _open_tree_file(
    segment: OpenSegment, extent: Extent, path: str, failure: Callable[..., HeadraceError]
) -> Iterator[int]:
    """A descriptor of the file, if it is as it was indexed."""
    # A name in a damaged or hostile directory must not lead out of the tree.
    if extent.name.startswith(b"/") or b".." in extent.name.split(b"/") or b"\0" in extent.name:
        where = segment.entry.directory
        raise CorruptStore(
            f"{where}: the name of sample {extent.index}, {os.fsdecode(extent.name)!r}, leads out of "
            "the indexed folder.", path=where, next_step="Index the source again.",
        )  # fmt: skip
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise failure("changed", "no file", "the indexed file") from None
    try:
        status = os.fstat(fd)
        now = expected = ""
        if not stat.S_ISREG(status.st_mode):
            now, expected = "no regular file", "one"
        elif status.st_size != extent.length:
            now, expected = f"{status.st_size:,} bytes", f"{extent.length:,} bytes"
        elif extent.mtime_ns not in (None, status.st_mtime_ns):
            now, expected = f"modified at {status.st_mtime_ns} ns", f"{extent.mtime_ns} ns"
        if now:
            raise failure("changed", now, expected)
        yield fd
    finally:
        os.close(fd)
