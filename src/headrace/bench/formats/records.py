"""Formats of records: tfrecord, parquet and hdf5."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.extras import import_extra
from headrace.bench.content import BEGIN, END, Checksum, FileLayout, PieceRun, noise, text
from headrace.bench.dataset import Column
from headrace.bench.formats import DatasetFormat, SampleExtents, bad_file
from headrace.store.output_file import OutputFile, WriteBuffer
from headrace.store.sources.scan import SourceOptions
from headrace.store.sources.tfrecord import mask, scan_tfrecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.bench.content import ByteStream
    from headrace.bench.dataset import DatasetSpec
    from headrace.bench.formats import FileJob, GeneratedFile
    from headrace.store.directory import DirectoryColumns

# -- tfrecord --------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes, length: int | None = None) -> bytes:
    """A length-delimited field of a protocol buffer; `length` where data follow later."""
    return _varint(number << 3 | 2) + _varint(len(data) if length is None else length) + data


def _around(sample_bytes: int) -> tuple[bytes, bytes]:
    """What an Example has before and behind the sample's bytes."""
    value = _field(1, b"", sample_bytes)
    feature = _field(1, value, len(value) + sample_bytes)
    entry = _field(1, b"image") + _field(2, feature, len(feature) + sample_bytes)
    image = _field(1, entry, len(entry) + sample_bytes)
    size = _field(3, _field(1, _varint(sample_bytes)))
    behind = _field(1, _field(1, b"size") + _field(2, size))
    return _field(1, image, len(image) + sample_bytes + len(behind)), behind


class _TFRecord(DatasetFormat):
    """`tf.train.Example`s of an `image` (the sample's bytes) and a `size`, without TensorFlow.

    Beside the data set lies `index/<split>/<file>.idx`, a line "offset size" for each record, as DALI's readers
    want it. The records of a file have one size.
    """

    def layout(self, spec: DatasetSpec, shape: tuple[int, ...]) -> FileLayout:
        sample_bytes = math.prod(shape) * spec.dtype.itemsize
        before, behind = _around(sample_bytes)
        length = (len(before) + sample_bytes + len(behind)).to_bytes(8, "little")
        head = length + mask(crc32c(length)).to_bytes(4, "little")
        record = (text(head), BEGIN, text(before), noise(sample_bytes), text(behind), END)
        return FileLayout((PieceRun(spec.num_samples_per_file, record),), Checksum.RECORD)

    def write_indices(self, job: FileJob) -> None:
        size = self.layout(job.spec, job.shape).nbytes // job.samples
        split = os.path.relpath(job.path, job.spec.data_folder).partition("/")[0]
        folder = os.path.join(job.spec.data_folder, "index", split)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, os.path.basename(job.path) + ".idx")
        with OutputFile(path, WriteBuffer()) as index:
            for first in range(0, job.samples, 65536):
                rows = range(first, min(first + 65536, job.samples))
                index.write("".join(f"{i * size} {size}\n" for i in rows).encode())

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """The records' messages; only what frames them is read."""
        columns = self._scanned(path, spec)
        return SampleExtents.each(columns.offset, columns.length)

    @staticmethod
    def _scanned(path: str, spec: DatasetSpec) -> DirectoryColumns:
        columns, samples = scan_tfrecord([path], SourceOptions()).columns, spec.num_samples_per_file
        if (count := len(columns.offset)) != samples:
            raise bad_file(path, "the number of records", count, samples)
        return columns

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        """The bytes of a record's `image`; the record's checksum is checked."""
        columns = self._scanned(path, spec)
        assert columns.crc is not None
        at, length = int(columns.offset[index]), int(columns.length[index])
        with open(path, "rb", buffering=0) as file:
            message = os.pread(file.fileno(), length, at)
        crc, expected = crc32c(message), int(columns.crc[index])
        if crc != expected:
            raise bad_file(path, "a record's checksum", f"{crc:08x}", f"{expected:08x}", at)
        return np.frombuffer(_image(message), spec.dtype)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        length, at = _read_varint(message, at)
        if tag & 7 != 2 or at + length > len(message):
            raise ValueError("it is no tf.train.Example")
        yield tag >> 3, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("it ends inside a number")


def _image(message: bytes) -> bytes:
    """The bytes of an Example's feature `image`, in whatever order its features are."""
    for _, features in _fields(message):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            if parts.get(1) == b"image":
                for _, values in _fields(parts[2]):
                    return dict(_fields(values))[1]
    raise ValueError("it has no feature 'image'")


