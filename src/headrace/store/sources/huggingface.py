"""A `datasets.Dataset` as a source: each row that it shows is a sample.

Its tables lie in mapped Arrow files. Which file a buffer belongs to, and where in it, is asked of the kernel
(`MappedFiles`), so that values are used where they lie. Rows that hold paths are files of a folder; rows in
memory can only be packed.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory import columns_of
from headrace.store.sources.arrow import (
    ArrowColumns,
    LabelReader,
    Values,
    choose_columns,
    null_problems,
    number_array,
    readable_values,
    values_of,
)
from headrace.store.sources.scan import (
    NotInPlace,
    Problem,
    Scan,
    SourceOptions,
    Stream,
    StreamItem,
    file_volume,
    joined_numbers,
    no_samples,
    raise_problems,
    refused,
    row_names,
    unreadable,
)
from headrace.store.sources.text import scan_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.store.manifest import VolumeEntry


class _Mapping(NamedTuple):
    """Addresses `begin` to `end - 1` show the file at `path` from `offset` on."""

    begin: int
    end: int
    offset: int
    path: str


class MappedFiles:
    """The files that are mapped now; `text` is as the kernel writes it into `/proc/self/maps`."""

    def __init__(self, text: bytes | None = None) -> None:
        if text is None:
            with open("/proc/self/maps", "rb") as f:
                text = f.read()
        self._mappings: list[_Mapping] = []
        for fields in (line.split(maxsplit=5) for line in text.splitlines()):
            # A deleted file has no path that another process could open.
            if len(fields) < 6 or fields[5][:1] != b"/" or fields[5].endswith(b" (deleted)"):
                continue
            begin, end = (int(x, 16) for x in fields[0].split(b"-"))
            path = fields[5].replace(b"\\012", b"\n").decode(errors="surrogateescape")
            new = _Mapping(begin, end, int(fields[2], 16), path)
            if self._mappings:
                last = self._mappings[-1]
                behind = last.offset + last.end - last.begin
                if (last.path, last.end, behind) == (path, begin, new.offset):
                    # The kernel splits a mapping where advice or protection differs.
                    new = last._replace(end=end)
                    self._mappings.pop()
            self._mappings.append(new)

    def find(self, address: int, size: int) -> tuple[str, int] | None:
        """File and offset of the `size` bytes at `address`; None where no one file holds them."""
        at = bisect_right(self._mappings, address, key=lambda m: m.begin) - 1
        if at < 0 or address + size > self._mappings[at].end:
            return None
        mapping = self._mappings[at]
        return mapping.path, address - mapping.begin + mapping.offset


_WHAT = "the data set"


def is_dataset(source: Any) -> bool:
    """Whether `source` is a `datasets.Dataset`; imports nothing."""
    package = sys.modules.get("datasets")
    return package is not None and isinstance(source, package.Dataset)


def open_dataset(dataset: Any, options: SourceOptions) -> Scan | Stream:
    """Lists the rows of a `datasets.Dataset`; a stream if it lies in memory."""
    view = _View(dataset, options)
    if not len(view.order):
        raise no_samples(_WHAT)
    source = {"kind": "huggingface", **view.columns.entry(), **options.to_json()}
    paths = view.paths()
    opened: Scan | Stream
    if paths is not None:
        view.columns = replace(
            view.columns, numbers=(), left=(*view.columns.numbers, *view.columns.left)
        )
        opened = _scan_files(view, paths, source, options)
    else:
        try:
            opened = _scan_values(view, source, options)
        except NotInPlace as e:
            opened = _stream(view, source, options, str(e))
    opened.notes.extend(view.columns.notes())
    return opened


class _View:
    """A data set's table, the columns that are used, and which of its rows are shown."""

    def __init__(self, dataset: Any, options: SourceOptions) -> None:
        self._table = table = dataset.data.table
        features = dataset.features
        # Images and sounds before other bytes.
        media = [n for n, f in features.items() if type(f).__name__ in ("Image", "Audio", "Video")]
        if options.column is None and len(media) == 1:
            options = replace(options, column=(media[0],))
        columns: ArrowColumns = choose_columns(table.schema, options, _WHAT)
        names = getattr(features.get(columns.label), "names", None) if columns.label else None
        classes = tuple(map(os.fsencode, names)) if names else None
        self.columns = replace(columns, class_names=classes)
        self.parts = sorted(columns.data, key=os.fsencode)  # columns, in the order of parts
        # The mapping has no public name; the length below proves that it is still what it was.
        indices = getattr(dataset, "_indices", None)
        if indices is None:
            # (n,) the table's row behind each row of the data set.
            self.order: NDArray[np.int64] = np.arange(table.num_rows, dtype=np.int64)
        else:
            self.order = np.asarray(indices.column(0).to_numpy(), np.int64)
        if len(self.order) != len(dataset):
            raise SourceError(
                f"{_WHAT} has {len(dataset):,} rows, its table shows {len(self.order):,}.",
                next_step="Call flatten_indices() on it, or pack an iterable over it.",
            )
        if len(self.order) and not 0 <= self.order.min() <= self.order.max() < table.num_rows:
            raise SourceError(
                f"{_WHAT} shows row {int(self.order.max()):,} of {table.num_rows:,}.",
                next_step="Its indices are damaged: load it again.",
            )

    def values(self, name: str, look: Callable[[Any, str], Values] = values_of) -> list[Values]:
        """The values of a column, chunk by chunk."""
        return [look(chunk, _WHAT) for chunk in self._table.column(name).chunks]

    def labels(self) -> tuple[NDArray[np.int64] | None, tuple[bytes, ...] | None]:
        """(n,) int64 labels of the shown rows, and their classes."""
        reader = LabelReader(self.columns, _WHAT)
        if reader.name is None:
            return None, None
        chunks = [reader.read(chunk) for chunk in self._table.column(reader.name).chunks]
        return np.concatenate([np.zeros(0, np.int64), *chunks])[self.order], reader.class_names

    def numbers(self) -> dict[str, NDArray[Any]]:
        """(n,) the columns of numbers of the shown rows."""
        columns = {}
        for name in self.columns.numbers:
            chunks = [
                number_array(chunk, name, "the data set")
                for chunk in self._table.column(name).chunks
            ]
            columns[name] = joined_numbers(chunks, name, "the data set")[self.order]
        return columns

    def paths(self) -> list[str] | None:
        """The shown rows' files, where the column holds their paths and no bytes."""
        if len(self.parts) != 1:
            return None
        column = self._table.column(self.parts[0])
        if not str(column.type).startswith("struct") or column.type.get_field_index("path") < 0:
            return None
        if any(v.valid is None or v.valid.any() for v in self.values(self.parts[0])):
            return None
        names = [p for chunk in column.chunks for p in chunk.field("path").to_pylist()]
        if not all(isinstance(p, str) and os.path.isabs(p) for p in names):
            return None
        return [names[row] for row in self.order.tolist()]


