"""A `datasets.Dataset` as a source: each row that it shows is a sample.

Its tables lie in mapped Arrow files. Which file a buffer belongs to, and where in it, is asked of the kernel
(`MappedFiles`), so that values are used where they lie. Rows that hold paths are files of a folder; rows in
memory can only be packed.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory import DirectoryColumns, columns_of
from headrace.store.manifest import VolumeEntry
from headrace.store.sources.arrow import (
    ArrowColumns,
    LabelReader,
    Values,
    choose_columns,
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
    no_samples,
    null_problems,
    raise_problems,
    refused,
    row_names,
    unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Mapping:
    """Addresses `begin` to `end - 1` show the file at `path` from `offset` on."""

    begin: int
    end: int
    offset: int
    path: str


class MappedFiles:
    """The files that are mapped now.

    Args:
        text: as the kernel writes it into `/proc/self/maps`; read from there if not given.
    """

    def __init__(self, text: bytes | None = None) -> None:
        if text is None:
            with open("/proc/self/maps", "rb") as f:
                text = f.read()
        self._mappings: list[Mapping] = []
        for line in text.splitlines():
            self._add(line)
        self._begins = [m.begin for m in self._mappings]

    def find(self, address: int, size: int) -> tuple[str, int] | None:
        """File and offset of the `size` bytes at `address`; None where no one file holds them."""
        at = bisect_right(self._begins, address) - 1
        if at < 0 or address + size > self._mappings[at].end:
            return None
        mapping = self._mappings[at]
        return mapping.path, address - mapping.begin + mapping.offset

    def _add(self, line: bytes) -> None:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            return
        # A deleted file has no path that another process could open.
        if fields[5].endswith(b" (deleted)"):
            return
        begin, end = (int(x, 16) for x in fields[0].split(b"-"))
        offset = int(fields[2], 16)
        path = fields[5].replace(b"\\012", b"\n").decode(errors="surrogateescape")
        last = self._mappings[-1] if self._mappings else None
        if last and (last.path, last.end, last.offset + last.end - last.begin) == (
            path,
            begin,
            offset,
        ):
            # The kernel splits a mapping where advice or protection differs.
            self._mappings[-1] = Mapping(last.begin, end, last.offset, path)
        else:
            self._mappings.append(Mapping(begin, end, offset, path))


_WHAT = "the data set"


def is_dataset(source: Any) -> bool:
    """Whether `source` is a `datasets.Dataset`; imports nothing."""
    package = sys.modules.get("datasets")
    return package is not None and isinstance(source, package.Dataset)


def open_dataset(dataset: Any, options: SourceOptions) -> Scan | Stream:
    """Lists the rows of a `datasets.Dataset`; a stream if it lies in memory."""
    table = dataset.data.table
    chosen = _choose(dataset, table.schema, options)
    view = _View(dataset, table, chosen)
    if not len(view.order):
        raise no_samples(_WHAT)
    source = {"kind": "huggingface", "columns": list(chosen.data), **options.to_json()}
    paths = view.paths()
    if paths is not None:
        return _scan_files(view, paths, source, options)
    try:
        return _scan_values(view, source, options)
    except NotInPlace as e:
        return _stream(view, source, options, str(e))


def _choose(dataset: Any, schema: Any, options: SourceOptions) -> ArrowColumns:
    features = dataset.features
    if options.column is None:
        # Images and sounds before other bytes.
        media = [n for n, f in features.items() if type(f).__name__ in ("Image", "Audio", "Video")]
        if len(media) == 1:
            options = replace(options, column=(media[0],))
    chosen = choose_columns(schema, options, _WHAT)
    names = getattr(features.get(chosen.label), "names", None) if chosen.label else None
    classes = tuple(os.fsencode(n) for n in names) if names else None
    return replace(chosen, class_names=classes)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the values of one column lie, for each row of the table."""

    volume: NDArray[np.int64]
    offset: NDArray[np.uint64]
    length: NDArray[np.uint64]
    valid: NDArray[np.bool_]


