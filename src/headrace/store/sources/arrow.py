"""Arrow files as a source, and Arrow's columns for all tables: where the values lie, and the labels.

Works on arrays that pyarrow made of a file, mapped or read. Values are found in the arrays' own buffers;
offsets are checked against those buffers before they are used, since pyarrow does not.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.base.extras import import_extra
from headrace.errors import SourceError
from headrace.store.sources.scan import (
    NotInPlace,
    Problem,
    Rows,
    Scan,
    SourceOptions,
    Stream,
    StreamedRow,
    check_unchanged,
    choose_label,
    damaged,
    file_volume,
    inexact,
    joined_numbers,
    label_array,
    left_out,
    listed,
    numbers_entry,
    refused,
    scan_rows,
    source_entry,
    stream_rows,
    unsound,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


_METADATA_BYTES_MAX = 16 << 20
_NULLS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class ArrowColumns:
    """Which columns of a table are used."""

    data: tuple[str, ...]  # names of the columns whose values are the samples' parts
    label: str | None  # the name of the column of labels, or None
    class_names: tuple[bytes, ...] | None
    """What the schema says labels 0, 1, ... are called, or None."""
    numbers: tuple[str, ...] = ()
    """Names of the columns of numbers that become columns of the store."""
    left: tuple[str, ...] = ()  # names of the columns that are not used
    dtypes: dict[str, str] = field(default_factory=dict)
    """Of the parts that are numbers, or lists of them: of which type."""

    @property
    def read(self) -> list[str]:
        """Names of all columns that are read of a row."""
        return [*self.data, *filter(None, [self.label]), *self.numbers]

    def entry(self) -> dict[str, Any]:
        """What a manifest says of them."""
        entry = {"columns": list(self.data), **numbers_entry(self.data, self.dtypes)}
        return {**entry, "left": list(self.left)} if self.left else entry

    def notes(self) -> list[str]:
        """What is left out."""
        how = "--column takes those of bytes, text or numbers, as parts"
        return left_out(self.left, f"; samples are {listed(self.data)}, {how}")


def choose_columns(schema: Any, options: SourceOptions, path: str) -> ArrowColumns:
    """Chooses the columns of a `pyarrow.Schema` by the options, or by their types and names."""
    types = list(zip(schema.names, schema.types, strict=True))
    label = choose_label(types, _is_label, options, path, "integers or a dictionary of strings")
    kinds = dict(types)
    data = _choose_data(kinds, label, options, path)
    rest = [name for name, _ in types if name not in (*data, label)]
    numbers = () if options.column else tuple(n for n in rest if _is_number(kinds[n]))
    left = tuple(name for name in rest if name not in numbers)
    dtypes = {n: str(_number_type(kinds[n])) for n in data if _number_type(kinds[n])}
    return ArrowColumns(data, label, _names(schema, label), numbers, left, dtypes)


def require_columns(schema: Any, columns: ArrowColumns, path: str) -> None:
    """A further file has the columns of the first, and numbers of the same types."""
    options = SourceOptions(column=columns.data, label=columns.label or "")
    here = choose_columns(schema, options, path)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    for name in columns.numbers:
        if name not in kinds or not _is_number(kinds[name]):
            what = f"column {name!r} is {kinds.get(name, 'not there')}, expected numbers as in the first file."
            raise refused(path, what, "Name the samples' columns alone: column='image'.")
    if here.dtypes != columns.dtypes:
        raise refused(
            path, f"the types of its numbers are {here.dtypes}, those of the first file {columns.dtypes}.",
            "Give files of one schema.",
        )  # fmt: skip


def stream_table(
    paths: list[str],
    columns: ArrowColumns,
    read: Callable[[str, ArrowColumns, LabelReader], Iterator[tuple[int, StreamedRow]]],
    source: dict[str, Any],
    options: SourceOptions,
    *,
    reason: str,
    count: int | None = None,
) -> Stream:
    """The rows of tables that can only be read, whose labels are numbered in the order of reading."""
    labels = LabelReader(columns, paths[0])
    return stream_rows(
        paths, lambda path: read(path, columns, labels), source, options, reason=reason,
        class_names=lambda: labels.class_names, notes=columns.notes(), count=count,
        label=columns.label,
    )  # fmt: skip


def _choose_data(
    types: dict[str, Any], label: str | None, options: SourceOptions, path: str
) -> tuple[str, ...]:
    if options.column:
        for name in options.column:
            if not (_is_binary(types[name]) or _is_words(types[name]) or _number_type(types[name])):
                raise refused(
                    path, f"column {name!r} has the type {types[name]}, expected binary, strings, "
                    "numbers, lists of numbers, or a struct with a field `bytes`.",
                    "Name another column, or pack an iterable over the table.",
                )  # fmt: skip
        return options.column
    names = [n for n, t in types.items() if _is_binary(t) and not _is_text(t)]
    names = names or [n for n, t in types.items() if _is_text(t)]
    if names and len(names) != 1:
        raise refused(
            path, f"{len(names)} columns hold bytes ({listed(names)}), expected one; the columns "
            f"are {listed(list(types))}.", _how_to_name(names[0]),
        )  # fmt: skip
    words = [n for n, t in types.items() if n != label and _is_words(t)]
    if not names and words:
        if len(types) - (label is not None) > 1:
            what = f"column {words[0]!r} is a dictionary of strings: samples, or classes of the other columns?"
            how = f"{_how_to_name(words[0])} Classes: --label {words[0]} (label={words[0]!r})."
            raise refused(path, what, how)
        names = words
    # Of a table of numbers alone, lists (of tokens, of features) are the samples, else each row's numbers are.
    names = names or [n for n, t in types.items() if _number_type(t) and not _is_number(t)]
    names = names or [
        n for n, t in types.items() if _is_number(t) and n != label and _number_type(t)
    ]
    names = names or [n for n in types if n == label and _number_type(types[n])]
    if not names:
        what = f"no column holds bytes, text or numbers; the columns are {listed(list(types))}."
        raise refused(path, what, "Pack an iterable over the table.")
    return tuple(names)


def _how_to_name(column: str) -> str:
    return f"Name the samples' column: --column {column} (in Python column={column!r})."


def _types() -> Any:
    return import_extra("pyarrow.types", "reading a table")


def _is_text(kind: Any) -> bool:
    t = _types()
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def _is_words(kind: Any) -> bool:
    """Whether it is strings by number, as pandas writes categories."""
    return bool(_types().is_dictionary(kind) and _is_text(kind.value_type))


def _is_binary(kind: Any) -> bool:
    t = _types()
    if t.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and not t.is_struct(kind.field(at).type) and _is_binary(kind.field(at).type)
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return bool(t.is_uint8(kind.value_type))
    return bool(
        _is_text(kind) or t.is_binary(kind) or t.is_large_binary(kind)
        or t.is_fixed_size_binary(kind) or t.is_binary_view(kind)
    )  # fmt: skip


def _is_number(kind: Any) -> bool:
    t = _types()
    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind))


def _number_type(kind: Any) -> Any:
    """The type of numbers whose bytes, one or a list of them, a part can be; None: it cannot."""
    t = _types()
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        kind = None if t.is_uint8(kind.value_type) else kind.value_type
    if kind is None or not (t.is_integer(kind) or t.is_floating(kind)):
        return None
    return np.dtype(kind.to_pandas_dtype())


def _is_label(kind: Any) -> bool:
    t = _types()
    return bool(_is_words(kind) or t.is_integer(kind) or t.is_boolean(kind))


def _names(schema: Any, label: str | None) -> tuple[bytes, ...] | None:
    """The class names that the `datasets` package writes into a schema's metadata."""
    raw = (schema.metadata or {}).get(b"huggingface", b"")
    if not label or not raw or len(raw) > _METADATA_BYTES_MAX:
        return None
    try:
        feature = json.loads(raw)["info"]["features"][label]
        names = feature["names"] if feature["_type"] == "ClassLabel" else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # advice that cannot be read is no damage of the data
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        return None
    return tuple(n.encode(errors="replace") for n in names)


