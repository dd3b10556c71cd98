"""Folders: a store's names, read as paths.

The directory lists a folder as a range of its sorted names and steps over subfolders: that costs by what
is shown, not by what lies below or beside. Unlike a mount's (`headrace.store.folders`), a path here may be a
file and a folder at once, as in an object store.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.store import Store
    from headrace.store.segment import Directory, OpenSegment

_BLOCK_MAX = 4096
"""Names that are read at once where many files stand side by side."""

_FOLDER = 1  # the kind of an entry, see `Directory.children`


class File(NamedTuple):
    """One part of one sample, seen as a file."""

    path: str
    """In the store."""
    sample: int
    part: int
    """Number among the store's parts."""
    size: int
    """In bytes."""


class Folders:
    """The files and folders that a store's names make.

    A sample is a file of its name. Where the store has several parts, each part is a file: the name, a
    dot and the part's name, as in a WebDataset tar. Names with empty components (`a//b`, `a/`) have no
    place in a hierarchy and are not listed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parts = [os.fsencode(p) for p in store.parts]

    def find(self, path: str) -> File | None:
        """The file at a path of the store."""
        name = os.fsencode(path)
        if len(self._parts) == 1:
            return self._file(name, 0)
        for base, part in self._readings(name):
            found = self._file(base, part)
            if found is not None:
                return found
        return None

    def is_folder(self, path: str) -> bool:
        """Whether any name goes on below a path."""
        name = os.fsencode(path)
        return not name or any(s.directory.lookup(name)[1] >= 0 for s in self._store.segments)

    def children(self, path: str) -> tuple[list[str], list[File]]:
        """The folders and files directly in a folder: paths in the store, sorted."""
        prefix = _prefix(path)
        folders: set[bytes] = set()
        files: list[File] = []
        for segment in self._store.segments:
            self._list_segment(segment, prefix, folders, files)
        files.sort()
        return sorted(os.fsdecode(prefix + f) for f in folders), files

    def below(self, path: str) -> Iterator[File]:
        """All files below a folder, segment by segment in the order of their names."""
        prefix = _prefix(path)
        # The successor of all names below: "/" is followed by "0".
        stop = prefix[:-1] + b"0" if prefix else None
        for segment in self._store.segments:
            directory = segment.directory
            first = directory.seek(prefix)
            last = directory.samples if stop is None else directory.seek(stop)
            for begin in range(first, last, _BLOCK_MAX):
                locals_ = _indices(directory, begin, min(begin + _BLOCK_MAX, last))
                names = directory.names(np.array(locals_, np.int64))
                shown = [i for i, name in enumerate(names) if _is_path(name)]
                yield from self._files(
                    segment, [locals_[i] for i in shown], [names[i] for i in shown]
                )

    def _list_segment(
        self, segment: OpenSegment, prefix: bytes, folders: set[bytes], files: list[File]
    ) -> None:
        directory, rank = segment.directory, 0
        while True:
            names, samples, ranks, kinds = directory.children(prefix, rank, _BLOCK_MAX)
            if not names:
                return
            rank = int(ranks[-1])
            found = list(zip(names, samples.tolist(), (kinds == _FOLDER).tolist(), strict=True))
            folders.update(name for name, _, is_folder in found if is_folder and name)
            shown = [
                (prefix + name, sample)
                for name, sample, is_folder in found
                if not is_folder and _is_path(prefix + name)
            ]
            files += self._files(segment, [sample for _, sample in shown], [n for n, _ in shown])

    def _files(
        self, segment: OpenSegment, locals_: Sequence[int], names: Sequence[bytes]
    ) -> list[File]:
        if not locals_:
            return []
        directory, base = segment.directory, segment.base
        found = directory.extents_of(np.array(locals_, np.int64))
        sizes = found["length"].tolist()
        if len(self._parts) == 1:
            return [
                File(os.fsdecode(name), base + local, 0, size)
                for name, local, size in zip(names, locals_, sizes, strict=True)
            ]
        by_local = dict(zip(locals_, names, strict=True))
        numbers = [self._parts.index(p) for p in directory.part_names]
        out = []
        for local, part, size in zip(
            found["sample"].tolist(), found["part"].tolist(), sizes, strict=True
        ):
            name, word = by_local[local], directory.part_names[part]
            path = os.fsdecode(name + b"." + word if word else name)
            out.append(File(path, base + local, numbers[part], size))
        return out

    def _file(self, name: bytes, part: int) -> File | None:
        index = int(self._store.find_many([name])[0])
        if index < 0:
            return None
        segment = self._store.segment_of(index)
        found = self._files(segment, [index - segment.base], [name])
        return next((f for f in found if f.part == part), None)

    def _readings(self, name: bytes) -> Iterator[tuple[bytes, int]]:
        """The ways to read a file's name as a sample's and a part's; the longest sample first."""
        numbers = {part: i for i, part in enumerate(self._parts)}
        if b"" in numbers:
            yield name, numbers[b""]
        at = name.rfind(b".")
        while at >= 0:
            part = numbers.get(name[at + 1 :])
            if part is not None and at + 1 < len(name):
                yield name[:at], part
            at = name.rfind(b".", 0, at)


def _prefix(path: str) -> bytes:
    return os.fsencode(path) + b"/" if path else b""


def _is_path(name: bytes) -> bool:
    return (
        bool(name) and not name.startswith(b"/") and not name.endswith(b"/") and b"//" not in name
    )


def _indices(directory: Directory, begin: int, end: int) -> list[int]:
    return [directory.index_at_rank(rank) for rank in range(begin, end)]
