"""Parquet files as a source: each row is a sample.

Where a column is neither compressed nor encoded, its values are used where they lie. pyarrow does not tell
their places, so the pages are walked here: footers and page headers are in Thrift's compact protocol, in which
a struct is its fields by number. Nothing is allocated by a count that the bytes do not bear out. All other
columns are read through pyarrow, and can only be packed.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.base.extras import import_extra
from headrace.errors import SourceError, VolumeError
from headrace.store.sources.arrow import (
    ArrowColumns,
    LabelReader,
    choose_columns,
    number_array,
    require_columns,
    stream_batch,
    stream_table,
)
from headrace.store.sources.scan import (
    ROWS_MAX,
    NotInPlace,
    Rows,
    Scan,
    SourceOptions,
    Stream,
    damaged,
    joined_numbers,
    scan_rows,
    source_entry,
    unsound,
)
from headrace.store.sources.shards import ObjectName, Window, map_files, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.store.sources.scan import StreamedRow

    Places = dict[bytes, tuple[NDArray[np.uint64], NDArray[np.uint64]]]

_DEPTH_MAX = 12
_STRING_BYTES_MAX = 1 << 24
"""The longest string: footers hold schemas and other metadata as strings."""


class BadThrift(ValueError):
    """Bytes that are not in Thrift's compact protocol."""


def parse_struct(data: bytes) -> tuple[dict[int, Any], int]:
    """A Thrift compact struct as {field id: integer, boolean, bytes, list, struct or None}, and its length.

    Raises `IndexError` where it goes on behind `data`, `ValueError` where it is none.
    """
    reader = _ThriftReader(data)
    return reader.struct(0), reader.at


class _ThriftReader:
    """Thrift's compact protocol, forwards over bytes. Takes memory by the bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH_MAX:
            raise BadThrift(f"nested more than {_DEPTH_MAX} deep")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._zigzag()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true, false
            return kind == 1
        if kind in (4, 5, 6):  # i16, i32, i64
            return self._zigzag()
        if kind == 8:
            return self._take(self._varint())
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (9, 10):  # list, set
            return self._list(depth)
        if kind not in (3, 7):
            raise BadThrift("of an unknown type")
        self._take(1 if kind == 3 else 8)  # byte, double
        return None

    def _list(self, depth: int) -> list[Any]:
        if depth > _DEPTH_MAX:
            raise BadThrift(f"nested more than {_DEPTH_MAX} deep")
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint()
        # Each element takes a byte at least, so the data bounds the count.
        if kind in (1, 2):
            return [self._byte() == 1 for _ in range(count)]
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _take(self, size: int) -> bytes:
        if size > _STRING_BYTES_MAX:
            raise BadThrift(f"with a string of {size:,} bytes")
        if self.at + size > len(self._data):
            raise IndexError
        self.at += size
        return self._data[self.at - size : self.at]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise BadThrift("with a number of more than 10 bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


_HEADER_BYTES_MAX = 1 << 20
"""A page's header holds its smallest and largest value, which may be a sample."""

