"""What every source gives: a `Scan`, which `index` records and `pack` copies.

A scan knows names, labels and where each extent lies, but holds no sample bytes. What can only be
read once, front to back (an iterable, a compressed tar), is a `Stream` instead, and can only be packed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.files import readers
from headrace.errors import SourceChanged, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.directory_writer import DirectoryColumns

PROBLEMS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a source is read.

    Attributes:
        extensions: folders: take only files that end so (`.png`), in any case of letters.
        prefix_names: several files: put the file's name and `/` before each sample's name.
        on_error: `raise`, or `skip` what cannot be used and report it.
        workers: threads that scan.
        column: tables and arrays: names of the columns or data sets that hold the samples' bytes.
        label: tables and arrays: the name of the one that holds integer labels; empty for none.
    """

    extensions: tuple[str, ...] | None = None
    prefix_names: bool = False
    on_error: str = "raise"
    workers: int = 8
    column: tuple[str, ...] | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}, expected 'raise' or 'skip'")
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}, expected 1 or more")
        if isinstance(self.extensions, str):
            raise TypeError(f"extensions is {self.extensions!r}, expected a tuple of strings")
        if self.column is not None:
            names = self.column
            good = all(isinstance(name, str) and name for name in names)
            if not names or not good or len(set(names)) < len(names):
                raise ValueError(f"column is {names!r}, expected one or more different names")
            if self.label in names:
                raise ValueError(f"label is {self.label!r}, which is among the columns {names}")

    def to_json(self) -> dict[str, Any]:
        """What `repair` needs to scan alike again."""
        out: dict[str, Any] = {}
        if self.extensions is not None:
            out["extensions"] = list(self.extensions)
        if self.prefix_names:
            out["prefix_names"] = True
        if self.column is not None:
            out["column"] = list(self.column)
        if self.label is not None:
            out["label"] = self.label
        return out


