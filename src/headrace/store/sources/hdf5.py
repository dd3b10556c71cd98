"""HDF5 files and Zarr arrays as a source: each row of a data set, along its first axis, is a sample.

h5py says where a data set's bytes lie. Contiguous ones, and chunked ones whose rows each lie in one
chunk, are indexed there. Compressed rows, rows cut over several chunks and rows of variable length
(which HDF5 keeps in heaps) are read through h5py, and can only be packed. There HDF5 itself reads what
may be damaged: a broken heap would keep it busy for ever, so heaps are walked first. Zarr's chunks are
compressed: its rows can only be packed.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.base.extras import import_extra
from headrace.errors import SourceError
from headrace.store.sources.scan import (
    LABEL_NAMES,
    ROWS_MAX,
    NotInPlace,
    Rows,
    Scan,
    SourceOptions,
    Stream,
    StreamedRow,
    StreamItem,
    check_unchanged,
    choose_label,
    damaged,
    file_volume,
    label_array,
    left_out,
    listed,
    no_samples,
    refused,
    row_names,
    scan_rows,
    source_entry,
    stream_rows,
    unsound,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray


_READ_BYTES = 8 << 20
_CHUNK_BYTES_MAX = 256 << 20  # a chunk above this is read in pieces, and decompressed for each
_VARIABLE_BYTES = 64 << 10  # a guess at a value of variable length
_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError, RecursionError)
"""What h5py raises over damaged files."""

_DATASETS_MAX = 100_000
_ARRAYS_MAX = 10_000


def open_hdf5(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Lists the rows of HDF5 files; a stream where a row lies in no one place."""
    with _File(paths[0]) as first:
        data, label = _choose(first, options)
        items = zip(data, first.named(*data), strict=True)
        shapes = {n: {"shape": list(d.shape), "dtype": str(d.dtype)} for n, d in items}
        rest = [n for n in first.datasets() if n not in (*data, label)]
    notes = left_out(rest, "; --column takes others, as parts")
    source = {**source_entry("hdf5", paths, options), "arrays": shapes}
    try:
        files = [_list_rows(path, data, label) for path in paths]
    except NotInPlace as e:
        return stream_rows(
            paths,
            lambda path: _stream(path, data, label),
            source,
            options,
            reason=str(e),
            notes=notes,
        )
    return scan_rows(paths, files, source, options, notes=notes)


