"""Numpy's files as a source: each row of an array is a sample.

`.npy`: the rows of one array. `.npz` (uncompressed): arrays of one first dimension; each key is a part,
and a one-dimensional integer array called `label`, `labels` or `y` gives the labels instead. Several
`.npy` files are one array in pieces if their rows are alike; else, if they have one number of rows, they
are parts as in an `.npz`. The rows' shape and type are kept in the segment's `source`, so that arrays can
be made of the bytes again.
"""

from __future__ import annotations

import ast
import contextlib
import os
import struct
import zipfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from headrace.errors import SourceError
from headrace.store.directory import DirectoryColumns, columns_of
from headrace.store.sources.scan import (
    LABEL_NAMES,
    Rows,
    Scan,
    SourceOptions,
    damaged,
    file_volume,
    listed,
    no_samples,
    refused,
    row_names,
    scan_rows,
    source_entry,
    unreadable,
    unsound,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.store.manifest import VolumeEntry

_MAGIC = b"\x93NUMPY"
_HEADER_BYTES_MAX = 64 << 10
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class _Array:
    """Where an array's rows lie in the file."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.row_bytes

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": npy_format.dtype_to_descr(self.dtype)}


def scan_npy(paths: list[str], options: SourceOptions) -> Scan:
    """Lists the rows of a `.npy` or `.npz` file, or of several `.npy` files."""
    arrays: list[_Array] = []
    volumes = []
    several = len(paths) > 1
    for path in paths:
        with _opened(path) as (f, status):
            if several and f.read(len(_MAGIC)) != _MAGIC:
                raise refused(path, "is no .npy file.", "Name .npy files alone, or one .npz.")
            f.seek(0)
            key = os.path.basename(path).removesuffix(".npy") if several else ""
            here = _list_arrays(f, path, key)
        for array in here:
            if array.end > status.st_size:
                most = f"at most the file's size {status.st_size:,}"
                what = f"end of array {array.key!r}"
                raise damaged(path, what, f"{array.end:,}", most, array.offset)
        arrays += here
        volumes.append(file_volume(path, status))
    if several:
        source = source_entry("npy", paths, options)
        if len({(array.shape[1:], array.dtype) for array in arrays}) == 1:
            source["arrays"] = {"": arrays[0].to_json()}
            return scan_rows(paths, list(map(_rows, arrays, volumes)), source, options)
        if len({array.shape[0] for array in arrays}) > 1:
            shapes = listed([f"{array.key} {array.shape}" for array in arrays])
            what = f"these arrays are neither pieces of one nor of one number of rows: {shapes}."
            raise refused(paths[0], what, "Name those that belong together; or --as files.")
    else:
        kind = "npz" if arrays[0].key else "npy"
        source = {"kind": kind, "path": os.path.abspath(paths[0]), **options.to_json()}
    given = _labels_among(arrays)
    # Each array lies in a file of its own, or all in one.
    placed = [(a, i if several else 0) for i, a in enumerate(arrays) if a is not given]
    if len({array.key for array, _ in placed}) < len(placed):
        how = "Rename one: names are those of parts."
        raise refused(paths[0], "two arrays have one name.", how)
    labels = None
    if given is not None:
        path = paths[arrays.index(given) if several else 0]
        with _opened(path) as (f, _):
            labels = _read_labels(f, given, path)
    source["arrays"] = {array.key: array.to_json() for array, _ in placed}
    return Scan(_columns(placed, labels), tuple(volumes), source)


def _rows(array: _Array, volume: VolumeEntry) -> Rows:
    rows, size = np.arange(array.shape[0], dtype=np.uint64), np.uint64(array.row_bytes)
    place = rows * size + np.uint64(array.offset), np.full(len(rows), size)
    return Rows(volume, array.shape[0], {b"": place})


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes], os.stat_result]]:
    try:
        with open(path, "rb") as f:
            yield f, os.fstat(f.fileno())
    except OSError as e:
        if isinstance(e, SourceError):
            raise
        raise unreadable(path, e, "Check the file.") from e


def check_not_rows(root: str, names: list[bytes]) -> None:
    """Refuse a folder of a few arrays, of which each file, or each row, could be the sample.

    Raises SourceError if the folder is such a one.
    """
    shapes = []
    for name in names:
        path = os.path.join(root, os.fsdecode(name))
        try:
            with open(path, "rb") as f:
                shapes.append(_read_header(f, path, "", 0).shape)
        except (OSError, SourceError):
            return  # files as they are
    if all(len(shape) > 1 and shape[0] > 1 for shape in shapes) or (
        len(shapes) > 1 and len({shape[:1] for shape in shapes}) == 1 and (shapes[0] or (0,))[0] > 1
    ):
        raise refused(
            root, f"holds {len(names)} arrays ({listed([str(shape) for shape in shapes])}): is each a "
            "sample, or each of their rows?",
            "Say it: --as files or --as npy (in Python format='files' or format='npy').",
        )  # fmt: skip


def _list_arrays(f: IO[bytes], path: str, key: str = "") -> list[_Array]:
    head = f.read(6)
    f.seek(0)
    arrays = [_read_header(f, path, key, 0)] if head == _MAGIC else _list_npz(f, path)
    for array in arrays:
        if not array.shape or array.shape[0] != arrays[0].shape[0]:
            raise refused(
                path, f"array {array.key!r} has the shape {array.shape}, expected rows, as many "
                f"as in {arrays[0].key!r} {arrays[0].shape}.",
                "Save arrays of one first dimension together.",
            )  # fmt: skip
    if not arrays or arrays[0].shape[0] == 0:
        raise no_samples(path)
    return arrays


def _list_npz(f: IO[bytes], path: str) -> list[_Array]:
    arrays = []
    try:
        with zipfile.ZipFile(f) as archive:
            for info in archive.infolist():
                key, at = info.filename.removesuffix(".npy"), info.header_offset
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    what = f"array {key!r} is compressed, expected plain bytes."
                    how = "Save it with numpy.savez instead of savez_compressed."
                    raise refused(path, what, how, at)
                data_offset = _data_offset(f, at, path)
                with archive.open(info) as member:
                    array = _read_header(member, path, key, data_offset)
                if array.end - data_offset > info.file_size:
                    what = f"size of array {key!r}"
                    raise damaged(path, what, info.file_size, array.end, at)
                arrays.append(array)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error, ValueError) as e:
        raise unsound(path, "npz", e) from e
    return arrays


def _data_offset(f: IO[bytes], header_offset: int, path: str) -> int:
    """Where a stored member's bytes begin: the local header has its own lengths."""
    at = f.tell()
    f.seek(header_offset)
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(f.read(_LOCAL_HEADER.size))
    f.seek(at)
    if magic != b"PK\x03\x04":
        raise damaged(path, "magic of a member", magic, "PK 03 04", header_offset)
    return header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _read_header(f: IO[bytes], path: str, key: str, start: int) -> _Array:
    """The header of one array; its data begin where reading stops."""
    begin = f.tell()
    try:
        shape, fortran, dtype = read_npy_header(f)
    except ValueError as e:
        what = f"the header of array {key!r} is unreadable: {e} (offset {start:,})."
        how = "The file is truncated or damaged: save it again with numpy."
        raise refused(path, what, how, start) from e
    if dtype.hasobject:
        what = f"array {key!r} holds Python objects, expected numbers or fixed-size bytes."
        raise refused(path, what, "Convert it to a plain type: headrace never unpickles.", start)
    if fortran and len(shape) > 1:
        what = f"array {key!r} is in Fortran order, expected C order (rows in one piece)."
        raise refused(path, what, "Save numpy.ascontiguousarray(array).", start)
    return _Array(key, tuple(shape), dtype, start + f.tell() - begin)


def read_npy_header(f: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and type of the array whose header the file is at; its bytes follow.

    Numpy's own parser repairs and warns; this one refuses.

    Raises ValueError if the header is cut off, damaged or larger than any that numpy writes.
    """
    try:
        return _parse_header(f)
    except (TypeError, SyntaxError, LookupError, RecursionError, MemoryError) as e:
        raise ValueError(str(e)) from e


def _parse_header(f: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    head = f.read(8)
    if len(head) < 8 or head[:6] != _MAGIC or head[6] not in (1, 2, 3):
        raise ValueError(f"it begins with {head.hex(' ')}")
    width = 2 if head[6] == 1 else 4
    size = int.from_bytes(f.read(width), "little")
    if size > _HEADER_BYTES_MAX:
        raise ValueError(f"it is {size:,} bytes long, expected at most {_HEADER_BYTES_MAX:,}")
    text = f.read(size)
    if len(text) < size:
        raise ValueError(f"it has {len(text):,} of {size:,} bytes")
    header = ast.literal_eval(text.decode("utf-8" if head[6] == 3 else "latin1").strip())
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"it is {str(header)[:100]}")
    shape, fortran = header["shape"], header["fortran_order"]
    if not isinstance(fortran, bool) or not isinstance(shape, tuple):
        raise TypeError(f"it is {str(header)[:100]}")
    if not all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 1 << 48 for s in shape):
        raise ValueError(f"the shape is {str(shape)[:100]}")
    return shape, fortran, npy_format.descr_to_dtype(header["descr"])


def _labels_among(arrays: list[_Array]) -> _Array | None:
    """The array that gives the labels, if one does."""
    labels = [
        a for a in arrays if a.key in LABEL_NAMES and len(a.shape) == 1 and a.dtype.kind in "iu"
    ]
    return labels[0] if len(labels) == 1 and len(arrays) > 1 else None


def _read_labels(f: IO[bytes], array: _Array, path: str) -> NDArray[Any]:
    f.seek(array.offset)
    data = f.read(array.end - array.offset)
    if len(data) < array.end - array.offset:
        what, expected = f"array {array.key!r}", array.end - array.offset
        raise damaged(path, what, f"{len(data)} bytes", expected, array.offset)
    return np.frombuffer(data, array.dtype).astype(np.int64)


def _columns(placed: list[tuple[_Array, int]], labels: NDArray[Any] | None) -> DirectoryColumns:
    """Of rows as parts, of arrays and the numbers of their volumes."""
    placed = sorted(placed, key=lambda pair: os.fsencode(pair[0].key))
    arrays, volume = [array for array, _ in placed], np.array([number for _, number in placed])
    n = arrays[0].shape[0]
    rows = np.arange(n, dtype=np.uint64)[:, None]
    starts = np.array([a.offset for a in arrays], np.uint64)
    sizes = np.array([a.row_bytes for a in arrays], np.uint64)
    return columns_of(
        row_names(n), np.tile(volume, n), (starts + rows * sizes).reshape(-1), np.tile(sizes, n),
        parts=[os.fsencode(a.key) for a in arrays],
        labels=labels,
    )  # fmt: skip