def source_options(
    *,
    extensions: tuple[str, ...] | None = None,
    prefix_names: bool = False,
    on_error: str = "raise",
    workers: int = 8,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
) -> SourceOptions:
    """The options as `pack`, `append` and `index` are given them."""
    columns = (column,) if isinstance(column, str) else column
    return SourceOptions(
        extensions=extensions,
        prefix_names=prefix_names,
        on_error=on_error,
        workers=workers,
        column=None if columns is None else tuple(columns),
        label=label,
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of a source that cannot be a sample."""

    path: str
    reason: str
    offset_bytes: int | None = None

    def __str__(self) -> str:
        where = "" if self.offset_bytes is None else f" (offset {self.offset_bytes:,})"
        return f"{self.path}{where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SourceVolume:
    """A foreign file, an object, or a folder whose files are the samples (`tree`)."""

    kind: str
    path: str
    bytes: int | None = None
    mtime_ns: int | None = None
    etag: str | None = None


@dataclass(slots=True)
class Scan:
    """A source whose samples lie at known places.

    Attributes:
        columns: names, extents, labels. For a tree, offsets are 0 and mtime is set.
        volumes: what `columns.volume` counts.
        source: how to scan this again; goes into the manifest.
        skipped: what was left out (only with `on_error="skip"`).
        objects: reads volumes that are objects.
        modes: st_mode and st_gid of a tree's files and folders, each once.
    """

    columns: DirectoryColumns
    volumes: tuple[SourceVolume, ...]
    source: dict[str, Any]
    skipped: list[Problem] = field(default_factory=list)
    objects: ObjectEngine | None = None
    modes: set[tuple[int, int]] = field(default_factory=set)

    def readers(self) -> int:
        """Who may read all of it, as the mode of a folder that holds a copy."""
        files = [v.path for v in self.volumes if v.kind == "file"]
        return readers(self.modes) & readers_of(files)

    def listing_hash(self) -> bytes:
        """Names, places, sizes, times and labels in 32 bytes: has the source changed?"""
        digest = hashlib.sha256()
        c = self.columns
        digest.update(repr((self.volumes, c.part_names, c.class_names, sorted(c.columns))).encode(
            errors="surrogateescape"))  # fmt: skip
        for column in (c.names, c.name_offsets, c.volume, c.offset, c.length, c.crc, c.mtime,
                       c.first_extent, c.part, c.labels, *c.columns.values()):  # fmt: skip
            digest.update(
                b"-" if column is None else np.ascontiguousarray(column).view(np.uint8).data
            )
        return digest.digest()


@dataclass(frozen=True, slots=True)
class StreamItem:
    """One sample of a stream: parts as (name, bytes), in the order of the parts' names."""

    name: bytes
    parts: tuple[tuple[bytes, bytes | memoryview], ...]
    label: int = -1
    columns: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """A source that can only be read front to back.

    Attributes:
        items: begins to iterate, from the first sample, each time it is called.
        source: what it was; goes into the manifest.
        reason: why its samples have no places that could be indexed.
        class_names: gives the names of labels 0, 1, ..., once all items were read.
    """

    items: Callable[[], Iterator[StreamItem]]
    source: dict[str, Any]
    repeatable: bool = True
    reason: str = ""
    class_names: Callable[[], tuple[bytes, ...] | None] | None = None

    def readers(self) -> int:
        """Who may read all of it, as the mode of a folder that holds a copy."""
        return readers_of(self.source.get("paths") or [self.source.get("path")])


def readers_of(paths: Iterable[Any]) -> int:
    """Who may read all of these files, as the mode of a folder that holds a copy; URLs do not count."""
    found = set()
    for path in paths:
        with contextlib.suppress(OSError, TypeError, ValueError):
            if os.fsdecode(path).startswith("/proc/"):
                continue  # memory of this process
            for each in (path, os.path.dirname(os.path.abspath(path))):
                status = os.stat(each)
                found.add((status.st_mode, status.st_gid))
    return readers(found)


def because(stream: Stream) -> str:
    """Why a stream cannot be indexed, as the end of a message."""
    return f": {stream.reason}" if stream.reason else ""


def raise_problems(path: str, problems: list[Problem]) -> None:
    """Raises one error that lists the first problems and counts them all."""
    if not problems:
        return
    shown = "\n".join(f"  {p}" for p in problems[:PROBLEMS_SHOWN])
    more = len(problems) - PROBLEMS_SHOWN
    tail = f"\n  and {more:,} more" if more > 0 else ""
    raise SourceError(
        f"{path}: {len(problems):,} things cannot be samples:\n{shown}{tail}\n",
        path=problems[0].path,
        offset_bytes=problems[0].offset_bytes,
        next_step="Mend or remove them, or pass on_error='skip' to leave them out.",
        problems=problems,
    )


def no_samples(path: str, detail: str = "") -> SourceError:
    """The error for a source without samples."""
    return SourceError(
        f"{path}: no samples found, expected one or more{detail}.",
        path=path,
        next_step="Check the path and the options that choose samples.",
    )


def source_changed(path: str, what: str, found: object, expected: object) -> SourceChanged:
    """The error for a foreign file that is not as it was."""
    return SourceChanged(
        f"{path}: {what} is {found}, expected {expected}: the file changed after it was listed.",
        path=path,
        next_step="Wait until nobody writes there, then pack or index again.",
    )


def check_unchanged(path: str, status: os.stat_result, size: int, mtime_ns: int | None) -> None:
    """Checks a file's size and modification time against the listing.

    Raises:
        SourceChanged: it differs.
    """
    if status.st_size != size:
        raise source_changed(path, "size in bytes", f"{status.st_size:,}", f"{size:,}")
    if mtime_ns is not None and status.st_mtime_ns != mtime_ns:
        raise source_changed(path, "modification time", status.st_mtime_ns, mtime_ns)
