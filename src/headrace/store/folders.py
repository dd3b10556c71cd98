"""FolderTree: a store's names as a hierarchy, where each path is one file or one folder.

A sample is a file of its name. Where the store has several parts, each part is a file: the name, a dot
and the part's name, as in a WebDataset tar. The name tree is sorted, so listing a folder is a walk over
a range of ranks that steps over subfolders: it costs by what it shows. Nothing is kept, not even the
folders: a place in a listing is a number that says all.

Names that no path can have are hidden: an empty name or component (`a//b`, `a/`), `.`, `..`, a NUL, a
component above 255 bytes. Where a name is that of a folder too (`a` beside `a/b`), the folder is shown;
where two samples' parts meet in one path, the longer name is. Hidden samples are read by index.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.store.segment import OpenSegment
    from headrace.store.store import Store

COMPONENT_BYTES_MAX = 255  # of one component of a path: NAME_MAX of Linux's file systems
FOLDER = -1  # the part of entries that are folders
_KIND_FILE, _KIND_FOLDER, _KIND_FILE_PREFIX = 0, 1, 2


class Entry(NamedTuple):
    """A file or folder."""

    name: bytes  # the last component of its path
    sample: int
    """The sample; of a folder the first one in it, by name, in the first segment that has the folder."""
    part: int  # number among the store's parts, or `FOLDER`
    size: int  # in bytes; 0 for folders
    place: int  # where a listing goes on behind this entry

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.part == FOLDER


class FolderPage(NamedTuple):
    """Some entries of a folder."""

    entries: list[Entry]
    hidden: list[int]  # samples directly in this folder whose names have no place in a hierarchy
    place: int  # where to go on, or -1 at the end


class FolderTree:
    """The files and folders that a store's names make."""

    def __init__(self, store: Store) -> None:
        self._segments = store.segments
        self._parts = [os.fsencode(p) for p in store.parts]
        self._numbers = {part: i for i, part in enumerate(self._parts)}
        # In each segment, by the store's number of a part: its number there, or -1.
        self._local_parts = [
            [names.index(p) if p in names else -1 for p in self._parts]
            for names in (s.directory.part_names for s in store.segments)
        ]
        self._single = len(self._parts) == 1
        # Can two samples' parts make one path, of names that are not each other's beginnings?
        self._ambiguous = not self._single and any(not p or b"." in p for p in self._parts)

    def resolve(self, path: bytes) -> Entry | None:
        """What stands at a path ("a/b", without slashes at its ends); None if nothing does."""
        if not _is_component(path.rpartition(b"/")[2]):
            return None
        return self.folder(path) or self.file(path)

    def folder(self, path: bytes) -> Entry | None:
        """The folder at a path: names go on below it; None if none does."""
        for segment in self._segments:
            below = segment.directory.lookup(path)[1]
            if below >= 0:
                return Entry(path.rpartition(b"/")[2], segment.base + below, FOLDER, 0, 0)
        return None

    def file(self, path: bytes) -> Entry | None:
        """The file at a path, whatever stands in its way; None if no sample has one of this name."""
        name = path.rpartition(b"/")[2]
        readings = [(path, 0)] if self._single else self._readings(path)
        files = (self._file(name, self._find(base), part) for base, part in readings)
        return next((file for file in files if file is not None), None)

    def page(self, folder: bytes, place: int, count: int) -> FolderPage:
        """About `count` entries of a folder, from 0 on or from the place of an entry or page before."""
        prefix = folder + b"/" if folder else b""
        width = len(self._parts)
        rank, skip = divmod(place, width)
        for number, segment in enumerate(self._segments):
            directory = segment.directory
            if rank >= segment.base + directory.samples:
                continue
            first = max(0, rank - segment.base)
            names, samples, nexts, kinds = directory.children(prefix, first, count)
            if not names:
                continue
            listed = list(zip(names, samples.tolist(), nexts.tolist(), kinds.tolist(), strict=True))
            entries, hidden = self._entries(number, prefix, listed)
            if skip:  # inside a sample, behind some of its parts
                entries = [e for e in entries if e.place > place]
            return FolderPage(entries, hidden, (segment.base + int(nexts[-1])) * width)
        return FolderPage([], [], -1)

    def file_at(self, sample: int, part: int) -> Entry | None:
        """A part of a sample as a file, whatever its name; None if there is none."""
        return self._file(b"", sample, part)

    def sizes(self, number: int, samples: Sequence[int]) -> list[list[int]]:
        """For each part of the store the sizes of these samples of a segment; -1 for none."""
        directory = self._segments[number].directory
        wanted = np.array(samples, np.int64)
        return [
            [-1] * len(samples) if local < 0 else directory.lengths(wanted, local).tolist()
            for local in self._local_parts[number]
        ]

    def file_name(self, name: bytes, part: int) -> bytes:
        """What the file of a sample's part is called."""
        word = self._parts[part]
        return name if self._single or not word else name + b"." + word

    def part_number(self, part: bytes) -> int:
        """The number of a part among the store's; -1 if it has none of this name."""
        return self._numbers.get(part, -1)

    def name_of(self, sample: int) -> bytes:
        """The name of a sample."""
        segment = self._segment_of(sample)
        return segment.directory.name(sample - segment.base)

    def _entries(
        self, number: int, prefix: bytes, listed: list[tuple[bytes, int, int, int]]
    ) -> tuple[list[Entry], list[int]]:
        """What a segment's directory lists, (name, sample, next rank, kind), as entries."""
        base, width = self._segments[number].base, len(self._parts)
        alone = self._single and len(self._segments) == 1 and not self._parts[0]
        sizes = self.sizes(number, [sample for _, sample, _, _ in listed])
        entries: list[Entry] = []
        hidden: list[int] = []
        for k, (name, sample, rank, kind) in enumerate(listed):
            if alone and kind == _KIND_FILE and _is_component(name):
                # Nearly all entries of nearly all stores: nothing to look up.
                entries.append(Entry(name, sample, 0, sizes[0][k], rank))
            elif kind != _KIND_FOLDER:
                # A name that nothing else begins with can meet no other.
                doubtful = kind == _KIND_FILE_PREFIX or len(self._segments) > 1 or self._ambiguous
                files = [
                    (self.file_name(name, part), part, sizes[part][k])
                    for part in range(len(self._parts))
                    if sizes[part][k] >= 0
                ]
                shown = [
                    # Behind a part that is not the last, a listing goes on inside the sample.
                    Entry(file, base + sample, part, size, (base + rank - 1) * width + part + 1)
                    for file, part, size in files
                    if _is_component(file)
                    and not (doubtful and not self._is(prefix + file, base + sample, part))
                ]
                entries += shown
                if not shown:
                    hidden.append(base + sample)
            elif not _is_component(name):
                hidden.append(base + sample)
            elif not (number and self._has_folder(prefix + name, number)):
                entries.append(Entry(name, base + sample, FOLDER, 0, (base + rank) * width))
        return entries, hidden

    def _is(self, path: bytes, sample: int, part: int) -> bool:
        entry = self.resolve(path)
        return entry is not None and (entry.sample, entry.part) == (sample, part)

    def _has_folder(self, path: bytes, segments: int) -> bool:
        """Whether one of the first segments has a folder."""
        return any(s.directory.lookup(path)[1] >= 0 for s in self._segments[:segments])

    def _file(self, name: bytes, sample: int, part: int) -> Entry | None:
        if sample < 0 or not 0 <= part < len(self._parts):
            return None
        for number, segment in enumerate(self._segments):
            local = sample - segment.base
            if local < segment.directory.samples:
                size = self.sizes(number, [local])[part][0]
                return None if size < 0 else Entry(name, sample, part, size, 0)
        return None

    def _find(self, name: bytes) -> int:
        for segment in self._segments:
            here = segment.directory.lookup(name)[0]
            if here >= 0:
                return segment.base + here
        return -1

    def _segment_of(self, sample: int) -> OpenSegment:
        return next(s for s in self._segments if sample < s.base + s.directory.samples)

    def _readings(self, path: bytes) -> Iterator[tuple[bytes, int]]:
        """The ways to read a file's path as a sample's name and a part's; the longest name first."""
        if b"" in self._numbers:
            yield path, self._numbers[b""]
        at = path.rfind(b".")
        while at >= 0:
            part = self._numbers.get(path[at + 1 :])
            if part is not None and at + 1 < len(path):
                yield path[:at], part
            at = path.rfind(b".", 0, at)


def _is_component(name: bytes) -> bool:
    return 0 < len(name) <= COMPONENT_BYTES_MAX and name not in (b".", b"..") and b"\0" not in name