# -- values in mapped files -----------------------------------------------------------------------


def _scan_values(view: _View, source: dict[str, Any], options: SourceOptions) -> Scan:
    mappings, files = MappedFiles(), dict[str, int]()
    # Of each part: volume, offset, length and validity of the shown rows.
    places = [
        [column[view.order] for column in _locate(view.values(name), mappings, files)]
        for name in view.parts
    ]
    valid = np.logical_and.reduce([p[3] for p in places])
    problems = null_problems(_WHAT, view.parts[0], np.flatnonzero(~valid))
    if options.on_error == "raise":
        raise_problems(_WHAT, problems)
    if not valid.any():
        raise no_samples(_WHAT)
    volumes = tuple(_volume(path) for path in files)
    labels, classes = view.labels()
    volume, offset, length = (
        np.stack([p[field][valid] for p in places], axis=1).reshape(-1) for field in range(3)
    )
    if volumes:  # else all values are empty
        sizes = np.array([v.bytes for v in volumes], np.uint64)[volume]
        for at in np.flatnonzero(offset + length > sizes)[:1]:
            path = volumes[int(volume[at])].path
            raise refused(path, "is shorter than when it was loaded.", "Load the data set again.")
    columns = columns_of(
        row_names(len(view.order), rows=np.flatnonzero(valid).tolist()), volume, offset, length,
        parts=[os.fsencode(p) for p in view.parts],
        labels=None if labels is None else labels[valid],
        class_names=classes,
        columns={name: column[valid] for name, column in view.numbers().items()},
    )  # fmt: skip
    source["files"] = [v.path for v in volumes]
    return Scan(columns, volumes, source, problems)