class _View:
    """A data set's table and which of its rows are shown.

    Attributes:
        order: (n,) int64, the table's row behind each row of the data set.
    """

    def __init__(self, dataset: Any, table: Any, columns: ArrowColumns) -> None:
        self.columns = columns
        self._table = table
        # The mapping has no public name; the length below proves that it is still what it was.
        indices = getattr(dataset, "_indices", None)
        if indices is None:
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
        self.parts = sorted(columns.data, key=os.fsencode)

    def values(self, name: str) -> list[Values]:
        """The values of a column, chunk by chunk."""
        return [values_of(chunk, _WHAT) for chunk in self._table.column(name).chunks]

    def labels(self) -> tuple[NDArray[np.int64] | None, tuple[bytes, ...] | None]:
        """(n,) int64 labels of the shown rows, and their classes."""
        reader = LabelReader(self.columns, _WHAT)
        if reader.name is None:
            return None, None
        chunks = [reader.read(chunk) for chunk in self._table.column(reader.name).chunks]
        return np.concatenate([np.zeros(0, np.int64), *chunks])[self.order], reader.class_names

    def paths(self) -> list[str] | None:
        """The shown rows' files, where the column holds their paths and no bytes."""
        if len(self.columns.data) != 1:
            return None
        column = self._table.column(self.columns.data[0])
        if not str(column.type).startswith("struct") or column.type.get_field_index("path") < 0:
            return None
        if any(v.valid is None or v.valid.any() for v in self.values(self.columns.data[0])):
            return None
        names = [p for chunk in column.chunks for p in chunk.field("path").to_pylist()]
        if not all(isinstance(p, str) and os.path.isabs(p) for p in names):
            return None
        return [names[row] for row in self.order.tolist()]


# -- values in mapped files -----------------------------------------------------------------------


def _scan_values(view: _View, source: dict[str, Any], options: SourceOptions) -> Scan:
    mappings = MappedFiles()
    files: dict[str, int] = {}
    places = [_locate(view.values(name), mappings, files) for name in view.parts]
    valid = np.logical_and.reduce([p.valid[view.order] for p in places])
    problems = null_problems(_WHAT, view.parts[0], np.flatnonzero(~valid))
    if options.on_error == "raise":
        raise_problems(_WHAT, problems)
    if not valid.any():
        raise no_samples(_WHAT)
    volumes = tuple(_volume(path) for path in files)
    columns = _columns(view, places, valid)
    _check_inside(columns, volumes)
    source["files"] = [v.path for v in volumes]
    return Scan(columns, volumes, source, problems)


def _locate(values: list[Values], mappings: MappedFiles, files: dict[str, int]) -> _Places:
    volume, offset, length, valid = [], [], [], []
    for chunk in values:
        count = len(chunk.start)
        number, base = _file_of(chunk, mappings, files)
        volume.append(np.full(count, number, np.int64))
        # An empty value lies anywhere.
        offset.append(np.where(chunk.length > 0, chunk.start + base, 0).astype(np.uint64))
        length.append(chunk.length.astype(np.uint64))
        valid.append(np.ones(count, bool) if chunk.valid is None else chunk.valid)
    return _Places(
        np.concatenate([np.zeros(0, np.int64), *volume]),
        np.concatenate([np.zeros(0, np.uint64), *offset]),
        np.concatenate([np.zeros(0, np.uint64), *length]),
        np.concatenate([np.zeros(0, bool), *valid]),
    )


def _file_of(chunk: Values, mappings: MappedFiles, files: dict[str, int]) -> tuple[int, int]:
    """Number of the file that holds a chunk's values, and where its buffer begins there."""
    used = np.flatnonzero(chunk.length)
    if not len(used):
        return 0, 0
    begin = int(chunk.start[used].min())
    end = int((chunk.start + chunk.length).max())
    place = mappings.find(chunk.buffer.address + begin, end - begin)
    if place is None:
        raise NotInPlace(f"{_WHAT} lies in memory")
    path, at = place
    return files.setdefault(path, len(files)), at - begin