# -- values -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Values:
    """Where the values of one array lie."""

    buffer: Any  # the `pyarrow.Buffer` that holds them all, or None where there are no bytes
    start: NDArray[np.int64]  # (n,) int64, in `buffer`
    length: NDArray[np.int64]  # (n,) int64, in bytes
    valid: NDArray[np.bool_] | None  # (n,) bool, false for nulls; None where there are none


def values_of(array: Any, path: str) -> Values:
    """Where the values of a `pyarrow.Array` of bytes lie.

    Raises NotInPlace if its type spreads them over several buffers, and SourceError if its offsets leave its
    buffers or run backwards.
    """
    t, kind, count = _types(), array.type, len(array)
    valid = None
    if array.null_count:
        valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
    if t.is_struct(kind):
        inner = values_of(array.field(kind.get_field_index("bytes")), path)
        if inner.valid is not None:
            valid = inner.valid if valid is None else inner.valid & valid
        return replace(inner, valid=valid)
    if t.is_binary_view(kind) or t.is_string_view(kind) or t.is_dictionary(kind):
        raise NotInPlace(f"the type {kind} spreads values over several buffers")
    fixed = t.is_fixed_size_binary(kind) or t.is_fixed_size_list(kind) or _is_number(kind)
    # Where the values' bytes lie, where the first of them begins, and the bytes of an element of a list.
    buffer, base, unit = _elements(array, path) or (array.buffers()[1 if fixed else 2], 0, 1)
    size = 0 if buffer is None else buffer.size
    if fixed:
        width = kind.list_size * unit if t.is_fixed_size_list(kind) else kind.bit_width // 8
        base += array.offset * width
        if base + count * width > size:
            raise damaged(path, "size of a column", size, f"{base + count * width:,}")
        offsets = np.arange(count + 1, dtype=np.int64) * width
    else:
        offsets = _offsets(array, path) * unit
    start, length = offsets[:-1] + base, np.diff(offsets)
    if count and (int(offsets[0]) < 0 or int(length.min()) < 0):
        raise damaged(path, "order of a column's offsets", "descending or negative", "ascending")
    if count and int((start + length).max()) > size:
        raise damaged(path, "end of a value", int((start + length).max()), f"at most {size:,}")
    return Values(buffer, start, length, valid)