class _File:
    """An open HDF5 file; h5py's complaints become one error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.h5py = import_extra("h5py", f"reading {path}")
        try:
            self.status = os.stat(path)
            self._file = self.h5py.File(path, "r", locking=False)
        except _ERRORS as e:
            raise unsound(path, "HDF5", e) from e

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, _ERRORS) and not isinstance(error, SourceError):
            raise unsound(self.path, "HDF5", error) from error
        if error is None:
            check_unchanged(
                self.path, os.stat(self.path), self.status.st_size, self.status.st_mtime_ns
            )

    def datasets(self) -> dict[str, Any]:
        """All data sets with rows, by path."""
        datasets: dict[str, Any] = {}

        def visit(name: str, item: Any) -> bool | None:
            if isinstance(item, self.h5py.Dataset) and item.shape:
                datasets[name] = item
            return True if len(datasets) > _DATASETS_MAX else None

        self._file.visititems(visit)
        return datasets

    def named(self, *names: str) -> list[Any]:
        """Some data sets, of one number of rows."""
        datasets = []
        for name in names:
            item = self._file.get(name)
            if not isinstance(item, self.h5py.Dataset) or not item.shape:
                raise refused(
                    self.path, f"there is no data set {name!r} with rows, there are "
                    f"{listed(list(self.datasets()))}.", "Name one of them: column='images'.",
                )  # fmt: skip
            written = item.is_virtual or item.external or item.id.get_storage_size() >= 1
            if item.shape[0] and not written:
                what = f"data set {name!r} of {item.shape[0]:,} rows was never written."
                raise refused(self.path, what, "Name another data set, or write its rows.")
            if not 0 <= item.shape[0] < ROWS_MAX:
                most = f"below {ROWS_MAX:,}"
                raise damaged(self.path, f"rows of {name!r}", item.shape[0], most, 0)
            datasets.append(item)
        counts = {item.shape[0] for item in datasets}
        if len(counts) > 1:
            raise refused(
                self.path, f"the data sets {listed(list(names))} have {sorted(counts)} rows, "
                "expected the same number.", "Name data sets of one length.",
            )  # fmt: skip
        return datasets

    def labels(self, data: tuple[str, ...], label: str | None) -> NDArray[np.int64] | None:
        """The values of a data set of labels, one for each row."""
        if label is None:
            return None
        return label_array(self.named(data[0], label)[1][:], self.path, label)


def _is_label(item: Any) -> bool:
    return len(item.shape) == 1 and np.dtype(item.dtype).kind in "iu"


def _choose(file: _File, options: SourceOptions) -> tuple[tuple[str, ...], str | None]:
    """The data sets of the samples, and that of the labels."""
    data = options.column
    if data is None:
        datasets = file.datasets()
        rows = {
            n: d for n, d in datasets.items()
            if not (_is_label(d) and n.rpartition("/")[2] in LABEL_NAMES)
        } or datasets  # fmt: skip
        if not rows:
            raise no_samples(file.path, " in a data set with rows")
        data = (max(rows, key=lambda n: (rows[n].size * rows[n].dtype.itemsize, n)),)
    count = file.named(*data)[0].shape[0]
    if not count:
        raise no_samples(file.path, f" in {data[0]!r}")
    if options.label:
        item = file.named(data[0], options.label)[1]
        if not _is_label(item):
            raise refused(
                file.path, f"data set {options.label!r} has the shape {item.shape} and the type "
                f"{item.dtype}, expected one integer a row.",
                "Name another data set of labels.",
            )  # fmt: skip
    if options.label is not None:
        return data, options.label or None
    group, slash, _ = data[0].rpartition("/")
    for name in (group + slash + each for each in LABEL_NAMES):
        item = file.datasets().get(name)
        if item is not None and _is_label(item) and item.shape[0] == count:
            return data, None if name in data else name
    return data, None


# -- in place ---------------------------------------------------------------------------------------


def _list_rows(path: str, data: tuple[str, ...], label: str | None) -> Rows:
    with _File(path) as file:
        items = file.named(*data)
        parts = {}
        for name, item in zip(data, items, strict=True):
            start, row_bytes = _starts(file, name, item)
            parts[os.fsencode(name)] = (start, np.full(len(start), row_bytes, np.uint64))
        volume = file_volume(file.path, file.status)
        return Rows(volume, items[0].shape[0], parts, file.labels(data, label))


def _starts(file: _File, name: str, item: Any) -> tuple[NDArray[np.uint64], int]:
    """Where each row begins ((rows,) uint64), and the bytes of a row."""
    where = f"{file.path}: data set {name!r}"
    # h5py calls variable-length rows objects; dtype.itemsize says nothing of them.
    if item.dtype.hasobject:
        raise NotInPlace(f"{where} has rows of variable length")
    if item.is_virtual or item.external:
        raise NotInPlace(f"{where} lies in other files")
    plan = item.id.get_create_plist()
    if plan.get_nfilters():
        raise NotInPlace(f"{where} is compressed ({item.compression or 'filtered'})")
    stored, read = item.id.get_type(), file.h5py.h5t.py_create(item.dtype, logical=True)
    if stored.get_size() != item.dtype.itemsize or stored != read:
        raise NotInPlace(f"{where} is stored in another type than {item.dtype}")
    count = item.shape[0]
    row_bytes = int(np.prod(item.shape[1:], dtype=object)) * item.dtype.itemsize
    if count * row_bytes > file.status.st_size:
        if item.id.get_storage_size() < count * row_bytes:
            raise NotInPlace(f"{where} has rows that were never written")
        most = f"at most the file's size {file.status.st_size:,}"
        raise damaged(file.path, f"size of {name!r}", f"{count * row_bytes:,}", most, 0)
    if item.chunks is not None:
        return _chunked_starts(file, name, item, row_bytes), row_bytes
    offset = item.id.get_offset()
    if offset is None:
        raise NotInPlace(f"{where} lies in its header, or was never written")
    return np.uint64(offset) + np.arange(count, dtype=np.uint64) * np.uint64(row_bytes), row_bytes


def _chunked_starts(file: _File, name: str, item: Any, row_bytes: int) -> NDArray[np.uint64]:
    count, rows = item.shape[0], item.chunks[0]
    where, size = f"{file.path}: data set {name!r}", rows * row_bytes
    if tuple(item.chunks[1:]) != tuple(item.shape[1:]):
        raise NotInPlace(f"{where} has rows that lie in several chunks (chunks of {item.chunks})")
    chunks = -(-count // rows)
    begin = np.zeros(chunks, np.uint64)
    seen = np.zeros(chunks, bool)

    def note(info: Any) -> None:
        at = info.chunk_offset[0]
        number = at // rows
        if at % rows or not number < chunks or seen[number] or any(info.chunk_offset[1:]):
            raise damaged(file.path, f"place of a chunk of {name!r}", at, "one of each", 0)
        if info.size != size:
            what = f"bytes of a chunk of {name!r}"
            raise damaged(file.path, what, info.size, size, info.byte_offset)
        begin[number], seen[number] = info.byte_offset, True

    _each_chunk(item, note)
    if not seen.all():
        raise NotInPlace(f"{where} has rows that were never written")
    order = np.sort(begin)
    gaps = np.diff(order)
    if len(gaps) and int(gaps.min()) < size:
        what, at = f"distance of two chunks of {name!r}", int(order[int(gaps.argmin())])
        raise damaged(file.path, what, int(gaps.min()), f"{size} or more", at)
    row = np.arange(count, dtype=np.int64)
    starts: NDArray[np.uint64] = begin[row // rows]
    starts += (row % rows).astype(np.uint64) * np.uint64(row_bytes)
    return starts


def _each_chunk(item: Any, note: Callable[[Any], None]) -> None:
    """Calls `note` with the place of each written chunk."""
    if hasattr(item.id, "chunk_iter"):
        item.id.chunk_iter(note)
        return
    for k in range(item.id.get_num_chunks()):  # HDF5 before 1.12.3
        note(item.id.get_chunk_info(k))


# -- read -------------------------------------------------------------------------------------------


def _stream(
    path: str, data: tuple[str, ...], label: str | None
) -> Iterator[tuple[int, StreamedRow]]:
    with _File(path) as file:
        names = sorted(map(os.fsencode, data))
        items = file.named(*map(os.fsdecode, names))
        labels = file.labels(data, label)
        if any(item.dtype.hasobject for item in items):
            check_heaps(path)
        yield from _array_rows(names, items, labels)


def _array_rows(
    names: list[bytes],
    items: list[Any],
    labels: NDArray[np.int64] | None,
    chunk_bytes_max: int = _CHUNK_BYTES_MAX,
) -> Iterator[tuple[int, StreamedRow]]:
    """The rows of arrays that are parts, and how many there are; some chunks are read at a time."""
    count, at_once = items[0].shape[0], _rows_at_once(items, chunk_bytes_max)
    for begin in range(0, count, at_once):
        blocks = [item[begin : min(begin + at_once, count)] for item in items]
        for k in range(len(blocks[0])):
            rows = (_row_bytes(block[k]) for block in blocks)
            parts = tuple(zip(names, rows, strict=True))
            yield (
                count,
                StreamedRow(begin + k, parts, -1 if labels is None else int(labels[begin + k])),
            )


def _rows_at_once(items: list[Any], chunk_bytes_max: int) -> int:
    """Whole chunks of about 8 MiB: a chunk is decompressed as often as it is touched."""
    row_bytes = 1
    for item in items:
        width = _VARIABLE_BYTES if item.dtype.hasobject else item.dtype.itemsize
        row_bytes += int(np.prod(item.shape[1:], dtype=object)) * width
    rows = _READ_BYTES // row_bytes
    chunk: int = max((d.chunks[0] for d in items if d.chunks), default=1)
    return max(rows // chunk * chunk, min(chunk, chunk_bytes_max // row_bytes), 1)


def _row_bytes(row: Any) -> bytes:
    if isinstance(row, bytes):
        return row
    if isinstance(row, str):
        return row.encode(errors="surrogateescape")
    array = np.asarray(row)
    if array.dtype.hasobject:
        return b"".join(_row_bytes(piece) for piece in array.reshape(-1))
    return array.tobytes()


_HEAP_MAGIC = b"GCOL\1\0\0\0"
_HEAP_HEADER = struct.Struct("<8sQ")
_HEAP_OBJECT = struct.Struct("<HHIQ")
_HEAP_SCAN_BYTES = 16 << 20
_HEAP_BYTES = 64 << 10


def check_heaps(path: str) -> None:
    """Walk every heap of a file, which is read once."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for at in _heaps(file.fileno(), size):
            _walk_heap(file.fileno(), at, size, path)