# -- parquet ---------------------------------------------------------------------------------------------

_BATCH_BYTES = 16 << 20
"""Rows are made about so many bytes at a time, whatever the row group's size."""


def _arrow() -> tuple[Any, Any]:
    return import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")


def _element(column: Column) -> np.dtype[Any]:
    return np.dtype("float32" if column.dtype == "list" else column.dtype)


def _column_bytes(column: Column) -> int:
    """Bytes of content that a row takes."""
    if column.dtype in ("string", "bool"):
        return 8
    return column.size * (1 if column.dtype == "binary" else _element(column).itemsize)


def _arrow_type(pa: Any, column: Column, *, as_list: bool) -> Any:
    plain = {"string": pa.string, "binary": pa.binary, "bool": pa.bool_}
    if column.dtype in plain:
        return plain[column.dtype]()
    scalar = pa.from_numpy_dtype(_element(column))
    return pa.list_(scalar, column.size) if as_list or column.size > 1 else scalar


def _columns_of(spec: DatasetSpec, size: int) -> tuple[Column, ...]:
    """The workload's, or one of samples of so many elements."""
    return spec.parquet.columns or (Column(name="data", dtype=spec.record_element_type, size=size),)


def _spelt(kind: Any) -> str:
    """A column's type, whatever its elements are called: `uint8[64]`."""
    size = getattr(kind, "list_size", None)
    return str(kind) if size is None else f"{kind.value_type}[{size}]"


def _arrow_array(pa: Any, column: Column, rows: int, stream: ByteStream, kind: Any) -> Any:
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


def _sink(out: OutputFile) -> SimpleNamespace:
    """An OutputFile as pyarrow wants a file: written in order, and closed by its owner."""
    return SimpleNamespace(
        closed=False, write=out.write, flush=out.flush, tell=out.tell, close=lambda: None,
        writable=lambda: True, readable=lambda: False, seekable=lambda: False,
    )  # fmt: skip


