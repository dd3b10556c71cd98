"""What every source gives: a `Scan`, which `index` records and `pack` copies.

A scan knows names, labels and where each extent lies, but holds no sample bytes. What can only be
read once, front to back (an iterable, a compressed tar), is a `Stream` instead, and can only be packed.

What cannot be used as it is, damaged or not meant for us, is a `SourceError`, whoever reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.base.files import readers
from headrace.errors import SourceChanged, SourceError
from headrace.io.objects.location import is_url
from headrace.store.directory import DirectoryColumns, columns_of
from headrace.store.manifest import VolumeEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.io.objects.engine import ObjectEngine

    Place = tuple[NDArray[np.uint64], NDArray[np.uint64]]
    """Offsets and lengths in bytes, each (rows,)."""

PROBLEMS_SHOWN = 10

FORMATS = (
    None, "files", "image", "audio", "video", "tar", "tfrecord", "parquet", "arrow", "mds", "array_record",
    "hdf5", "npy", "jsonl", "lines", "manifest", "coco", "megatron",
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64",
)  # fmt: skip
"""What `SourceOptions.format` may be."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a source is read."""

    extensions: tuple[str, ...] | None = None
    """Folders: take only files that end so (`.png`), in any case of letters."""
    dot_files: bool = False  # folders: take files and folders whose names begin with a dot, too
    prefix_names: bool = False  # several files: put the file's name and `/` before each sample's
    on_error: str = "raise"  # or `skip` what cannot be used and report it
    workers: int = 8  # threads that scan
    column: tuple[str, ...] | None = None
    """Tables and arrays: names of the columns or data sets that hold the samples' bytes."""
    label: str | None = None
    """Tables and arrays: the name of the one that holds integer labels; empty for none."""
    format: str | None = None
    """What the source is, where it does not say so itself: `files` (each file is a sample), `image`,
    `audio`, `video`, a kind of shards (`tar`, ...), or what the tokens of bare files are (`uint16`, ...)."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            expected = ", ".join(filter(None, FORMATS))
            raise ValueError(f"format is {self.format!r}, expected one of {expected}")
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
        given = {
            "extensions": self.extensions, "prefix_names": self.prefix_names or None,
            "column": self.column, "label": self.label, "format": self.format,
        }  # fmt: skip
        lists = ((k, list(v) if isinstance(v, tuple) else v) for k, v in given.items())
        return {k: v for k, v in lists if v is not None}


def source_options(column: str | Sequence[str] | None, **others: Any) -> SourceOptions:
    """The options as `pack`, `append`, `index` and `open` are given them: one column may be a string."""
    columns = (column,) if isinstance(column, str) else column
    return SourceOptions(column=None if columns is None else tuple(columns), **others)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of a source that cannot be a sample."""

    path: str
    reason: str
    offset_bytes: int | None = None

    @staticmethod
    def of(error: SourceError) -> Problem:
        """What an error says, for a report."""
        path = error.path or ""
        return Problem(path, error.message.removeprefix(f"{path}: "), error.offset_bytes)

    def __str__(self) -> str:
        where = "" if self.offset_bytes is None else f" (offset {self.offset_bytes:,})"
        return f"{self.path}{where}: {self.reason}"


def file_volume(path: str, status: os.stat_result) -> VolumeEntry:
    """A local file with this status, as a volume."""
    return VolumeEntry("file", os.path.abspath(path), status.st_size, status.st_mtime_ns)