def _elements(array: Any, path: str) -> tuple[Any, int, int] | None:
    """Of an array of lists: the buffer of all elements, where it begins, and the bytes of an element."""
    t, kind = _types(), array.type
    if not (t.is_fixed_size_list(kind) or t.is_list(kind) or t.is_large_list(kind)):
        return None
    if array.values.null_count and array.flatten().null_count:
        what = "a list of numbers holds a null, expected numbers."
        raise refused(path, what, "Fill it, or pack an iterable over the table.")
    unit = kind.value_type.bit_width // 8
    return array.values.buffers()[1], array.values.offset * unit, unit


def _offsets(array: Any, path: str) -> NDArray[np.int64]:
    """(n+1,) where values of variable length begin, and where the last one ends."""
    t, kind, count = _types(), array.type, len(array)
    if not count:
        return np.zeros(1, np.int64)
    large = t.is_large_binary(kind) or t.is_large_string(kind) or t.is_large_list(kind)
    width = 8 if large else 4
    buffer = array.buffers()[1]
    have, need = 0 if buffer is None else buffer.size, (array.offset + count + 1) * width
    if have < need:
        raise damaged(path, "size of a column's offsets", have, f"{need:,} or more")
    offsets = np.frombuffer(buffer, f"<i{width}", count=count + 1, offset=array.offset * width)
    return offsets.astype(np.int64)


def number_array(array: Any, name: str, path: str) -> NDArray[Any]:
    """(n,) the numbers of a `pyarrow.Array`, or NaN in float64 for nulls, where there are some.

    Raises SourceError if there are nulls, and integers that float64 does not hold.
    """
    if _types().is_boolean(array.type):
        array = array.cast("int8")
    if array.null_count:
        try:
            array = array.cast("float64")
        except ValueError as e:  # pyarrow's, of numbers beyond 2^53
            raise inexact(name, path, str(e)) from e
        return np.asarray(array.fill_null(float("nan")).to_numpy(zero_copy_only=False))
    return np.asarray(array.to_numpy(zero_copy_only=False))


class LabelReader:
    """Reads a column of labels, array by array, and names their classes."""

    def __init__(self, columns: ArrowColumns, path: str) -> None:
        self.name = columns.label
        self._path = path
        self._known = columns.class_names
        self._words: dict[bytes, int] = {}

    @property
    def class_names(self) -> tuple[bytes, ...] | None:
        """What the schema says, or the words of the dictionaries read so far, or None."""
        return self._known or tuple(self._words) or None

    def read(self, array: Any) -> NDArray[np.int64]:
        """(n,) int64 labels, -1 for nulls.

        Raises SourceError if a label is below -1, or a dictionary contradicts itself.
        """
        t, name = _types(), self.name or ""
        table = None
        if t.is_dictionary(array.type):
            words = _words(array.dictionary, self._path)
            # Batches may number the same words differently.
            table = np.array([self._words.setdefault(w, len(self._words)) for w in words], np.int64)
            array = array.indices
        if t.is_boolean(array.type):
            array = array.cast("int8")
        valid = ~np.asarray(array.is_null().to_numpy(zero_copy_only=False), bool)
        values = label_array(array.fill_null(0).to_numpy(zero_copy_only=False), self._path, name)
        values = np.where(valid, values, -1)
        if table is None:
            return values
        if len(values) and int(values.max()) >= len(table):
            raise damaged(
                self._path, f"a number in {name!r}", int(values.max()), f"below {len(table)}"
            )
        return np.where(values < 0, -1, np.append(table, -1)[values])


