"""Parquet files as a source: each row's value of a binary column is a sample.

Values of uncompressed PLAIN pages lie in the file as they are, and are indexed there. All other columns
are read through pyarrow, row group by row group, and can only be packed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.errors import SourceError
from headrace.store.sources.arrow_column import (
    ArrowColumns,
    LabelReader,
    choose_columns,
    stream_batch,
)
from headrace.store.sources.object_name import absolute_path, open_binary, readable
from headrace.store.sources.parquet_pages import ColumnChunk, list_values
from headrace.store.sources.rows import (
    ROWS_MAX,
    NotInPlace,
    Rows,
    import_extra,
    scan_rows,
    stream_rows,
)
from headrace.store.sources.scan import Scan, SourceOptions, Stream
from headrace.store.sources.shards import Window, damaged, map_files
from headrace.store.sources.thrift import BadThrift, parse_struct

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.store.sources.rows import StreamedRow

    Places = dict[bytes, tuple[NDArray[np.uint64], NDArray[np.uint64]]]

_READ_BYTES = 16 << 20
"""Bytes that a stream reads at once, about."""

_LABELS_AT_ONCE = 1 << 16

_CODECS = {"1": "SNAPPY", "2": "GZIP", "3": "LZO", "4": "BROTLI", "5": "LZ4", "6": "ZSTD",
           "7": "LZ4_RAW"}  # fmt: skip
_UNCOMPRESSED, _BYTE_ARRAY, _FIXED_LEN = 0, 6, 7


def open_parquet(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Lists the rows of Parquet files; a stream where values lie in no one place.

    Raises:
        SourceError: a file is damaged, no column fits, or pyarrow is not installed.
    """
    with _File(paths[0]) as first:
        columns = choose_columns(first.schema, options, paths[0])
    labels = LabelReader(columns, paths[0])
    absolute = [absolute_path(p) for p in paths]
    source: dict[str, Any] = {"kind": "parquet", "paths": absolute, **options.to_json()}
    source["columns"] = list(columns.data)
    try:
        files = map_files(paths, lambda path: _list_rows(path, columns), options.workers)
    except NotInPlace as e:
        again = LabelReader(columns, paths[0])
        return stream_rows(
            paths, lambda path: _stream(path, columns, again), source, options,
            reason=str(e), class_names=lambda: again.class_names,
        )  # fmt: skip
    if columns.label:
        for path, file in zip(paths, files, strict=True):
            # One after the other, so that words are numbered alike each time.
            file.labels = _read_labels(path, file.count, columns, labels)
    return scan_rows(paths, files, source, options, labels.class_names)


class _File:
    """A Parquet file's footer.

    Raises:
        SourceError: it is damaged, encrypted, or cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.pyarrow = import_extra("pyarrow", "arrow", path)
        parquet = import_extra("pyarrow.parquet", "arrow", path)
        try:
            self._file = parquet.ParquetFile(readable(path))
            self.schema = self._file.schema_arrow
            _ = self.schema.names, str(self.schema.types)  # finds names that are no text
            self.metadata = self._file.metadata
        except (self.pyarrow.ArrowException, OSError, ValueError, MemoryError) as e:
            raise self.damaged(e) from e
        if not 0 <= self.metadata.num_rows < ROWS_MAX:
            raise damaged(path, "number of rows", self.metadata.num_rows, f"below {ROWS_MAX:,}", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def damaged(self, error: BaseException) -> SourceError:
        said = str(error).partition("\n")[0][:300]
        return SourceError(
            f"{self.path}: is no sound Parquet file: {said}.",
            path=self.path,
            next_step="The file is truncated, damaged or encrypted: fetch it again.",
        )

    def chunks(self, name: str) -> list[ColumnChunk]:
        """The pieces of a column, one for each row group.

        Raises:
            NotInPlace: it is compressed or nested.
        """
        found = []
        for group in self._row_groups():
            at, column = _leaf(group, name, self.path)
            leaf = self._file.schema.column(at)
            if column.get(4) != _UNCOMPRESSED:
                codec = _CODECS.get(str(column.get(4)), str(column.get(4)))
                raise NotInPlace(f"{self.path}: column {name!r} is compressed ({codec})")
            if leaf.max_repetition_level or column.get(1) not in (_BYTE_ARRAY, _FIXED_LEN):
                raise NotInPlace(f"{self.path}: column {name!r} is nested")
            width = leaf.length if column[1] == _FIXED_LEN else None
            numbers: list[Any] = [column.get(9), column.get(7), group.get(3)]
            if not all(isinstance(x, int) for x in numbers) or (width is not None and width < 1):
                raise damaged(
                    self.path,
                    f"place of {name!r}",
                    (numbers, width),
                    "three numbers, and a width",
                    0,
                )
            start, size, rows = numbers
            dictionary = column.get(11)
            if isinstance(dictionary, int) and 0 < dictionary < start:
                start = dictionary
            found.append(ColumnChunk(start, size, rows, width, leaf.max_definition_level > 0))
        return found

    def _row_groups(self) -> list[dict[int, Any]]:
        """The footer's row groups. Read here: pyarrow ends the process over an unknown codec."""
        try:
            with open_binary(self.path) as f:
                f.seek(-8, os.SEEK_END)
                size = int.from_bytes(f.read(4), "little")
                f.seek(-8 - size, os.SEEK_END)
                footer, _ = parse_struct(f.read(size))
        except (OSError, IndexError, BadThrift) as e:
            raise self.damaged(e) from e
        groups = footer.get(4)
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise damaged(self.path, "list of row groups", type(groups).__name__, "a list", 0)
        return groups

    def batches(self, names: list[str], rows: int) -> Iterator[Any]:
        """The columns, `rows` rows at a time."""
        try:
            yield from self._file.iter_batches(batch_size=rows, columns=names)
        except (self.pyarrow.ArrowException, OSError, ValueError, MemoryError) as e:
            if isinstance(e, SourceError):
                raise
            raise self.damaged(e) from e


