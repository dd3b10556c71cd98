"""Rows: what files of many equal records (HDF5, Arrow, Parquet, MDS) are listed as.

Each such file gives one `Rows`: for every part, where each row's bytes lie. Here they are checked
against the file's size, named, and joined into the columns of a sample directory. Where the bytes lie in
no one place (compressed, encoded), the same rows come as a `RowStream` and can only be packed.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory_writer import DirectoryColumns
from headrace.store.names import join_names
from headrace.store.sources.scan import (
    Problem,
    Scan,
    SourceOptions,
    Stream,
    StreamItem,
    no_samples,
    raise_problems,
)
from headrace.store.sources.shards import damaged, shard_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from headrace.store.sources.scan import SourceVolume

    Place = tuple[NDArray[np.uint64], NDArray[np.uint64]]
    """Offsets and lengths in bytes, each (rows,)."""

LABEL_NAMES = ("label", "labels", "y")
"""What a column or an array of labels is called where nobody says which it is."""

ROWS_MAX = 1 << 40
"""Rows of one file: more is damage, and would not fit into memory as names."""

_DIGITS = 7
_PROBLEMS_KEPT = 1000


@dataclass(slots=True)
class Rows:
    """The rows of one file.

    Attributes:
        volume: the file.
        count: rows in the file.
        parts: for each part, offset and length of each kept row.
        labels: (kept,) int64, -1 for none, or None.
        kept: (kept,) int64, which rows are samples; None for all.
        problems: why the others are not.
    """

    volume: SourceVolume
    count: int
    parts: dict[bytes, Place]
    labels: NDArray[np.int64] | None = None
    kept: NDArray[np.int64] | None = None
    problems: list[Problem] = field(default_factory=list)


class NotInPlace(Exception):
    """The rows' bytes lie in no one place of the file; the message says why."""


def import_extra(module: str, extra: str, path: str) -> ModuleType:
    """Imports an optional package.

    Raises:
        SourceError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise SourceError(
            f"{path}: reading it needs the package {package}, which is not here: {e}.",
            path=path,
            next_step=f"Install it: pip install 'headrace[{extra}]'.",
        ) from e


def row_name(label: bytes, count: int, row: int) -> bytes:
    """The name of row `row` of `count` in the file called `label`."""
    digits = max(_DIGITS, len(str(max(count - 1, 0))))
    return b"%s:%0*d" % (label, digits, row)


def label_array(values: Any, path: str, name: str) -> NDArray[np.int64]:
    """Integers of any width as labels.

    Raises:
        SourceError: one is below -1 or above 2^63-1.
    """
    array = np.asarray(values)
    if array.size and (int(array.min()) < -1 or int(array.max()) >= 1 << 63):
        wrong = int(array.min()) if int(array.min()) < -1 else int(array.max())
        raise SourceError(
            f"{path}: a label in {name!r} is {wrong}, expected -1 (none) to 2^63-1.",
            path=path,
            next_step="Name another column of labels, or label=''.",
        )
    return array.astype(np.int64)


def scan_rows(
    paths: Sequence[str],
    files: Sequence[Rows],
    source: dict[str, Any],
    options: SourceOptions,
    class_names: tuple[bytes, ...] | None = None,
) -> Scan:
    """Joins the rows of several files.

    Raises:
        SourceError: an extent leaves its file, the files differ, a row cannot be a sample (unless
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
        rows = range(file.count) if file.kept is None else file.kept.tolist()
        digits = max(_DIGITS, len(str(max(file.count - 1, 0))))
        names += [b"%s:%0*d" % (label, digits, row) for row in rows]
    if not names:
        raise no_samples(paths[0])
    columns = _columns(names, files)
    if columns.labels is not None:
        columns.class_names = class_names or None
    return Scan(columns, tuple(f.volume for f in files), source, problems)


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
    expected = sorted(files[0].parts)
    for file in files[1:]:
        if sorted(file.parts) != expected:
            raise SourceError(
                f"{file.volume.path}: the parts are {_shown(sorted(file.parts))}, those of "
                f"{files[0].volume.path} are {_shown(expected)}, expected the same.",
                path=file.volume.path,
                next_step="Index them one by one, or name the columns.",
            )


def _shown(names: Sequence[bytes]) -> str:
    return str([os.fsdecode(n) for n in names])[:200]


def _columns(names: list[bytes], files: Sequence[Rows]) -> DirectoryColumns:
    blob, name_offsets = join_names(names)
    parts = sorted(files[0].parts)
    n, k = len(names), len(parts)

    def by_row(which: int) -> NDArray[np.uint64]:
        pieces = [np.stack([f.parts[p][which] for p in parts], axis=1) for f in files]
        return np.ascontiguousarray(np.concatenate(pieces).reshape(-1))

    counts = [len(f.parts[parts[0]][0]) * k for f in files]
    labels = None
    if any(f.labels is not None for f in files):
        labels = np.concatenate(
            [
                np.full(count // k, -1, np.int64) if f.labels is None else f.labels
                for f, count in zip(files, counts, strict=True)
            ]
        )
    return DirectoryColumns(
        names=blob,
        name_offsets=name_offsets,
        volume=np.repeat(np.arange(len(files), dtype=np.uint32), counts),
        offset=by_row(0),
        length=by_row(1),
        first_extent=np.arange(0, n * k + 1, k, dtype=np.uint64) if k > 1 else None,
        part=np.tile(np.arange(k, dtype=np.uint32), n) if k > 1 else None,
        part_names=tuple(parts),
        labels=labels,
    )


@dataclass(frozen=True, slots=True)
class StreamedRow:
    """One row that was read: parts in the order of their names, or why it is no sample."""

    row: int
    parts: tuple[tuple[bytes, bytes | memoryview], ...] = ()
    label: int = -1
    problem: str = ""


def stream_rows(
    paths: Sequence[str],
    read: Callable[[str], Iterator[tuple[int, StreamedRow]]],
    source: dict[str, Any],
    options: SourceOptions,
    *,
    reason: str,
    class_names: Callable[[], tuple[bytes, ...] | None] | None = None,
) -> Stream:
    """The rows of files that can only be read front to back.

    Args:
        paths: the files.
        read: gives each row of a file, with the number of rows in it.
        source: for the manifest.
        options: what to do with rows that are no samples.
        reason: why there are no places to be indexed.
        class_names: gives the names of labels 0, 1, ... when all was read.
    """
    labels = dict(zip(paths, shard_labels(list(paths)), strict=True))

    def items() -> Iterator[StreamItem]:
        for path in paths:
            for count, row in read(path):
                if row.problem:
                    if options.on_error == "raise":
                        raise_problems(path, [Problem(path, f"row {row.row}: {row.problem}")])
                    continue
                yield StreamItem(row_name(labels[path], count, row.row), row.parts, row.label)

    # The message that quotes the reason begins with the first file already.
    reason = reason.removeprefix(f"{paths[0]}: ")
    return Stream(items, source, reason=reason, class_names=class_names)


def null_problems(path: str, column: str, rows: NDArray[np.int64]) -> list[Problem]:
    """Problems for rows without a value; the first thousand, and a line for the rest."""
    found = [
        Problem(path, f"row {row} of {column!r} is null") for row in rows[:_PROBLEMS_KEPT].tolist()
    ]
    if len(rows) > _PROBLEMS_KEPT:
        found.append(
            Problem(path, f"{len(rows) - _PROBLEMS_KEPT:,} more rows of {column!r} are null")
        )
    return found
