"""parquet: a row for each sample, of the workload's columns, or one column `data` of its bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.formats.base import Reader, SampleExtents, bad_file, extra

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.content import Stream
    from headrace.bench.dataset import Column, DatasetSpec
    from headrace.bench.formats.base import FileJob
    from headrace.store.output_file import OutputFile

__all__ = ["file_bytes", "open_reader", "sample_extents", "write"]

_BATCH_BYTES = 16 << 20
"""Rows are made about so many bytes at a time, whatever the row group's size."""


def _arrow() -> tuple[Any, Any]:
    return extra("pyarrow", "parquet", "bench"), extra("pyarrow.parquet", "parquet", "bench")


def _column_bytes(column: Column) -> int:
    """Bytes of content that a row takes."""
    if column.dtype in ("string", "bool"):
        return 8
    if column.dtype == "binary":
        return column.size
    return column.size * _element(column).itemsize


def _element(column: Column) -> np.dtype[Any]:
    return np.dtype("float32" if column.dtype == "list" else column.dtype)


def _columns(job: FileJob) -> tuple[Column, ...]:
    from headrace.bench.dataset import Column

    if job.spec.parquet.columns:
        return job.spec.parquet.columns
    elements = math.prod(job.shape)
    return (Column(name="data", dtype=job.spec.record_element_type, size=elements),)


def _type(pa: Any, column: Column, *, as_list: bool) -> Any:
    match column.dtype:
        case "string":
            return pa.string()
        case "binary":
            return pa.binary()
        case "bool":
            return pa.bool_()
    scalar = pa.from_numpy_dtype(_element(column))
    return pa.list_(scalar, column.size) if as_list or column.size > 1 else scalar


def _array(pa: Any, column: Column, rows: int, stream: Stream, kind: Any) -> Any:
    data = stream.take(rows * _column_bytes(column))
    match column.dtype:
        case "string":
            return pa.array([f"s_{v}" for v in data.view(np.uint64).tolist()])
        case "bool":
            return pa.array((data.reshape(rows, -1)[:, 0] & 1).astype(bool))
        case "binary":
            offsets = np.arange(rows + 1, dtype=np.int32) * column.size
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            return pa.Array.from_buffers(kind, rows, buffers)
    flat = pa.array(data.view(_element(column)))
    return flat if flat.type == kind else pa.FixedSizeListArray.from_arrays(flat, column.size)