@dataclass(slots=True)
class Scan:
    """A source whose samples lie at known places."""

    columns: DirectoryColumns
    """Names, extents, labels. For a tree, offsets are 0 and mtime is set."""
    volumes: tuple[VolumeEntry, ...]  # what `columns.volume` counts
    source: dict[str, Any]  # how to scan this again; goes into the manifest
    skipped: list[Problem] = field(default_factory=list)
    """What was left out (only with `on_error="skip"`)."""
    notes: list[str] = field(default_factory=list)
    """What was left out because it is no sample, and why there are no labels."""
    objects: ObjectEngine | None = None  # reads volumes that are objects
    modes: set[tuple[int, int]] = field(default_factory=set)
    """The st_mode and st_gid of a tree's files and folders, each once."""

    def readers(self) -> int:
        """Who may read all of it, as the mode of a folder that holds a copy."""
        files = [v.path for v in self.volumes if v.kind == "file"]
        return readers(self.modes) & readers_of(files)

    def listing_hash(self) -> bytes:
        """Names, places, sizes, times and labels in 32 bytes: has the source changed?"""
        digest = hashlib.sha256()
        c = self.columns
        # The text is that of the versions before, whose interrupted packs are resumed.
        volumes = "".join(
            f"SourceVolume(kind={v.kind!r}, path={v.path!r}, bytes={v.bytes!r}, "
            f"mtime_ns={v.mtime_ns!r}, etag={v.etag!r}), "
            for v in self.volumes
        )
        volumes = volumes.removesuffix(" ") if len(self.volumes) == 1 else volumes[:-2]
        text = f"(({volumes}), {c.part_names!r}, {c.class_names!r}, {sorted(c.columns)!r})"
        digest.update(text.encode(errors="surrogateescape"))
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
    """A source that can only be read front to back."""

    items: Callable[
        [], Iterator[StreamItem]
    ]  # begins, from the first sample, each time it is called
    source: dict[str, Any]  # what it was; goes into the manifest
    reason: str = ""  # why its samples have no places that could be indexed
    class_names: Callable[[], tuple[bytes, ...] | None] | None = None
    """Gives the names of labels 0, 1, ..., once all items were read."""
    notes: list[str] = field(default_factory=list)  # what was left out because it is no sample
    count: int | None = None  # rows, where that is known without reading them
    skipped: list[Problem] = field(default_factory=list)
    """What could not be used, as far as was iterated (only with `on_error="skip"`)."""
    resumed: Callable[[int], tuple[list[bytes], Iterator[StreamItem]]] | None = None
    """The names of the first so many samples, and the others, where the first need not be made again."""
    label: str | None = None  # the column that labels are read from, where there is one

    def readers(self) -> int:
        """Who may read all of it, as the mode of a folder that holds a copy."""
        return readers_of(self.source.get("paths") or [self.source.get("path")])


def readers_of(paths: Iterable[Any]) -> int:
    """Who may read all of these files, as the mode of a folder that holds a copy; URLs do not count."""
    modes = set()
    for path in paths:
        with contextlib.suppress(OSError, TypeError, ValueError):
            if os.fsdecode(path).startswith("/proc/"):
                continue  # memory of this process
            for each in (path, os.path.dirname(os.path.abspath(path))):
                status = os.stat(each)
                modes.add((status.st_mode, status.st_gid))
    return readers(modes)


def absolute_path(path: str) -> str:
    """A file's absolute path; a URL as it is."""
    return str(path) if is_url(path) else os.path.abspath(path)


def shard_labels(paths: list[str]) -> list[bytes]:
    """A short unique name for each file: its base name, or what differs of its path."""
    base = [os.path.basename(p) for p in paths]
    if len(set(base)) < len(base):
        common = os.path.commonpath([absolute_path(p) for p in paths])
        base = [os.path.relpath(absolute_path(p), common) for p in paths]
    return [os.fsencode(b) for b in base]


def refused(path: str, problem: str, next_step: str, offset: int | None = None) -> SourceError:
    """The error for a source that cannot be used as it is."""
    return SourceError(f"{path}: {problem}", path=path, offset_bytes=offset, next_step=next_step)


def damaged(
    path: str, what: str, stated: object, expected: object, offset: int | None = None
) -> SourceError:
    """The error for a file that contradicts its own format."""
    where = "" if offset is None else f" (offset {offset:,})"
    return refused(
        path, f"{what} is {stated}, expected {expected}{where}.",
        "The file is truncated or damaged: fetch it again.", offset,
    )  # fmt: skip


def unreadable(path: str, error: OSError, next_step: str) -> SourceError:
    """The error for a file that the system refuses."""
    return refused(path, f"cannot be read: {error.strerror or error}.", next_step)


def unsound(path: str, kind: str, error: object, because: str = "") -> SourceError:
    """The error for a file that a library cannot read."""
    reason = str(error).partition("\n")[0][:300]
    return refused(
        path, f"is no sound {kind} file: {reason}.",
        f"The file is truncated{because or ' or damaged'}: fetch it again.",
    )  # fmt: skip