class _Parquet(DatasetFormat):
    """A row for each sample, of the workload's columns, or one column `data` of its bytes."""

    def write(self, out: OutputFile, job: FileJob) -> None:
        pa, pq = _arrow()
        spec = job.spec
        columns = _columns_of(spec, math.prod(job.shape))
        kinds = [_arrow_type(pa, c, as_list=not spec.parquet.columns) for c in columns]
        schema = pa.schema(list(zip((c.name for c in columns), kinds, strict=True)))
        # Parquet stores 8- and 16-bit numbers in 32 bits, unless a dictionary has them.
        small = [
            f"{c.name}.list.element" if pa.types.is_fixed_size_list(kind) else c.name
            for c, kind in zip(columns, kinds, strict=True)
            if c.dtype in ("uint8", "int8", "uint16", "int16")
        ]
        most = max(1, _BATCH_BYTES // sum(_column_bytes(c) for c in columns))
        if spec.parquet.generation_batch_size:
            most = min(most, spec.parquet.generation_batch_size)
        stream, group = job.stream(), spec.parquet.row_group_size

        def batch(count: int) -> Any:
            each = zip(columns, kinds, strict=True)
            arrays = [_arrow_array(pa, c, count, stream, kind) for c, kind in each]
            return pa.record_batch(arrays, schema=schema)

        with pq.ParquetWriter(
            pa.PythonFile(_sink(out), mode="w"), schema, use_dictionary=small, write_statistics=False,
            compression=spec.compression if spec.compression != "none" else None,
        ) as writer:  # fmt: skip
            for begin in range(0, job.samples, group):
                rows = min(group, job.samples - begin)
                batches = [batch(min(most, rows - first)) for first in range(0, rows, most)]
                writer.write_table(pa.Table.from_batches(batches), row_group_size=rows)

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """The columns' chunks of each row group, joined where they touch; its rows are one group."""
        wanted = _read_names(spec)
        groups, first, extents = list[int](), [0], list[list[int]]()
        with _open_parquet(path, spec) as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                groups += [number] * group.num_rows
                for chunk in (group.column(i) for i in range(group.num_columns)):
                    if wanted is not None and chunk.path_in_schema.partition(".")[0] not in wanted:
                        continue
                    at = chunk.dictionary_page_offset or chunk.data_page_offset
                    if len(extents) > first[-1] and sum(extents[-1]) == at:
                        extents[-1][1] += chunk.total_compressed_size
                    else:
                        extents.append([at, chunk.total_compressed_size])
                first.append(len(extents))
        return SampleExtents.of_groups(groups, first, *np.array(extents).reshape(-1, 2).T)

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:
        """Of its columns, except those whose rows differ in length."""
        (pa, _), spec = _arrow(), file.spec
        with _open_parquet(file.path, spec) as opened:
            kinds = {field.name: field.type for field in opened.schema_arrow}
            packed = opened.metadata.row_group(0).column(0).compression
        own = "none" if packed == "UNCOMPRESSED" else packed.lower()
        yield "compression", own, spec.compression
        for column in _columns_of(spec, file.sample_bytes // spec.dtype.itemsize):
            kind = kinds.get(column.name)
            if kind is None or not pa.types.is_list(kind):
                expected = _arrow_type(pa, column, as_list=not spec.parquet.columns)
                yield f"column {column.name}", _spelt(kind), _spelt(expected)

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        """Reads the row group; the bytes of the row's columns, one after the other."""
        with _open_parquet(path, spec) as file:
            counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            starts = np.concatenate([[0], np.cumsum(counts)])
            group = int(np.searchsorted(starts, index, "right")) - 1
            table = file.read_row_group(group, columns=_read_names(spec))
        row = table.slice(index - int(starts[group]), 1)
        return np.concatenate([_bytes_of(column.combine_chunks()) for column in row.columns])


def _read_names(spec: DatasetSpec) -> list[str] | None:
    """The columns that training reads; None for all."""
    return [c.name for c in spec.parquet.columns if c.read] if spec.parquet.columns else None


def _open_parquet(path: str, spec: DatasetSpec) -> Any:
    pa, pq = _arrow()
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as e:
        raise bad_file(path, "the file", e, "a Parquet file") from e
    rows = file.metadata.num_rows
    if rows != spec.num_samples_per_file:
        file.close()
        raise bad_file(path, "the number of rows", rows, spec.num_samples_per_file)
    return file


def _bytes_of(array: Any) -> NDArray[np.uint8]:
    value = array[0].as_py()
    if isinstance(value, (bytes, str)):
        return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)
    flat = array.flatten() if hasattr(array, "flatten") else array
    data: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(data).view(np.uint8)


# -- hdf5 ------------------------------------------------------------------------------------------------

_ALIGNED_FROM = 64 << 10
"""Data of so many bytes begin at a whole disk block."""

_SLAB_BYTES = 8 << 20
"""Samples of chunked data sets are handed to HDF5 about so many bytes at a time."""


class _Hdf5(DatasetFormat):
    """Data sets `records_0`, `records_1`, ... of (samples, *shape), and `labels`, as DLIO writes them.

    Contiguous data sets are allocated by HDF5 and written past it, at the disk's speed. `records` is a link to
    `records_0`: DLIO's releases before 2025 read that name.
    """

    def write(self, out: OutputFile, job: FileJob) -> None:
        h5py = import_extra("h5py", "writing hdf5")
        spec = job.spec
        count = spec.hdf5.num_dset_per_record
        first, *rest = job.shape
        first //= count
        shape = (job.samples, *(rest if spec.record_dims and first == 1 else (first, *rest)))
        chunked = spec.hdf5.chunk_dims or spec.hdf5.max_shape or spec.compression != "none"
        # HDF5 writes by itself, under the name that the file has until it is whole.
        with h5py.File(
            out.temporary, "w", libver="latest", alignment_threshold=_ALIGNED_FROM,
            alignment_interval=4096,
        ) as f:  # fmt: skip
            for number in range(count):
                if chunked:
                    _write_chunked(f, number, shape, job)
                else:
                    _allocate(h5py, f, f"records_{number}", shape, spec.dtype)
            if count == 1:
                f["records"] = h5py.SoftLink("/records_0")
            f.create_dataset("labels", data=np.zeros(job.samples, np.int64))
            offsets = [f[f"records_{n}"].id.get_offset() for n in range(count)]
        out.adopt()
        if not chunked:
            size = math.prod(shape) * spec.dtype.itemsize
            for number, offset in enumerate(offsets):
                out.fill(offset, job.stream(number).blocks(size))

    def sample_extents(self, path: str, spec: DatasetSpec) -> SampleExtents:
        """A piece of each contiguous data set, or the chunks that the sample is in."""
        with _open_hdf5(path) as f:
            pieces = [_pieces_of(d) for d in _records(f, path, spec)]
        samples = range(spec.num_samples_per_file)
        extents = [[extent for piece in pieces for extent in piece[sample]] for sample in samples]
        flat = np.array([e for each in extents for e in each], np.int64).reshape(-1, 2)
        first = np.cumsum([0, *map(len, extents)])
        return SampleExtents.of_groups(samples, first, flat[:, 0], flat[:, 1])

    def facts(self, file: GeneratedFile) -> Iterator[tuple[str, object, object]]:
        with _open_hdf5(file.path) as f:
            records = _records(f, file.path, file.spec)
            nbytes, packed = sum(each.nbytes for each in records), records[0].compression
        yield "compression", packed or "none", file.spec.compression
        yield "sample_bytes", nbytes // file.spec.num_samples_per_file, file.sample_bytes

    def read_sample(self, path: str, spec: DatasetSpec, index: int) -> NDArray[Any]:
        """Reads a sample, and joins its pieces along the first axis."""
        with _open_hdf5(path) as f:
            return np.concatenate([records[index] for records in _records(f, path, spec)])


def _allocate(h5py: Any, f: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """A contiguous data set whose bytes have their place, and nothing in it yet."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)  # the same command writes the same bytes at any time
    space = h5py.h5s.create_simple(shape)
    h5py.h5d.create(f.id, name.encode(), h5py.h5t.py_create(dtype), space, dcpl=properties)


def _write_chunked(f: Any, number: int, shape: tuple[int, ...], job: FileJob) -> None:
    spec, most = job.spec, job.spec.hdf5.max_shape
    options: dict[str, Any] = {
        "chunks": spec.hdf5.chunk_dims or None, "maxshape": (shape[0], *most) if most else None,
        "compression": spec.compression if spec.compression != "none" else None,
        "compression_opts": min(spec.compression_level, 9) if spec.compression == "gzip" else None,
    }  # fmt: skip
    try:
        records = f.create_dataset(f"records_{number}", shape, dtype=spec.dtype, **options)
    except (ValueError, TypeError) as e:
        raise ValueError(
            f"dataset.hdf5 chunk_dims {spec.hdf5.chunk_dims} and max_shape {spec.hdf5.max_shape} "
            f"do not fit the data set's shape {shape}: {e}"
        ) from e
    stream = job.stream(number)
    row_bytes = math.prod(shape[1:]) * spec.dtype.itemsize
    chunk_rows = records.chunks[0]
    at_once = max(1, _SLAB_BYTES // max(1, row_bytes * chunk_rows)) * chunk_rows
    for first in range(0, shape[0], at_once):
        count = min(at_once, shape[0] - first)
        data = stream.take(count * row_bytes).view(spec.dtype).reshape(count, *shape[1:])
        records[first : first + count] = data


def _open_hdf5(path: str) -> Any:
    h5py = import_extra("h5py", "reading hdf5")
    try:
        return h5py.File(path, "r")
    except OSError as e:
        os.stat(path)  # a missing file is that error
        raise bad_file(path, "the file", e, "an HDF5 file") from e


def _records(f: Any, path: str, spec: DatasetSpec) -> list[Any]:
    count = spec.hdf5.num_dset_per_record
    names = [f"records_{n}" for n in range(count)]
    if count == 1 and "records_0" not in f:
        names = ["records"]
    for name in names:
        if name not in f:
            raise bad_file(path, "its data sets", sorted(f), name)
        shape = f[name].shape
        if not shape or shape[0] != spec.num_samples_per_file:
            expected = f"{spec.num_samples_per_file} samples first"
            raise bad_file(path, f"the shape of {name}", shape, expected)
    return [f[name] for name in names]


def _pieces_of(records: Any) -> list[list[tuple[int, int]]]:
    """For each sample the extents of a data set that hold it."""
    samples = records.shape[0]
    if records.chunks is None:
        start, size = records.id.get_offset(), records.nbytes // samples
        return [[(start + i * size, size)] for i in range(samples)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(samples)]
    for number in range(records.id.get_num_chunks()):
        chunk = records.id.get_chunk_info(number)
        begin = chunk.chunk_offset[0]
        for sample in range(begin, min(begin + records.chunks[0], samples)):
            pieces[sample].append((chunk.byte_offset, chunk.size))
    return pieces


FORMATS: dict[str, DatasetFormat] = {
    "hdf5": _Hdf5(),
    "parquet": _Parquet(),
    "tfrecord": _TFRecord(),
}