def _volume(path: str) -> VolumeEntry:
    try:
        status = os.stat(path)
    except OSError as e:
        raise unreadable(path, e, "Load the data set again: its file is gone.") from e
    return file_volume(path, status)


def _columns(view: _View, places: list[_Places], valid: NDArray[np.bool_]) -> DirectoryColumns:
    shown = view.order[valid]
    labels, classes = view.labels()

    def interleaved(field: str) -> NDArray[Any]:
        return np.stack([getattr(p, field)[shown] for p in places], axis=1).reshape(-1)

    return columns_of(
        row_names(len(view.order), rows=np.flatnonzero(valid).tolist()),
        interleaved("volume"), interleaved("offset"), interleaved("length"),
        parts=[os.fsencode(p) for p in view.parts],
        labels=None if labels is None else labels[valid],
        class_names=classes,
    )  # fmt: skip


def _check_inside(columns: DirectoryColumns, volumes: tuple[VolumeEntry, ...]) -> None:
    if not volumes:
        return  # all values are empty
    sizes = np.array([v.bytes for v in volumes], np.uint64)[columns.volume]
    wrong = np.flatnonzero(columns.offset + columns.length > sizes)
    if len(wrong):
        path = volumes[int(columns.volume[wrong[0]])].path
        raise refused(path, "is shorter than when it was loaded.", "Load the data set again.")


# -- files that are known by path -----------------------------------------------------------------


def _scan_files(
    view: _View, paths: list[str], source: dict[str, Any], options: SourceOptions
) -> Scan:
    root = os.path.commonpath([os.path.dirname(p) for p in paths])
    names, sizes, times, kept = [], [], [], []
    problems: list[Problem] = []
    modes = set()
    for i, path in enumerate(paths):
        try:
            status = os.stat(path)
        except OSError as e:
            problems.append(Problem(path, f"row {i} cannot be read: {e.strerror}"))
            continue
        names.append(os.fsencode(os.path.relpath(path, root)))
        sizes.append(status.st_size)
        times.append(status.st_mtime_ns)
        modes.add((status.st_mode, status.st_gid))
        kept.append(i)
    if options.on_error == "raise":
        raise_problems(_WHAT, problems)
    if not names:
        raise no_samples(_WHAT)
    if len(set(names)) < len(names):
        raise SourceError(
            f"{_WHAT} shows a file twice ({len(names) - len(set(names)):,} times in all), expected "
            "each once: a file's path is its sample's name.",
            next_step="Give an order that repeats samples to the loader instead.",
        )
    labels, classes = view.labels()
    zeros = np.zeros(len(names), np.uint64)
    columns = columns_of(
        names, zeros, zeros, np.array(sizes, np.uint64),
        mtime=np.array(times, np.int64),
        labels=None if labels is None else labels[kept],
        class_names=classes,
    )  # fmt: skip
    return Scan(
        columns, (VolumeEntry("tree", root),), {**source, "path": root}, problems, modes=modes
    )


# -- values in memory -----------------------------------------------------------------------------


def _stream(view: _View, source: dict[str, Any], options: SourceOptions, reason: str) -> Stream:
    def items() -> Iterator[StreamItem]:
        columns = [view.values(name) for name in view.parts]
        views = [[memoryview(v.buffer or b"") for v in chunks] for chunks in columns]
        ends = [np.cumsum([len(v.start) for v in chunks]) for chunks in columns]
        labels, _ = view.labels()
        names = row_names(len(view.order))
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
            if len(parts) < len(view.parts):
                if options.on_error == "raise":
                    raise_problems(
                        _WHAT, null_problems(_WHAT, view.parts[len(parts)], np.array([i]))
                    )
                continue
            label = -1 if labels is None else int(labels[i])
            yield StreamItem(names[i], tuple(parts), label)

    return Stream(items, source, reason=reason, class_names=lambda: view.labels()[1])