def source_entry(kind: str, paths: Sequence[str], options: SourceOptions) -> dict[str, Any]:
    """How files are listed again: what stands in the manifest of a source."""
    return {"kind": kind, "paths": [absolute_path(p) for p in paths], **options.to_json()}


def because(stream: Stream) -> str:
    """Why a stream cannot be indexed, as the end of a message."""
    return f": {stream.reason}" if stream.reason else ""


SKIP_THEM = "Mend or remove them, or pass on_error='skip' to leave them out."


def raise_problems(path: str, problems: list[Problem], next_step: str = SKIP_THEM) -> None:
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
        next_step=next_step,
        problems=problems,
    )


def no_samples(path: str, detail: str = "") -> SourceError:
    """The error for a source without samples."""
    return refused(
        path, f"no samples found, expected one or more{detail}.",
        "Check the path and the options that choose samples.",
    )  # fmt: skip


def source_changed(path: str, what: str, now: object, expected: object) -> SourceChanged:
    """The error for a foreign file that is not as it was."""
    return SourceChanged(
        f"{path}: {what} is {now}, expected {expected}: the file changed after it was listed.",
        path=path,
        next_step="Wait until nobody writes there, then pack or index again.",
    )


def check_unchanged(path: str, status: os.stat_result, size: int, mtime_ns: int | None) -> None:
    """Checks a file's size and modification time against the listing."""
    if status.st_size != size:
        raise source_changed(path, "size in bytes", f"{status.st_size:,}", f"{size:,}")
    if mtime_ns is not None and status.st_mtime_ns != mtime_ns:
        raise source_changed(path, "modification time", status.st_mtime_ns, mtime_ns)


LABEL_NAMES = ("label", "labels", "y")
"""What a column or an array of labels is called where nobody says which it is."""

ROWS_MAX = 1 << 40  # rows of one file: more is damage, and would not fit into memory as names
_DIGITS = 7


@dataclass(slots=True)
class Rows:
    """The rows of one file."""

    volume: VolumeEntry  # the file
    count: int  # rows in the file
    parts: dict[bytes, Place]  # for each part, offset and length of each kept row
    labels: NDArray[np.int64] | None = None  # (kept,) int64, -1 for none, or None
    kept: NDArray[np.int64] | None = None  # (kept,) int64, which rows are samples; None for all
    crc: NDArray[np.uint32] | None = None
    """(kept,) uint32, where rows have one part and a checksum; else None."""
    problems: list[Problem] = field(default_factory=list)  # why the others are not
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """(kept,) numbers each, by name, which become columns of the store."""


class NotInPlace(Exception):
    """The rows' bytes lie in no one place of the file; the message says why."""


def row_names(count: int, label: bytes = b"", rows: Iterable[int] | None = None) -> list[bytes]:
    """The names of rows of a file called `label` that has `count` of them; of all if `rows` is None."""
    digits = max(_DIGITS, len(str(max(count - 1, 0))))
    prefix = label + b":" if label else b""
    return [b"%s%0*d" % (prefix, digits, row) for row in (range(count) if rows is None else rows)]