def _words(array: Any, path: str) -> list[bytes]:
    """Strings as bytes: pyarrow itself would follow their offsets anywhere."""
    values = readable_values(array, path)
    view = memoryview(values.buffer if values.buffer is not None else b"")
    ends = (values.start + values.length).tolist()
    return [bytes(view[a:b]) for a, b in zip(values.start.tolist(), ends, strict=True)]


def stream_batch(
    batch: Any, columns: ArrowColumns, labels: LabelReader, path: str, first_row: int
) -> Iterator[StreamedRow]:
    """The rows of a `pyarrow.RecordBatch`, read."""
    numbers = np.full(batch.num_rows, -1, np.int64)
    if labels.name:
        numbers = labels.read(batch.column(labels.name))
    parts = sorted(columns.data, key=os.fsencode)
    values = [readable_values(batch.column(name), path) for name in parts]
    views = [memoryview(v.buffer if v.buffer is not None else b"") for v in values]
    of_row = [number_array(batch.column(name), name, path).tolist() for name in columns.numbers]
    for i in range(batch.num_rows):
        null = [
            n for n, v in zip(parts, values, strict=True) if v.valid is not None and not v.valid[i]
        ]
        if null:
            yield StreamedRow(first_row + i, problem=f"{null[0]!r} is null")
            continue
        yield StreamedRow(
            first_row + i,
            tuple(
                (os.fsencode(name), view[int(v.start[i]) : int(v.start[i] + v.length[i])])
                for name, view, v in zip(parts, views, values, strict=True)
            ),
            int(numbers[i]),
            {name: column[i] for name, column in zip(columns.numbers, of_row, strict=True)},
        )


def readable_values(array: Any, path: str) -> Values:
    """As `values_of`; views are laid out anew, and numbers of words stand for these."""
    t = _types()
    if t.is_dictionary(array.type):
        words, valid = values_of(array.dictionary, path), ~np.asarray(array.is_null())
        number = np.asarray(array.indices.fill_null(0)).astype(np.int64)
        wrong = valid & ((number < 0) | (number >= len(words.start)))
        if wrong.any():
            most = f"0 to {len(words.start) - 1:,}"
            raise damaged(path, "a number of a dictionary's word", int(number[wrong][0]), most)
        if not len(words.start):
            return Values(None, number, number, valid)
        number = np.where(valid, number, 0)
        valid = valid if words.valid is None else valid & words.valid[number]
        return Values(words.buffer, words.start[number], words.length[number], valid)
    if t.is_binary_view(array.type) or t.is_string_view(array.type):
        array = array.cast("large_binary")
    return values_of(array, path)


_FILE_MAGIC = b"ARROW1"

LITDATA_MAGIC = b"LDARW01\0"
"""How a chunk of LitData's ends that has its rows in an Arrow file: behind its size in 4 bytes."""


def open_arrow(paths: list[str], options: SourceOptions, kind: str = "arrow") -> Scan | Stream:
    """Lists the rows of Arrow files, or of chunks that end with one; a stream if buffers are compressed."""
    first = _Table(paths[0])
    columns = choose_columns(first.schema, options, paths[0])
    labels = LabelReader(columns, paths[0])
    source = {**source_entry(kind, paths, options), **columns.entry()}
    try:
        files = [_list_rows(path, columns, labels) for path in paths]
    except NotInPlace as e:
        return stream_table(paths, columns, _stream, source, options, reason=str(e))
    return scan_rows(paths, files, source, options, labels.class_names, notes=columns.notes())


