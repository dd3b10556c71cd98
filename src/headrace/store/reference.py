"""Directory and reader in plain Python: slow, obvious, and the measure for the native ones.

`ReferenceDirectory` maps a `.hrd` file and answers from it. The header and the page checksums are checked
when it is opened, each block of 65,536 bytes when it is first touched, so opening costs the same for any
size. `ReferenceReader` reads samples with `pread`; `verify` and `repair` trust it. Every whole extent is
compared with its checksum, and foreign files with their recorded size and time before their bytes are used.
"""

from __future__ import annotations

import mmap
import os
import stat
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c, crc32c_blocks
from headrace.base.files import open_file
from headrace.errors import CorruptStore, HeadraceError, SampleNotFound, VolumeError
from headrace.store.format import (
    CHECKSUM_BLOCK_BYTES,
    PAGE_BYTES,
    Section,
    SectionKind,
    corrupt,
    parse_header,
)
from headrace.store.names import NameTree
from headrace.store.segment import read_error
from headrace.store.sources.extents import read_fully

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.store.segment import Extent, OpenSegment


class ReferenceDirectory:
    """A mapped sample directory.

    Has the face of `headrace._native.Directory`. Made by `open` or `from_fd`.

    Raises:
        CorruptStore: the header, the page checksums or, later, a touched block are damaged.
    """

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.path = path
        self._map = data
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._header = parse_header(self._map[:PAGE_BYTES], len(self._bytes), self.path)
        self._checksums = self._load_checksums()
        self._checked = np.zeros(len(self._checksums), bool)
        self._rows, self._layout = self._header.rows
        self._part_names = self._strings(SectionKind.PART_NAMES)
        self._class_names = self._strings(SectionKind.CLASS_NAMES)

    @classmethod
    def open(cls, path: bytes | str) -> ReferenceDirectory:
        """The directory in the file at `path`."""
        text = os.fsdecode(path)
        try:
            fd = open_file(path)
        except VolumeError:
            raise
        except OSError as e:
            raise VolumeError(
                f"{text}: cannot be opened: {e.strerror}.", path=text, errno=e.errno
            ) from e
        try:
            return cls.from_fd(fd, text)
        finally:
            os.close(fd)

    @classmethod
    def from_fd(cls, fd: int, label: str) -> ReferenceDirectory:
        """The directory in an open file; `fd` stays the caller's."""
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            raise corrupt(
                label, "file size in bytes", found=size, expected=f"{PAGE_BYTES:,} or more"
            )
        return cls(mmap.mmap(fd, size, access=mmap.ACCESS_READ), label)

    @property
    def samples(self) -> int:
        """Samples in this segment."""
        return self._header.samples

    @property
    def extents(self) -> int:
        """Extents in this segment."""
        return self._header.extents

    @property
    def uuid(self) -> bytes:
        """The segment's uuid, 16 bytes."""
        return self._header.uuid

    @property
    def has_crc(self) -> bool:
        """Whether the extents have checksums."""
        return self._layout.crc > 0

    def header(self) -> bytes:
        """The header page: what the fingerprint is made of."""
        return self._map[:PAGE_BYTES]

    @property
    def part_names(self) -> list[bytes]:
        """The names of the parts."""
        return self._part_names

    @property
    def class_names(self) -> list[bytes]:
        """The names of labels 0, 1, ...; empty where labels have none."""
        return self._class_names

    @property
    def labels(self) -> NDArray[Any] | None:
        """(n,) signed integers, -1 for none, read-only; None where no sample has a label."""
        section = self._header.section(SectionKind.LABEL)
        return None if section is None else self._column(section, f"<i{section.width}")

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The user's columns by name, each (n,) and read-only."""
        return {
            section.name: self._column(section, f"<{chr(section.parameters[0])}{section.width}")
            for section in self._header.sections
            if section.kind == SectionKind.USER_COLUMN
        }

    def name(self, i: int) -> bytes:
        """The name of sample `i`."""
        return self._tree.name(self._rank(self._index(i)))

    def names(self, indices: Sequence[int] | NDArray[Any]) -> list[bytes]:
        """The names of many samples."""
        return [self.name(int(i)) for i in indices]

    def index_at_rank(self, rank: int) -> int:
        """The sample at a rank of the sorted name order."""
        return self._from_rank(self._index(rank))

    def find_many(self, names: Sequence[str | bytes]) -> NDArray[np.int64]:
        """The indices of `names`, (k,) int64; -1 for a name that no sample has."""
        indices = np.empty(len(names), np.int64)
        for k, name in enumerate(names):
            rank = self._tree.search(os.fsencode(name))
            indices[k] = -1 if rank < 0 else self._from_rank(rank)
        return indices

    def children(
        self, prefix: bytes, first: int, limit: int
    ) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Entries of a folder: names, samples, ranks to go on at, kinds; see `_native.Directory`."""
        names: list[bytes] = []
        samples, next_ranks, kinds = [], [], []
        tree = self._tree
        rank = max(first, tree.lower_bound(prefix))
        while rank < self.samples and len(names) < limit:
            name = tree.name(rank)
            if not name.startswith(prefix):
                break
            entry, slash, _ = name[len(prefix) :].partition(b"/")
            end = prefix + entry + b"0"  # "/" is followed by "0"
            after = max(rank + 1, tree.lower_bound(end)) if slash else rank + 1
            goes_on = after < self.samples and tree.name(after).startswith(name)
            names.append(entry)
            samples.append(self._from_rank(rank))
            next_ranks.append(after)
            kinds.append(1 if slash else 2 if goes_on else 0)
            rank = after
        return (
            names,
            np.array(samples, np.int64),
            np.array(next_ranks, np.int64),
            np.array(kinds, np.uint8),
        )

    def seek(self, key: bytes) -> int:
        """The first rank whose name is not less than `key`."""
        return self._tree.lower_bound(key)

    def lookup(self, path: bytes) -> tuple[int, int]:
        """The sample of this name and the first sample below it; -1 for none."""
        tree = self._tree
        rank = tree.search(path)
        below = tree.lower_bound(path + b"/")
        has_below = below < self.samples and tree.name(below).startswith(path + b"/")
        return (
            -1 if rank < 0 else self._from_rank(rank),
            self._from_rank(below) if has_below else -1,
        )

    def lengths(self, indices: NDArray[np.int64], part: int) -> NDArray[np.int64]:
        """The length of a part of each sample in bytes, (k,) int64; -1 where it has none."""
        out = np.full(len(indices), -1, np.int64)
        for k, index in enumerate(indices):
            extents = self.extents_of([int(index)])
            lengths = extents["length"][extents["part"] == part]
            if len(lengths):
                out[k] = lengths[0]
        return out

    def extents_of(self, indices: Sequence[int] | NDArray[Any]) -> dict[str, NDArray[np.int64]]:
        """Where samples lie.

        Returns:
            One int64 element per extent, in order: `sample`, `part`, `volume`, `offset`, `length`,
            `crc` (0 where there is none) and `mtime_ns` (-1 where there is none).
        """
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and (int(wanted.min()) < 0 or int(wanted.max()) >= self.samples):
            self._index(int(wanted.min()) if int(wanted.min()) < 0 else int(wanted.max()))
        begin, end = self._extent_bounds(wanted)
        counts = end - begin
        ends = np.cumsum(counts)
        rows = np.repeat(begin - (ends - counts), counts) + np.arange(int(counts.sum()))
        samples = np.repeat(wanted, counts)
        return {"sample": samples, "part": self._parts(rows), **self._row_fields(rows)}

    def verify(self) -> list[int]:
        """Checks every block; returns the file offsets of the damaged ones."""
        payload = self._bytes[self._header.payload_offset :]
        computed = crc32c_blocks(payload, CHECKSUM_BLOCK_BYTES)
        bad = np.flatnonzero(computed != self._checksums)
        return [self._header.payload_offset + int(b) * CHECKSUM_BLOCK_BYTES for b in bad]

    # -- the file -------------------------------------------------------------------------------

    def _load_checksums(self) -> NDArray[np.uint32]:
        raw = self._bytes[PAGE_BYTES : PAGE_BYTES + 4 * self._header.checksum_count]
        computed = crc32c(raw.tobytes())
        if computed != self._header.checksum_crc:
            raise corrupt(
                self.path, "checksum of the page checksums", found=f"{computed:08x}",
                expected=f"{self._header.checksum_crc:08x}", offset=PAGE_BYTES,
            )  # fmt: skip
        return raw.view("<u4")

    def _touch_blocks(self, blocks: Sequence[int] | NDArray[Any] | range) -> None:
        for b in blocks:
            if self._checked[b]:
                continue
            start = self._header.payload_offset + int(b) * CHECKSUM_BLOCK_BYTES
            computed = crc32c(self._bytes[start : start + CHECKSUM_BLOCK_BYTES])
            if computed != self._checksums[b]:
                raise corrupt(
                    self.path, f"checksum of block {b}", found=f"{computed:08x}",
                    expected=f"{int(self._checksums[b]):08x}", offset=start,
                )  # fmt: skip
            self._checked[b] = True

    def _touch(self, start: int, end: int) -> NDArray[np.uint8]:
        """The file's bytes `start` to `end - 1`, checked."""
        base = self._header.payload_offset
        if end > start:
            first = (start - base) // CHECKSUM_BLOCK_BYTES
            self._touch_blocks(range(first, (end - 1 - base) // CHECKSUM_BLOCK_BYTES + 1))
        return self._bytes[start:end]

    def _touch_elements(self, section: Section, elements: NDArray[np.int64]) -> None:
        if not len(elements):
            return
        start = section.offset - self._header.payload_offset + elements * section.width
        blocks = np.concatenate([start, start + section.width - 1]) // CHECKSUM_BLOCK_BYTES
        self._touch_blocks(np.unique(blocks))

    def _gather(self, section: Section, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elements of a column of unsigned integers of any width, as int64."""
        self._touch_elements(section, elements)
        table = self._bytes[section.offset : section.offset + section.size_bytes]
        return _widen(table.reshape(section.count, section.width)[elements]).view(np.int64)

    def _column(self, section: Section, dtype: str) -> NDArray[Any]:
        return self._touch(section.offset, section.offset + section.size_bytes).view(dtype)

    def _strings(self, kind: SectionKind) -> list[bytes]:
        section = self._header.section(kind)
        if section is None:
            return []
        end = section.offset + section.size_bytes
        data = self._touch(section.offset, end).tobytes()
        strings = []
        at = 0
        for _ in range(section.count):
            size = int.from_bytes(data[at : at + 2], "little")
            strings.append(data[at + 2 : at + 2 + size])
            at += 2 + size
            if at > len(data):
                break
        if at != len(data):
            raise corrupt(
                self.path, f"strings of {kind.name.lower()}", found=f"{at} bytes",
                expected=f"{len(data)} bytes", offset=section.offset,
            )  # fmt: skip
        return strings

    # -- names ----------------------------------------------------------------------------------

    @property
    def _tree(self) -> NameTree:
        return NameTree(self.samples, self._header.levels, self._name_block, self.path)

    def _name_block(self, level: int, block: int) -> tuple[memoryview, int]:
        offsets = self._header.section(SectionKind.NAME_OFFSETS, level=level)
        blob = self._header.section(SectionKind.NAME_BLOCKS, level=level)
        assert offsets is not None
        assert blob is not None
        start, end = self._gather(offsets, np.array([block, block + 1])).tolist()
        if not 0 <= start <= end <= blob.size_bytes:
            raise corrupt(
                self.path, f"name block {block} of level {level}", found=(start, end),
                expected=f"within {blob.size_bytes} bytes", offset=offsets.offset,
            )  # fmt: skip
        at = blob.offset + start
        return self._touch(at, blob.offset + end).data, at

    def _index(self, i: int) -> int:
        if not 0 <= i < self.samples:
            raise SampleNotFound(
                f"{self.path}: sample index {i}, expected 0 to {self.samples - 1}.", path=self.path
            )
        return i

    def _rank(self, i: int) -> int:
        return self._permuted(SectionKind.INDEX_TO_RANK, i)

    def _from_rank(self, rank: int) -> int:
        return self._permuted(SectionKind.RANK_TO_INDEX, rank)

    def _permuted(self, kind: SectionKind, i: int) -> int:
        section = self._header.section(kind)
        if section is None:
            return i
        value = int(self._gather(section, np.array([i]))[0])
        if not 0 <= value < self.samples:
            raise corrupt(
                self.path, f"element {i} of {kind.name.lower()}", found=value,
                expected=f"0 to {self.samples - 1}", offset=section.offset + i * section.width,
            )  # fmt: skip
        return value

    # -- extents --------------------------------------------------------------------------------

    def _extent_bounds(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        section = self._header.section(SectionKind.FIRST_EXTENT)
        if section is None:
            return indices, indices + 1
        begin = self._gather(section, indices)
        end = self._gather(section, indices + 1)
        bad = np.flatnonzero((begin < 0) | (begin >= end) | (end > self.extents))
        if len(bad):
            i = int(bad[0])
            raise corrupt(
                self.path, f"extents of sample {int(indices[i])}",
                found=(int(begin[i]), int(end[i])),
                expected=f"one or more within 0 to {self.extents}", offset=section.offset,
            )  # fmt: skip
        return begin, end

    def _row_fields(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        self._touch_elements(self._rows, rows)
        start, width = self._rows.offset, self._rows.width
        table = self._bytes[start : start + self._rows.size_bytes].reshape(-1, width)[rows]
        layout = self._layout
        fields: dict[str, NDArray[np.int64]] = {}
        at = 0
        for name in ("volume", "offset", "length", "crc", "mtime"):
            field_width = getattr(layout, name)
            fields[name] = _widen(table[:, at : at + field_width]).view(np.int64)
            at += field_width
        mtime = fields.pop("mtime")
        fields["mtime_ns"] = mtime if layout.mtime else np.full(len(rows), -1, np.int64)
        return fields

    def _parts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        section = self._header.section(SectionKind.PART)
        if section is None:
            return np.zeros(len(rows), np.int64)
        parts = self._gather(section, rows)
        if len(parts) and int(parts.max()) >= len(self._part_names):
            raise corrupt(
                self.path, "part of an extent", found=int(parts.max()),
                expected=f"below {len(self._part_names)}", offset=section.offset,
            )  # fmt: skip
        return parts


def _widen(columns: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(k, width) little-endian bytes as (k,) uint64."""
    wide = np.zeros((len(columns), 8), np.uint8)
    wide[:, : columns.shape[1]] = columns
    return wide.view("<u8").reshape(-1)


class ReferenceReader:
    """Reads extents of an open store.

    Args:
        segment_of: gives the segment that holds a global index.
        check: compare whole extents with their checksums.
    """

    def __init__(self, segment_of: Callable[[int], OpenSegment], *, check: bool = True) -> None:
        self._segment_of = segment_of
        self._check = check

    def read(self, extent: Extent, start: int = 0, size: int | None = None) -> bytearray:
        """The bytes `start` to `start + size - 1` of one extent, fewer at its end.

        Raises:
            CorruptSample: the bytes differ from the checksum, or end early.
            SourceChanged: a foreign file is not as it was indexed.
            VolumeError: the system refuses the read.
        """
        begin = min(start, extent.length)
        end = extent.length if size is None else min(extent.length, begin + size)
        segment = self._segment_of(extent.index)
        self._check_place(segment, extent)
        data = bytearray(end - begin)
        view = memoryview(data)
        try:
            if segment.volumes.entries[extent.volume].kind == "tree":
                count = self._read_tree_file(segment, extent, view, begin)
            else:
                count = segment.volumes.read_into(extent.volume, view, extent.offset + begin)
        except OSError as e:
            if isinstance(e, HeadraceError):
                raise
            raise self._failure(segment, extent, "system", code=e.errno or 0) from e
        if count < len(data):
            raise self._failure(segment, extent, "short", str(count), str(len(data)))
        if self._check and extent.crc is not None and end - begin == extent.length:
            computed = crc32c(data)
            if computed != extent.crc:
                raise self._failure(
                    segment, extent, "checksum", f"{computed:08x}", f"{extent.crc:08x}"
                )
        return data

    @staticmethod
    def _check_place(segment: OpenSegment, extent: Extent) -> None:
        """The extent lies within its volume, before memory is allocated for it."""
        entries = segment.volumes.entries
        good = extent.volume < len(entries) and extent.length >= 0 and extent.offset >= 0
        if good and entries[extent.volume].kind != "tree":
            good = extent.offset + extent.length <= (entries[extent.volume].bytes or 0)
        if not good:
            raise CorruptStore(
                f"{segment.entry.directory}: sample {extent.index} lies in volume {extent.volume} at "
                f"{extent.offset:,} with {extent.length:,} bytes, which leaves the volumes.",
                path=segment.entry.directory,
                next_step="The directory belongs to other volumes: pack or index again.",
            )

    def _read_tree_file(
        self, segment: OpenSegment, extent: Extent, view: memoryview, start: int
    ) -> int:
        self._check_below(segment, extent)
        try:
            fd = os.open(self._path(segment, extent), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise self._failure(segment, extent, "changed", "no file", "the indexed file") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._failure(segment, extent, "changed", "no regular file", "one")
            if status.st_size != extent.length:
                raise self._failure(
                    segment,
                    extent,
                    "changed",
                    f"{status.st_size:,} bytes",
                    f"{extent.length:,} bytes",
                )
            if extent.mtime_ns is not None and status.st_mtime_ns != extent.mtime_ns:
                raise self._failure(
                    segment, extent, "changed", f"modified at {status.st_mtime_ns} ns",
                    f"{extent.mtime_ns} ns",
                )  # fmt: skip
            return read_fully(fd, view, start)
        finally:
            os.close(fd)

    def _check_below(self, segment: OpenSegment, extent: Extent) -> None:
        """A name in a damaged or hostile directory must not lead out of the tree."""
        if extent.name.startswith(b"/") or b".." in extent.name.split(b"/") or b"\0" in extent.name:
            raise CorruptStore(
                f"{segment.entry.directory}: the name of sample {extent.index}, "
                f"{os.fsdecode(extent.name)!r}, leads out of the indexed folder.",
                path=segment.entry.directory,
                next_step="Index the source again.",
            )

    @staticmethod
    def _path(segment: OpenSegment, extent: Extent) -> str:
        path = segment.volumes.paths[extent.volume]
        if segment.volumes.entries[extent.volume].kind != "tree":
            return path
        return os.path.join(path, os.fsdecode(extent.name))

    def _failure(
        self,
        segment: OpenSegment,
        extent: Extent,
        kind: str,
        found: str = "",
        expected: str = "",
        *,
        code: int = 0,
    ) -> HeadraceError:
        foreign = segment.volumes.entries[extent.volume].kind != "packed"
        return read_error(
            kind, extent.index, extent.name, self._path(segment, extent), extent.offset,
            found=found, expected=expected, code=code, foreign=foreign,
        )  # fmt: skip