def _locate(values: list[Values], mappings: MappedFiles, files: dict[str, int]) -> list[Any]:
    """For each row of the table: number of its file, offset and length there, and whether there is a value."""
    columns: tuple[list[Any], ...] = tuple(
        [np.zeros(0, kind)] for kind in (np.int64, np.uint64, np.uint64, bool)
    )
    for chunk in values:
        used = np.flatnonzero(chunk.length)
        number = base = 0  # an empty value lies anywhere
        if len(used):
            begin = int(chunk.start[used].min())
            end = int((chunk.start + chunk.length).max())
            place = mappings.find(chunk.buffer.address + begin, end - begin)
            if place is None:
                raise NotInPlace(f"{_WHAT} lies in memory")
            number, base = files.setdefault(place[0], len(files)), place[1] - begin
        count = len(chunk.start)
        rows = (
            np.full(count, number, np.int64),
            np.where(chunk.length > 0, chunk.start + base, 0).astype(np.uint64),
            chunk.length.astype(np.uint64),
            np.ones(count, bool) if chunk.valid is None else chunk.valid,
        )
        for column, piece in zip(columns, rows, strict=True):
            column.append(piece)
    return [np.concatenate(column) for column in columns]


def _volume(path: str) -> VolumeEntry:
    try:
        return file_volume(path, os.stat(path))
    except OSError as e:
        raise unreadable(path, e, "Load the data set again: its file is gone.") from e


# -- files that are known by path -----------------------------------------------------------------


def _scan_files(
    view: _View, paths: list[str], source: dict[str, Any], options: SourceOptions
) -> Scan:
    root = os.path.commonpath([os.path.dirname(p) for p in paths])
    return scan_listed(_WHAT, paths, view.labels(), {**source, "path": root}, options)


# -- values in memory -----------------------------------------------------------------------------


def _stream(view: _View, source: dict[str, Any], options: SourceOptions, reason: str) -> Stream:
    skipped: list[Problem] = []

    def items() -> Iterator[StreamItem]:
        skipped.clear()
        columns = [view.values(name, readable_values) for name in view.parts]
        views = [[memoryview(v.buffer or b"") for v in chunks] for chunks in columns]
        ends = [np.cumsum([len(v.start) for v in chunks]) for chunks in columns]
        labels, _ = view.labels()
        names = row_names(len(view.order))
        numbers = {name: column.tolist() for name, column in view.numbers().items()}
        for i, row in enumerate(view.order.tolist()):
            parts = []
            for name, chunks, bytes_of, end in zip(view.parts, columns, views, ends, strict=True):
                c = int(np.searchsorted(end, row, side="right"))
                k = row - (int(end[c - 1]) if c else 0)
                values = chunks[c]
                if values.valid is not None and not values.valid[k]:
                    break
                at = int(values.start[k])
                parts.append((os.fsencode(name), bytes_of[c][at : at + int(values.length[k])]))
            if len(parts) == len(view.parts):
                label = -1 if labels is None else int(labels[i])
                of_row = {name: column[i] for name, column in numbers.items()}
                yield StreamItem(names[i], tuple(parts), label, of_row)
            else:
                problems = null_problems(_WHAT, view.parts[len(parts)], np.array([i]))
                if options.on_error == "raise":
                    raise_problems(_WHAT, problems)
                skipped.extend(problems)

    return Stream(
        items, source, reason=reason, class_names=lambda: view.labels()[1], skipped=skipped,
        label=view.columns.label,
    )  # fmt: skip