_DATA_PAGE, _INDEX_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = range(4)
_PLAIN = 0
_PAGE_NAMES = {0: "PLAIN", 2: "dictionary", 5: "DELTA", 6: "DELTA_LENGTH", 7: "DELTA_BYTE_ARRAY",
               8: "dictionary", 9: "BYTE_STREAM_SPLIT"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group."""

    start: int  # offset of its first page in the file
    size: int  # bytes of all its pages
    rows: int  # values in it, nulls included
    width: int | None  # bytes of each value, or None where each has its length before it
    nullable: bool  # whether pages may begin with definition levels


def list_values(
    window: Window, chunk: ColumnChunk
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Offsets and lengths of a chunk's values, each (rows,) uint64.

    Raises NotInPlace if a page is encoded otherwise, or holds nulls, and SourceError if the pages contradict
    themselves.
    """
    path, end = window.path, chunk.start + chunk.size
    if chunk.start < 4 or chunk.size < 0 or end > window.size:
        most = f"at most {window.size:,}"
        raise damaged(path, "end of a column chunk", f"{end:,}", most, chunk.start)
    offset, length = array("Q"), array("Q")
    at = chunk.start
    while at < end:
        header, header_bytes = read_page_header(window, at, end)
        data, stop = at + header_bytes, at + header_bytes + header.size
        if header.size < 0 or stop > end:
            raise damaged(path, "end of a page", f"{stop:,}", f"at most {end:,}", at)
        if header.values is not None:
            first = _first_value(window, header, data, stop, nullable=chunk.nullable)
            left = chunk.rows - len(offset)
            if header.values > left:
                what = "number of values in a page"
                raise damaged(path, what, header.values, f"at most {left}", at)
            if chunk.width is None:
                _list_page(window, first, stop, header.values, (offset, length))
            elif stop - first != header.values * chunk.width:
                raise _misfit(window, stop - first, header.values * chunk.width, first)
            else:
                offset.extend(range(first, stop, chunk.width))
                length.extend(array("Q", [chunk.width]) * header.values)
        at = stop
    if len(offset) != chunk.rows:
        what = "number of values in a column chunk"
        raise damaged(path, what, len(offset), chunk.rows, chunk.start)
    return np.array(offset, np.uint64), np.array(length, np.uint64)


def _list_page(
    window: Window, at: int, stop: int, values: int, into: tuple[array[int], array[int]]
) -> None:
    """Adds offsets and lengths of the values of one page, which lie from `at` to `stop`."""
    for k in range(values):
        if at + 4 > stop:
            raise _misfit(window, k, values, at)
        size = int.from_bytes(window.read(at, 4), "little")
        at += 4
        if size > stop - at:
            most = f"at most {stop - at:,}"
            raise damaged(window.path, "length of a value", f"{size:,}", most, at - 4)
        into[0].append(at)
        into[1].append(size)
        at += size
    if at != stop:
        raise damaged(window.path, "end of a page's values", f"{at:,}", f"{stop:,}", at)


def _misfit(window: Window, count: int, expected: int, at: int) -> Exception:
    """A page with fewer values than rows: nulls take no place, or it is damaged."""
    if count < expected:
        return NotInPlace(f"{window.path}: a page holds nulls (offset {at:,})")
    return damaged(window.path, "size of a page's values", count, expected, at)


def _first_value(
    window: Window, header: PageHeader, data: int, stop: int, *, nullable: bool
) -> int:
    """Where the values begin, behind the levels."""
    if header.compressed:
        raise NotInPlace(f"{window.path}: its pages are compressed")
    if header.encoding != _PLAIN:
        name = _PAGE_NAMES.get(header.encoding or 0, str(header.encoding))
        raise NotInPlace(f"{window.path}: a page's values are {name}-encoded (offset {data:,})")
    first = data + (header.levels_bytes or 0)
    if header.levels_bytes is None and nullable:
        # Definition levels, behind their length.
        if data + 4 > stop:
            raise damaged(window.path, "size of a page", stop - data, "4 or more", data)
        first = data + 4 + int.from_bytes(window.read(data, 4), "little")
    if header.nulls:
        raise NotInPlace(f"{window.path}: a page holds nulls (offset {data:,})")
    if not data <= first <= stop:
        most = f"at most {stop:,}"
        raise damaged(window.path, "end of a page's levels", f"{first:,}", most, data)
    return first


# -- page headers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageHeader:
    """What matters of a page's header."""

    size: int  # bytes of the page behind its header
    values: int | None = None
    """Values in it, nulls included; None for a page without values of rows."""
    encoding: int | None = None  # of the values
    levels_bytes: int | None = None
    """Bytes of levels before them, where the header says it (version 2)."""
    nulls: int = 0  # nulls among the values, where the header says it (version 2)
    compressed: bool = False  # whether the header's two sizes differ


def read_page_header(window: Window, at: int, end: int) -> tuple[PageHeader, int]:
    """The page header at `at`, and its length in bytes."""
    size = 256
    while True:
        data = window.read(at, min(size, end - at))
        try:
            fields, used = parse_struct(data)
            return _page_header(fields), used
        except IndexError:  # it goes on behind `data`
            if len(data) < size or size >= _HEADER_BYTES_MAX:
                raise damaged(
                    window.path, "header of a page", "cut off", "a whole header", at
                ) from None
            size *= 16
        except BadThrift as e:
            raise damaged(window.path, "header of a page", e, "a page header", at) from None


def _page_header(fields: dict[int, Any]) -> PageHeader:
    kind, plain, packed = fields.get(1), fields.get(2), fields.get(3)
    if not all(isinstance(x, int) for x in (kind, plain, packed)):
        raise BadThrift("without type and sizes")
    assert isinstance(packed, int)
    if kind not in (_DATA_PAGE, _DATA_PAGE_V2):
        return PageHeader(packed)
    inner = fields.get(5 if kind == _DATA_PAGE else 8)
    if not isinstance(inner, dict):
        raise BadThrift("without the header of its kind")
    values = inner.get(1)
    if not isinstance(values, int) or values < 0:
        raise BadThrift(f"with {values} values")
    if kind == _DATA_PAGE:
        return PageHeader(packed, values, inner.get(2), compressed=plain != packed)
    levels = 0
    for size in (inner.get(5), inner.get(6)):
        if not isinstance(size, int) or not 0 <= size <= packed:
            raise BadThrift(f"with levels of {size} bytes")
        levels += size
    return PageHeader(
        packed, values, inner.get(4), levels, inner.get(2) or 0, compressed=plain != packed
    )


_READ_BYTES = 16 << 20  # bytes that a stream reads at once, about
_LABELS_AT_ONCE = 1 << 16

_CODECS = {"1": "SNAPPY", "2": "GZIP", "3": "LZO", "4": "BROTLI", "5": "LZ4", "6": "ZSTD",
           "7": "LZ4_RAW"}  # fmt: skip
_UNCOMPRESSED, _BYTE_ARRAY, _FIXED_LEN = 0, 6, 7
_WIDTHS = {1: 4, 2: 8, 4: 4, 5: 8}
"""Bytes of the physical types of numbers: INT32, INT64, FLOAT, DOUBLE."""


def open_parquet(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Lists the rows of Parquet files; a stream where values lie in no one place."""
    with _File(paths[0]) as first:
        columns = choose_columns(first.schema, options, paths[0])
    labels = LabelReader(columns, paths[0])
    source = {**source_entry("parquet", paths, options), **columns.entry()}
    try:
        files = map_files(paths, lambda path: _list_rows(path, columns), options.workers)
    except NotInPlace as e:
        count = sum(map_files(paths, _count_rows, options.workers))
        return stream_table(paths, columns, _stream, source, options, reason=str(e), count=count)
    if columns.label or columns.numbers:
        for path, file in zip(paths, files, strict=True):
            # One after the other, so that words are numbered alike each time.
            _read_numbers(path, file, columns, labels)
    return scan_rows(paths, files, source, options, labels.class_names, notes=columns.notes())


def _count_rows(path: str) -> int:
    with _File(path) as file:
        return int(file.metadata.num_rows)


class _File:
    """A Parquet file's footer."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pyarrow = import_extra("pyarrow", f"reading {path}")
        parquet = import_extra("pyarrow.parquet", f"reading {path}")
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
        return unsound(self.path, "Parquet", error, ", damaged or encrypted")

    def chunks(self, window: Window, name: str) -> list[ColumnChunk]:
        """The pieces of a column, one for each row group.

        Raises NotInPlace if it is compressed or nested.
        """
        chunks = []
        for group in self._row_groups(window):
            at, column = _leaf(group, name, self.path)
            leaf = self._file.schema.column(at)
            if column.get(4) != _UNCOMPRESSED:
                codec = _CODECS.get(str(column.get(4)), str(column.get(4)))
                raise NotInPlace(f"{self.path}: column {name!r} is compressed ({codec})")
            kind = column.get(1)
            if leaf.max_repetition_level or kind not in (_BYTE_ARRAY, _FIXED_LEN, *_WIDTHS):
                raise NotInPlace(f"{self.path}: column {name!r} is nested")
            width = leaf.length if kind == _FIXED_LEN else _WIDTHS.get(kind)
            read_as = self.schema.field(name).type
            if kind in _WIDTHS and (width or 0) * 8 != getattr(read_as, "bit_width", 0):
                raise NotInPlace(
                    f"{self.path}: column {name!r} is stored in another type than {read_as}"
                )
            numbers: list[Any] = [column.get(9), column.get(7), group.get(3)]
            if not all(isinstance(x, int) for x in numbers) or (width is not None and width < 1):
                expected = "three numbers, and a width"
                raise damaged(self.path, f"place of {name!r}", (numbers, width), expected, 0)
            start, size, rows = numbers
            dictionary = column.get(11)
            if isinstance(dictionary, int) and 0 < dictionary < start:
                start = dictionary
            chunks.append(ColumnChunk(start, size, rows, width, leaf.max_definition_level > 0))
        return chunks

    def _row_groups(self, window: Window) -> list[dict[int, Any]]:
        """The footer's row groups. Read here: pyarrow ends the process over an unknown codec."""
        end = max(0, window.size - 8)
        size = int.from_bytes(window.read(end, 4), "little")
        try:
            footer, _ = parse_struct(window.read(max(0, end - size), size))
        except (IndexError, BadThrift) as e:
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
            if isinstance(e, (SourceError, VolumeError)):
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
        require_columns(file.schema, columns, path)
        count = int(file.metadata.num_rows)
        places: Places = {}
        for name in columns.data:
            pieces = [list_values(window, chunk) for chunk in file.chunks(window, name)]
            empty = np.zeros(0, np.uint64)
            offset, length = (np.concatenate([empty, *(p[i] for p in pieces)]) for i in (0, 1))
            if len(offset) != count:
                raise damaged(path, f"number of values of {name!r}", len(offset), count, 0)
            places[os.fsencode(name)] = (offset, length)
        return Rows(window.volume(), count, places)


def _read_numbers(path: str, rows: Rows, columns: ArrowColumns, labels: LabelReader) -> None:
    """Fills in labels and columns of numbers."""
    names = [*filter(None, [columns.label]), *columns.numbers]
    pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    count = 0
    with _File(path) as file:
        for batch in file.batches(names, _LABELS_AT_ONCE):
            count += batch.num_rows
            if count > rows.count:
                break
            for name, column in pieces.items():
                array = batch.column(name)
                is_label = name == columns.label
                column.append(labels.read(array) if is_label else number_array(array, name, path))
    if count != rows.count:
        raise damaged(path, f"number of values in {names[0]!r}", count, rows.count, 0)
    if count:
        joined = {name: joined_numbers(column, name, path) for name, column in pieces.items()}
        rows.labels = joined.pop(columns.label, None) if columns.label else None
        rows.columns = joined
    elif columns.label:
        rows.labels = np.zeros(0, np.int64)


def _stream(
    path: str, columns: ArrowColumns, labels: LabelReader
) -> Iterator[tuple[int, StreamedRow]]:
    with _File(path) as file:
        require_columns(file.schema, columns, path)
        count = int(file.metadata.num_rows)
        size = path.remote.size if isinstance(path, ObjectName) else os.stat(path).st_size
        at_once = max(1, min(4096, _READ_BYTES * count // max(1, size)))
        row = 0
        for batch in file.batches(columns.read, at_once):
            for item in stream_batch(batch, columns, labels, path, row):
                yield count, item
            row += batch.num_rows