class _Table:
    """An Arrow file laid over a mapping of it."""

    def __init__(self, path: str) -> None:
        self._pa = import_extra("pyarrow", f"reading {path}")
        import_extra("pyarrow.ipc", f"reading {path}")
        self.path = path
        try:
            with open(path, "rb") as f:
                self.status = os.fstat(f.fileno())
                head, size = f.read(8), self.status.st_size
                tail = os.pread(f.fileno(), 12, max(0, size - 12))
                # pyarrow's own mapping would end the process if somebody truncated the file.
                self._mapped = _native.MappedFile(f.fileno(), self.status.st_size, path)
            self.base = self._pa.py_buffer(self._mapped.data)
        except OSError as e:
            raise unsound(path, "Arrow", e) from e
        file = self.base
        if tail[-8:] == LITDATA_MAGIC and head[:6] != _FILE_MAGIC:
            nbytes = int.from_bytes(tail[:4], "little")
            if nbytes > size - 12:
                most = f"at most {size - 12:,}"
                raise damaged(
                    path, "size of the Arrow file at its end", f"{nbytes:,}", most, size - 12
                )
            file, head = self.base.slice(size - 12 - nbytes, nbytes), _FILE_MAGIC
        try:
            if head[:6] == _FILE_MAGIC:
                self._reader = self._pa.ipc.open_file(self._pa.BufferReader(file))
            else:
                self._reader = self._pa.ipc.open_stream(self._pa.BufferReader(file))
            self.schema = self._reader.schema
            _ = self.schema.names, str(self.schema.types)  # finds names that are no text
        except (self._pa.ArrowException, OSError, ValueError) as e:
            self.check()
            raise unsound(path, "Arrow", e) from e

    def check(self) -> None:
        """What was read so far was there."""
        status = os.stat(self.path)
        check_unchanged(self.path, status, self.status.st_size, self.status.st_mtime_ns)
        if self._mapped.damaged:  # and it has its size and time again
            raise unsound(self.path, "Arrow", OSError("it shrank while it was read"))

    def batches(self) -> Iterator[Any]:
        """The record batches, each checked as far as pyarrow can without reading the values."""
        try:
            if hasattr(self._reader, "num_record_batches"):
                for i in range(self._reader.num_record_batches):
                    yield _validated(self._reader.get_batch(i))
            else:
                yield from map(_validated, self._reader)
        except (self._pa.ArrowException, OSError, ValueError, MemoryError) as e:
            if isinstance(e, SourceError):
                raise
            self.check()
            raise unsound(self.path, "Arrow", e) from e
        self.check()

    def place(self, values: Values) -> NDArray[np.uint64]:
        """Where values lie in the file.

        Raises NotInPlace if they do not.
        """
        if values.buffer is None or not int(values.length.sum()):
            return np.zeros(len(values.start), np.uint64)
        at = values.buffer.address - self.base.address
        if not 0 <= at <= at + values.buffer.size <= self.base.size:
            raise NotInPlace(f"{self.path}: its buffers are compressed")
        places: NDArray[np.uint64] = (values.start + at).astype(np.uint64)
        return places


def _validated(batch: Any) -> Any:
    batch.validate()
    return batch


def _list_rows(path: str, columns: ArrowColumns, labels: LabelReader) -> Rows:
    table = _Table(path)
    require_columns(table.schema, columns, path)
    offset: dict[str, list[NDArray[np.uint64]]] = {name: [] for name in columns.data}
    length: dict[str, list[NDArray[np.uint64]]] = {name: [] for name in columns.data}
    valid, numbers = [np.zeros(0, bool)], [np.zeros(0, np.int64)]
    of_row: dict[str, list[NDArray[Any]]] = {name: [] for name in columns.numbers}
    for batch in table.batches():
        good = np.ones(batch.num_rows, bool)
        for name in columns.data:
            values = values_of(batch.column(name), path)
            if values.valid is not None:
                good &= values.valid
            offset[name].append(table.place(values))
            length[name].append(values.length.astype(np.uint64))
        valid.append(good)
        if labels.name:
            numbers.append(labels.read(batch.column(labels.name)))
        for name, column in of_row.items():
            column.append(number_array(batch.column(name), name, path))
    used = np.concatenate(valid)
    kept = np.flatnonzero(used)

    def joined(pieces: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *pieces])[kept]

    return Rows(
        file_volume(table.path, table.status),
        len(used),
        {os.fsencode(n): (joined(offset[n]), joined(length[n])) for n in columns.data},
        np.concatenate(numbers)[kept] if labels.name else None,
        kept=kept,
        problems=null_problems(path, columns.data[0], np.flatnonzero(~used)),
        columns={name: joined_numbers(c, name, path)[kept] for name, c in of_row.items() if c},
    )


def _stream(
    path: str, columns: ArrowColumns, labels: LabelReader
) -> Iterator[tuple[int, StreamedRow]]:
    table = _Table(path)
    require_columns(table.schema, columns, path)
    row = 0
    for batch in table.batches():
        for item in stream_batch(batch, columns, labels, path, row):
            # How many rows there are is known at the end: names of more than 10 million grow longer.
            yield 0, item
        row += batch.num_rows


def null_problems(path: str, column: str, rows: NDArray[np.int64]) -> list[Problem]:
    """Problems for rows without a value; the first thousand, and a line for the rest."""
    problems = [
        Problem(path, f"row {row} of {column!r} is null") for row in rows[:_NULLS_KEPT].tolist()
    ]
    if len(rows) > _NULLS_KEPT:
        problems.append(
            Problem(path, f"{len(rows) - _NULLS_KEPT:,} more rows of {column!r} are null")
        )
    return problems