def _heaps(fd: int, size: int) -> Iterator[int]:
    """Where heaps begin: their signature, at a multiple of 8 bytes."""
    for begin in range(0, size, _HEAP_SCAN_BYTES):
        block = os.pread(fd, _HEAP_SCAN_BYTES + len(_HEAP_MAGIC) - 1, begin)
        at = block.find(_HEAP_MAGIC)
        while at >= 0:
            if (begin + at) % 8 == 0 and at < _HEAP_SCAN_BYTES:
                yield begin + at
            at = block.find(_HEAP_MAGIC, at + 1)


def _walk_heap(fd: int, at: int, size: int, path: str) -> None:
    header = os.pread(fd, _HEAP_HEADER.size, at)
    length = _HEAP_HEADER.unpack(header)[1] if len(header) == _HEAP_HEADER.size else 0
    if not 4096 <= length <= size - at:
        raise damaged(path, "size of a heap", f"{length:,}", f"4,096 to {size - at:,}", at)
    head = os.pread(fd, min(length, _HEAP_BYTES), at)  # nearly always all of it
    offset = _HEAP_HEADER.size
    while offset + _HEAP_OBJECT.size <= length:
        place = at + offset
        raw = head[offset : offset + _HEAP_OBJECT.size]
        if len(raw) < _HEAP_OBJECT.size:
            raw = os.pread(fd, _HEAP_OBJECT.size, place)
        index, _, _, data_bytes = _HEAP_OBJECT.unpack(raw)
        # The free space counts its own header.
        step = data_bytes if index == 0 else _HEAP_OBJECT.size + -(-data_bytes // 8) * 8
        if not _HEAP_OBJECT.size <= step <= length - offset:
            what, most = f"size of object {index} of a heap", f"at most {length - offset:,}"
            raise damaged(path, what, f"{data_bytes:,}", most, place)
        if index == 0:
            return
        offset += step


# -- Zarr --------------------------------------------------------------------------------------------


def open_zarr(path: str, options: SourceOptions) -> Stream:
    """The rows of a Zarr array, or of the arrays of a group, which are parts; versions 2 and 3."""
    zarr = import_extra("zarr", f"reading {path}")
    try:
        node = zarr.open(path, mode="r")
        arrays = _arrays(zarr, node)
    except Exception as e:  # whatever its codecs raise over damaged metadata
        raise unsound(path, "Zarr", e) from e
    rows = {name: array for name, array in arrays.items() if array.shape}
    if not rows:
        raise no_samples(path, " in an array with rows")
    names, label = _choose_arrays(path, rows, options)
    count = rows[names[0]].shape[0]
    parts = sorted(names, key=os.fsencode)
    shapes = {
        name: {"shape": list(rows[name].shape), "dtype": str(rows[name].dtype)} for name in names
    }

    def items() -> Iterator[StreamItem]:
        try:
            numbers = None if label is None else label_array(rows[label][:], path, label)
            arrays = [rows[name] for name in parts]
            # Whole chunks, however large: zarr decompresses each whole.
            for _, row in _array_rows(list(map(os.fsencode, parts)), arrays, numbers, 1 << 62):
                yield StreamItem(row_names(count, rows=[row.row])[0], row.parts, row.label)
        except SourceError:
            raise
        except Exception as e:  # whatever its codecs raise over damaged chunks
            raise unsound(path, "Zarr", e) from e

    kept = {**options.to_json(), "arrays": shapes}
    source = {"kind": "zarr", "path": os.path.abspath(path), **kept}
    rest = [name for name in arrays if name not in (*names, label)]
    reason = "Zarr's chunks are compressed"
    return Stream(items, source, reason=reason, count=count, notes=left_out(rest))


def _arrays(zarr: Any, node: Any) -> dict[str, Any]:
    """Of a group, by path; of an array, itself without a name."""
    if isinstance(node, zarr.Array):
        return {"": node}
    arrays = {}
    for name, member in node.members(max_depth=None):
        if isinstance(member, zarr.Array):
            arrays[name] = member
        if len(arrays) > _ARRAYS_MAX:
            break
    return arrays


def _choose_arrays(
    path: str, rows: dict[str, Any], options: SourceOptions
) -> tuple[tuple[str, ...], str | None]:
    """The arrays that are parts, and the one of labels, all of one number of rows."""
    label = choose_label(list(rows.items()), _is_label, options, path, "one integer a row")
    names = options.column or tuple(name for name in rows if name != label) or tuple(rows)
    label = None if label in names else label
    counts = {name: rows[name].shape[0] for name in (*names, *filter(None, [label]))}
    if len(set(counts.values())) > 1:
        raise refused(
            path, f"its arrays differ in their rows: {listed([f'{n} {c}' for n, c in counts.items()])}.",
            "Name those that belong together: column=('image', 'mask').",
        )  # fmt: skip
    for name in names:
        if np.dtype(rows[name].dtype).kind not in "biufcSV":
            raise refused(
                path, f"array {name!r} holds {rows[name].dtype}, expected numbers or bytes of one length.",
                "Name other arrays: column='image'.",
            )  # fmt: skip
    if not counts[names[0]]:
        raise no_samples(path)
    return names, label