def _batches(job: FileJob, columns: tuple[Column, ...]) -> Iterator[tuple[int, int]]:
    """(rows, whether a row group is full) of what is made at a time."""
    row_bytes = sum(_column_bytes(c) for c in columns)
    group = job.spec.parquet.row_group_size
    most = max(1, _BATCH_BYTES // row_bytes)
    if job.spec.parquet.generation_batch_size:
        most = min(most, job.spec.parquet.generation_batch_size)
    for first in range(0, job.samples, group):
        rows = min(group, job.samples - first)
        yield rows, most


def write(out: OutputFile, job: FileJob) -> None:
    """Writes a file's bytes."""
    pa, pq = _arrow()
    columns = _columns(job)
    legacy = not job.spec.parquet.columns
    kinds = [_type(pa, c, as_list=legacy) for c in columns]
    schema = pa.schema(list(zip((c.name for c in columns), kinds, strict=True)))
    # Parquet stores 8- and 16-bit numbers in 32 bits, unless a dictionary has them.
    small = [c.name for c in columns if c.dtype in ("uint8", "int8", "uint16", "int16")]
    compression = job.spec.compression
    stream = job.stream()
    sink = pa.PythonFile(_Sink(out), mode="w")
    with pq.ParquetWriter(
        sink,
        schema,
        compression=compression if compression != "none" else None,
        use_dictionary=[f"{name}.list.element" if c_is_list else name
                        for name, c_is_list in _leaves(small, schema, pa)],
        write_statistics=False,
    ) as writer:  # fmt: skip
        for rows, most in _batches(job, columns):
            made = []
            for first in range(0, rows, most):
                count = min(most, rows - first)
                made.append(
                    pa.record_batch(
                        [
                            _array(pa, c, count, stream, k)
                            for c, k in zip(columns, kinds, strict=True)
                        ],
                        schema=schema,
                    )
                )
            writer.write_table(pa.Table.from_batches(made), row_group_size=rows)


def _leaves(names: list[str], schema: Any, pa: Any) -> list[tuple[str, bool]]:
    return [(name, pa.types.is_fixed_size_list(schema.field(name).type)) for name in names]


class _Sink:
    """An OutputFile as pyarrow wants a file."""

    closed = False

    def __init__(self, out: OutputFile) -> None:
        self.write, self.flush, self.tell = out.write, out.flush, out.tell

    def close(self) -> None:
        """The OutputFile is closed by its owner."""

    def writable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is not."""
        return False

    def seekable(self) -> bool:
        """It is not."""
        return False


def file_bytes(spec: DatasetSpec, shape: tuple[int, ...]) -> int | None:  # noqa: ARG001 - of all formats
    """Size of the finished file."""
    return None


def _read_names(spec: DatasetSpec) -> list[str] | None:
    """The columns that training reads; None for all."""
    if not spec.parquet.columns:
        return None
    return [c.name for c in spec.parquet.columns if c.read]


def _opened(path: str, spec: DatasetSpec) -> Any:
    pa, pq = _arrow()
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as e:
        raise bad_file(path, "the file", e, "a Parquet file") from e
    if file.metadata.num_rows != spec.num_samples_per_file:
        found = file.metadata.num_rows
        file.close()
        raise bad_file(path, "the number of rows", found, spec.num_samples_per_file)
    return file


def sample_extents(path: str, spec: DatasetSpec) -> SampleExtents:
    """The columns' chunks of each row group, joined where they touch; its rows are one group."""
    wanted = _read_names(spec)
    groups: list[NDArray[np.int64]] = []
    first, offsets, lengths = [0], list[int](), list[int]()
    with _opened(path, spec) as file:
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            groups.append(np.full(group.num_rows, number, np.int64))
            chunks = [group.column(i) for i in range(group.num_columns)]
            begin = len(offsets)
            for chunk in chunks:
                if wanted is not None and chunk.path_in_schema.partition(".")[0] not in wanted:
                    continue
                at = chunk.dictionary_page_offset or chunk.data_page_offset
                if len(offsets) > begin and offsets[-1] + lengths[-1] == at:
                    lengths[-1] += chunk.total_compressed_size
                else:
                    offsets.append(at)
                    lengths.append(chunk.total_compressed_size)
            first.append(len(offsets))
    return SampleExtents(
        np.concatenate(groups) if groups else np.empty(0, np.int64),
        np.array(first, np.int64),
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
    )


class _RowReader:
    """Keeps the row group of the last sample."""

    def __init__(self, path: str, spec: DatasetSpec) -> None:
        self._file = _opened(path, spec)
        self._names = _read_names(spec)
        counts = [
            self._file.metadata.row_group(i).num_rows
            for i in range(self._file.metadata.num_row_groups)
        ]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._held = -1
        self._table: Any = None

    def sample(self, index: int) -> NDArray[Any]:
        """The bytes of a row's columns, one after the other."""
        group = int(np.searchsorted(self._starts, index, "right")) - 1
        if group != self._held:
            self._table = self._file.read_row_group(group, columns=self._names)
            self._held = group
        row = self._table.slice(index - int(self._starts[group]), 1)
        return np.concatenate([_bytes_of(column.combine_chunks()) for column in row.columns])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _bytes_of(array: Any) -> NDArray[np.uint8]:
    value = array[0].as_py()
    if isinstance(value, (bytes, str)):
        return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    flat = array.flatten() if hasattr(array, "flatten") else array
    data: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(data).view(np.uint8)


def open_reader(path: str, spec: DatasetSpec) -> Reader:
    """Opens the file."""
    return _RowReader(path, spec)