def listed(names: Sequence[str]) -> str:
    """Names of columns or data sets as a message shows them."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(map(repr, names[:20])) + more or "none"


def left_out(names: Sequence[str], how: str = "") -> list[str]:
    """The note that columns or data sets are not used."""
    return [f"columns left out: {listed(names)}{how}"] if names else []


UNREAD_LABELS: Final = "labels left out: "
"""How the note begins that labels are there, and would have to be asked for."""

TOKEN_PARTS = ("tokens", "input_ids")
"""What parts of tokens are called where samples have several parts."""


def numbers_entry(parts: Sequence[str], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """What a manifest says of parts that are numbers: their types, and what tokens are, if one part holds them.

    Tokens are integers of the only part, or of the part that is called so.
    """
    entry: dict[str, Any] = {"dtypes": dict(dtypes)} if dtypes else {}
    part = parts[0] if len(parts) == 1 else next((n for n in TOKEN_PARTS if n in parts), None)
    dtype = None if part is None else dtypes.get(part)
    if dtype and np.dtype(dtype).kind in "iu" and dtype != "uint64":
        entry["tokens"] = {"dtype": dtype}
    return entry


def choose_label(
    types: Sequence[tuple[str, Any]],
    is_label: Callable[[Any], bool],
    options: SourceOptions,
    path: str,
    expected: str,
) -> str | None:
    """The column of labels of a table: the one that the options name, else by its name and type.

    All columns that the options name must be there; `expected` says what one of labels holds.
    """
    names = [name for name, _ in types]
    kinds = dict(types)
    for name in (*(options.column or ()), *filter(None, [options.label])):
        if names.count(name) != 1:
            count = f"are {names.count(name)} columns" if name in names else "is no column"
            raise refused(
                path, f"there {count} {name!r}, the columns are {listed(names)}.",
                "Name one of them.",
            )  # fmt: skip
    if options.label is None:
        label = next((n for n in LABEL_NAMES if n in kinds and is_label(kinds[n])), None)
        return None if label in (options.column or ()) else label
    if options.label and not is_label(kinds[options.label]):
        raise refused(
            path,
            f"column {options.label!r} has the type {kinds[options.label]}, expected {expected}.",
            "Name another column of labels.",
        )
    return options.label or None


def count_unlabelled(listed: Scan | Stream, columns: DirectoryColumns) -> tuple[int, list[str]]:
    """How many samples have no label, and a note that says so where labels were read.

    Raises SourceError if labels were asked for by name, and no sample has one.
    """
    labels, source = columns.labels, listed.source
    missing = columns.samples if labels is None else int(np.count_nonzero(labels < 0))
    if source.get("label") and missing == columns.samples:
        where = str((source.get("paths") or [source.get("path", "the source")])[0])
        raise refused(
            where, f"no sample has a label: all {missing:,} values of {source['label']!r} are null or -1.",
            "Name another column of labels, or none: --label '' (in Python label='').",
        )  # fmt: skip
    read = listed.label if isinstance(listed, Stream) else labels is not None
    if not missing or (missing == columns.samples and not read):
        return missing, []
    return missing, [f"without a label: {missing:,} of {columns.samples:,} samples, which get -1"]


def label_array(values: Any, path: str, name: str) -> NDArray[np.int64]:
    """Integers of any width as labels."""
    array = np.asarray(values)
    if array.size and (int(array.min()) < -1 or int(array.max()) >= 1 << 63):
        wrong = int(array.min()) if int(array.min()) < -1 else int(array.max())
        raise refused(
            path, f"a label in {name!r} is {wrong}, expected -1 (none) to 2^63-1.",
            "Name another column of labels, or label=''.",
        )  # fmt: skip
    return array.astype(np.int64)


def scan_rows(
    paths: Sequence[str],
    files: Sequence[Rows],
    source: dict[str, Any],
    options: SourceOptions,
    class_names: tuple[bytes, ...] | None = None,
    *,
    notes: Sequence[str] = (),
) -> Scan:
    """Joins the rows of several files; `notes` are `Scan.notes`.

    Raises SourceError if an extent leaves its file, the files differ, a row cannot be a sample (unless
    `on_error` is `skip`), or there are no rows.
    """
    for file in files:
        _check_places(file)
    _check_alike(files)
    problems = [p for file in files for p in file.problems]
    if options.on_error == "raise":
        raise_problems(paths[0], problems)
    labels = shard_labels(list(paths))
    names: list[bytes] = []
    for label, file in zip(labels, files, strict=True):
        names += row_names(file.count, label, None if file.kept is None else file.kept.tolist())
    if not names:
        raise no_samples(paths[0])
    columns = _columns(names, files)
    columns.class_names = class_names or None if columns.labels is not None else None
    return Scan(columns, tuple(f.volume for f in files), source, problems, list(notes))


def _check_places(file: Rows) -> None:
    """Each extent lies in its file: checked before anything is read or allocated by it."""
    size = file.volume.bytes or 0
    for name, (offset, length) in file.parts.items():
        wrong = np.flatnonzero((offset > size) | (length > size - np.minimum(offset, size)))
        if len(wrong):
            row = int(wrong[0])
            raise damaged(
                file.volume.path, f"end of row {row} of {os.fsdecode(name)!r}",
                f"{int(offset[row]) + int(length[row]):,}", f"at most the file's size {size:,}",
                int(offset[row]),
            )  # fmt: skip


def _check_alike(files: Sequence[Rows]) -> None:
    first, *others = [(f.volume.path, [os.fsdecode(n) for n in sorted(f.parts)]) for f in files]
    for path, parts in others:
        if parts != first[1]:
            raise refused(
                path, f"the parts are {str(parts)[:200]}, those of {first[0]} are "
                f"{str(first[1])[:200]}, expected the same.",
                "Index them one by one, or name the columns.",
            )  # fmt: skip


def joined_numbers(pieces: Sequence[NDArray[Any]], name: str, path: str) -> NDArray[Any]:
    """(n,) a column out of its pieces: float64 where any of them is, since nulls are NaN.

    Raises SourceError if another has integers that float64 does not hold.
    """
    column = np.concatenate(pieces)
    for piece in pieces if column.dtype.kind == "f" else ():
        if piece.dtype.kind in "iu":
            beyond = piece[abs(piece.astype(np.float64)) >= EXACT]
            if beyond.size:
                raise inexact(name, path, f"{beyond[0]} is one")
    return column


EXACT: Final = 2.0**53  # from here on float64 does not hold every integer


def inexact(name: str, path: str, example: str) -> SourceError:
    """The error for a column that cannot be one of float64."""
    return refused(
        path,
        f"column {name!r} has nulls, which become NaN, or numbers with a point, and integers that float64 "
        f"cannot hold: {example}.",
        "Fill the nulls, or leave the column out.",
    )


def _columns(names: list[bytes], files: Sequence[Rows]) -> DirectoryColumns:
    parts = sorted(files[0].parts)
    k = len(parts)

    def by_row(which: int) -> NDArray[np.uint64]:
        pieces = [np.stack([f.parts[p][which] for p in parts], axis=1) for f in files]
        return np.ascontiguousarray(np.concatenate(pieces).reshape(-1))

    counts = [len(f.parts[parts[0]][0]) * k for f in files]
    labels = None
    if any(f.labels is not None for f in files):
        none = (np.full(count // k, -1, np.int64) for count in counts)
        pieces = [n if f.labels is None else f.labels for f, n in zip(files, none, strict=True)]
        labels = np.concatenate(pieces)
    volume = np.repeat(np.arange(len(files), dtype=np.uint32), counts)
    crc = [f.crc for f in files if f.crc is not None]
    given = [file for file in files if file.columns]
    return columns_of(
        names, volume, by_row(0), by_row(1), parts=parts, labels=labels,
        crc=np.concatenate(crc) if crc else None,
        columns={
            n: joined_numbers([f.columns[n] for f in given], n, given[0].volume.path)
            for n in (given or files)[0].columns
        },
    )  # fmt: skip


class StreamedRow(NamedTuple):
    """One row that was read: parts in the order of their names, or why it is no sample."""

    row: int
    parts: tuple[tuple[bytes, bytes | memoryview], ...] = ()
    label: int = -1
    columns: Mapping[str, int | float] = MappingProxyType({})
    problem: str = ""


def stream_rows(
    paths: Sequence[str],
    read: Callable[[str], Iterator[tuple[int, StreamedRow]]],
    source: dict[str, Any],
    options: SourceOptions,
    *,
    reason: str,
    class_names: Callable[[], tuple[bytes, ...] | None] | None = None,
    notes: Sequence[str] = (),
    count: int | None = None,
    label: str | None = None,
) -> Stream:
    """The rows of files that can only be read front to back.

    `read` gives each row of a file, with the number of rows in it. All others are fields of the `Stream`.
    """
    labels = dict(zip(paths, shard_labels(list(paths)), strict=True))

    skipped: list[Problem] = []

    def items() -> Iterator[StreamItem]:
        skipped.clear()
        for path in paths:
            for rows, row in read(path):
                if row.problem:
                    problem = Problem(path, f"row {row.row}: {row.problem}")
                    if options.on_error == "raise":
                        raise_problems(path, [problem])
                    skipped.append(problem)
                    continue
                (name,) = row_names(rows, labels[path], [row.row])
                yield StreamItem(name, row.parts, row.label, row.columns)

    # The message that quotes the reason begins with the first file already.
    reason = reason.removeprefix(f"{paths[0]}: ")
    return Stream(
        items, source, reason=reason, class_names=class_names, notes=list(notes), count=count,
        skipped=skipped, label=label,
    )  # fmt: skip