def _leaf(group: dict[int, Any], name: str, path: str) -> tuple[int, dict[int, Any]]:
    """Number and metadata of the column that holds the bytes of `name`."""
    wanted = ([name.encode()], [name.encode(), b"bytes"])
    columns = group.get(1)
    for at, column in enumerate(columns if isinstance(columns, list) else ()):
        metadata = column.get(3) if isinstance(column, dict) else None
        if isinstance(metadata, dict) and metadata.get(3) in wanted:
            if column.get(1) is not None:
                raise NotInPlace(f"{path}: column {name!r} lies in another file")
            return at, metadata
    raise NotInPlace(f"{path}: column {name!r} is nested")


def _list_rows(path: str, columns: ArrowColumns) -> Rows:
    with _File(path) as file, Window(path) as window:
        _require(file, columns)
        places: Places = {}
        for name in columns.data:
            pieces = [list_values(window, chunk) for chunk in file.chunks(name)]
            empty = np.zeros(0, np.uint64)
            places[os.fsencode(name)] = (
                np.concatenate([empty, *(p[0] for p in pieces)]),
                np.concatenate([empty, *(p[1] for p in pieces)]),
            )
        return Rows(window.volume(), int(file.metadata.num_rows), _counted(file, places))


def _counted(file: _File, places: Places) -> Places:
    for name, (offset, _) in places.items():
        if len(offset) != file.metadata.num_rows:
            raise damaged(
                file.path, f"number of values of {os.fsdecode(name)!r}", len(offset),
                file.metadata.num_rows, 0,
            )  # fmt: skip
    return places


def _require(file: _File, columns: ArrowColumns) -> None:
    """A further file has the columns of the first."""
    choose_columns(
        file.schema, SourceOptions(column=columns.data, label=columns.label or ""), file.path
    )


def _read_labels(
    path: str, count: int, columns: ArrowColumns, labels: LabelReader
) -> NDArray[np.int64]:
    pieces = [np.zeros(0, np.int64)]
    with _File(path) as file:
        for batch in file.batches([columns.label or ""], _LABELS_AT_ONCE):
            pieces.append(labels.read(batch.column(columns.label)))
            if sum(map(len, pieces)) > count:
                break
    found = np.concatenate(pieces)
    if len(found) != count:
        raise damaged(path, f"number of labels in {columns.label!r}", len(found), count, 0)
    return found


def _stream(
    path: str, columns: ArrowColumns, labels: LabelReader
) -> Iterator[tuple[int, StreamedRow]]:
    with _File(path) as file:
        _require(file, columns)
        count = int(file.metadata.num_rows)
        size = os.stat(path).st_size
        at_once = max(1, min(4096, _READ_BYTES * count // max(1, size)))
        names = [*columns.data, *filter(None, [columns.label])]
        row = 0
        for batch in file.batches(names, at_once):
            for item in stream_batch(batch, columns, labels, path, row):
                yield count, item
            row += batch.num_rows
