"""Shards of MosaicML's and of LitData: both count their samples and say where each begins.

A shard is the number of samples (u32), where each begins and where the last ends (u32 each, in the file),
and the samples. MDS has a JSON description of the columns before them, and a sample is the sizes (u32) of
those columns that have none of their own, and then all columns. LitData describes its chunks in
`index.json`: a sample is the sizes of all of its leaves and then the leaves, or tokens alone; or the chunk
ends with an Arrow file that holds all rows. For both, `index.json` beside the shards says which belong
together and how long they are.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.store.sources.arrow import LITDATA_MAGIC, open_arrow
from headrace.store.sources.scan import (
    Rows,
    SourceOptions,
    choose_label,
    damaged,
    label_array,
    left_out,
    listed,
    numbers_entry,
    refused,
    scan_rows,
    source_entry,
    unreadable,
)
from headrace.store.sources.shards import Window, map_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.errors import SourceError
    from headrace.store.sources.scan import Scan, Stream

_CONFIG_BYTES_MAX = 1 << 20
_INDEX_BYTES_MAX = 256 << 20
_COLUMNS_MAX = 256

_SCALARS = {"int": "<i8", **{f"{k}{8 * w}": f"<{k[0]}{w}" for k in ("int", "uint") for w in (1, 2, 4, 8)},
            "float": "<f8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "bool": "?"}  # fmt: skip
_TEXT_SCALARS = ("str_int", "str_float", "str_decimal")

_ARRAY_TYPES: Final = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""MDS: types of arrays by the number before their values."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a shard; `size` in bytes, None where each sample says it."""

    name: str
    encoding: str
    size: int | None

    @property
    def is_number(self) -> bool:
        return self.encoding in _SCALARS or self.encoding in _TEXT_SCALARS


# -- index.json --------------------------------------------------------------------------------------


def list_mds_folder(path: str) -> list[str]:
    """The shards that a folder's `index.json` names, in its order."""
    where = os.path.join(path, "index.json")
    shards = _load_index(where, "shards")["shards"]
    return [_check_shard(where, shard, i) for i, shard in enumerate(shards)]


def _load_index(where: str, key: str) -> dict[str, Any]:
    with open(where, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size > _INDEX_BYTES_MAX:
            raise damaged(where, "size", f"{size:,}", f"at most {_INDEX_BYTES_MAX:,}", 0)
        try:
            index = json.loads(f.read())
            list(index[key])
        except (ValueError, RecursionError, LookupError, TypeError) as e:
            raise damaged(where, "content", e, f"the {key} of a data set", 0) from e
    return dict(index)


def _check_shard(where: str, shard: Any, i: int) -> str:
    if not isinstance(shard, dict) or shard.get("format") != "mds":
        stated = shard.get("format") if isinstance(shard, dict) else shard
        raise damaged(where, f"format of shard {i}", repr(stated)[:200], "'mds'", 0)
    raw = shard.get("raw_data")
    raw = raw if isinstance(raw, dict) else {}
    return _check_file(where, i, raw.get("basename"), raw.get("bytes"), shard.get("compression"))


def _check_file(where: str, i: int, name: Any, size: Any, compression: Any = None) -> str:
    """The shard of this name beside the index `where`, which has the size that the index says."""

    def bad(what: str, stated: object, expected: str) -> SourceError:
        return damaged(where, f"{what} of shard {i}", repr(stated)[:200], expected, 0)

    if not isinstance(name, str) or not name or "\0" in name:
        raise bad("name", name, "a file name")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise bad("name", name, "a file in the same folder")
    file = os.path.join(os.path.dirname(where), name)
    try:
        there = os.stat(file).st_size
    except OSError as e:
        if compression:
            what = f"is there only compressed ({compression}), expected plain bytes."
            how = "Decompress the shards, or write them with compression=None."
            raise refused(file, what, how) from e
        raise unreadable(file, e, "Fetch the shard again.") from e
    if there != size:
        raise damaged(file, "size in bytes", f"{there:,}", f"{size}, as index.json says", 0)
    return file


# -- MDS ---------------------------------------------------------------------------------------------


def scan_mds(paths: list[str], options: SourceOptions) -> Scan:
    """Lists the samples of MDS shards."""
    with Window(paths[0]) as window:
        _, described = _read_head(window)
    data, label, notes = _choose(described, options, paths[0])
    encodings = {c.name: c.encoding for c in described if c.name in data}
    listings = map_files(
        paths, lambda path: _list_rows(path, None, data, label, encodings), options.workers
    )
    arrays = {name: _array_of(encoding) for name, encoding in encodings.items()}
    dtypes = {name: dtype for name in data if (dtype := arrays[name][0])}
    _take_headers_off(listings, arrays, dtypes)
    source = source_entry("mds", paths, options)
    source["encodings"] = encodings
    source |= numbers_entry(data, dtypes)
    return scan_rows(paths, [rows for rows, _ in listings], source, options, notes=notes)


def _choose(
    columns: Sequence[_Column], options: SourceOptions, path: str
) -> tuple[tuple[str, ...], str | None, list[str]]:
    """The columns that are parts, the one of labels, and what is said of those that are left out."""
    types = [(c.name, c.encoding) for c in columns]
    label = choose_label(types, _is_label, options, path, "integers")
    data = options.column or tuple(c.name for c in columns if not c.is_number)
    if not data:
        what = (
            f"all columns are numbers ({listed([c.name for c in columns])}), expected one of bytes."
        )
        raise refused(path, what, "Name the samples' columns: column='x'.")
    rest = [c.name for c in columns if c.name not in (*data, label)]
    return data, label, left_out(rest, "; --column takes them as parts")


def _is_label(encoding: str) -> bool:
    return encoding == "str_int" or _SCALARS.get(encoding, "<f")[1:2] in ("i", "u")


def _read_offsets(window: Window) -> NDArray[np.uint32]:
    """Where the samples begin, and where the last one ends, (n+1,)."""
    count = int.from_bytes(window.read(0, 4), "little")
    table = 4 * (count + 1)
    if window.size < 8 or 4 + table > window.size:
        most = f"at most {max(0, window.size // 4 - 2):,} in a file of {window.size:,} bytes"
        raise damaged(window.path, "number of samples", f"{count:,}", most, 0)
    offsets = np.frombuffer(window.read(4, table), "<u4")
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 4 + table or last != window.size or (np.diff(offsets.astype(np.int64)) < 0).any():
        expected = f"ascending from {4 + table:,} to the file's end {window.size:,}"
        raise damaged(window.path, "offsets of the samples", f"{first:,} to {last:,}", expected, 4)
    return offsets


def _read_head(window: Window) -> tuple[NDArray[np.uint32], list[_Column]]:
    """The offsets of the samples, (n+1,), and the columns."""
    offsets = _read_offsets(window)
    at = 4 + 4 * len(offsets)
    size = int(offsets[0]) - at
    if size > _CONFIG_BYTES_MAX:
        most = f"at most {_CONFIG_BYTES_MAX:,}"
        raise damaged(window.path, "size of the description", f"{size:,}", most, 4)
    return offsets, _parse_config(window.path, window.read(at, size), at)


def _parse_config(path: str, text: bytes, at: int) -> list[_Column]:
    try:
        config = json.loads(text)
        names, encodings = config["column_names"], config["column_encodings"]
        columns = [_Column(*c) for c in zip(names, encodings, config["column_sizes"], strict=True)]
    except (ValueError, RecursionError, LookupError, TypeError) as e:
        expected = "the columns of an MDS shard"
        raise damaged(path, "description of the columns", e, expected, at) from e
    for c in columns:
        good = isinstance(c.name, str) and isinstance(c.encoding, str)
        width = np.dtype(_SCALARS[c.encoding]).itemsize if good and c.encoding in _SCALARS else None
        good = good and (c.size is None or (isinstance(c.size, int) and 0 < c.size < 1 << 32))
        if not good or (width is not None and c.size != width):
            raise damaged(path, "a column", str(c)[:200], "its name, encoding and size", at)
    if not 0 < len({c.name for c in columns}) == len(columns) <= _COLUMNS_MAX:
        raise damaged(path, "columns", str(names)[:200], f"1 to {_COLUMNS_MAX} different names", at)
    return columns


_Heads = dict[str, "NDArray[np.uint8]"]
"""Of columns of arrays: the first bytes of each sample's, (n, 10)."""

_HEAD_BYTES: Final = 10
"""The longest header of an array of one dimension: type, dimensions, and its length in 8 bytes."""


def _list_rows(
    path: str, columns: Sequence[_Column] | None, data: tuple[str, ...], label: str | None,
    encodings: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Rows, _Heads]:  # fmt: skip
    """The rows of a shard; of MDS, which says itself what its columns are, without `columns`.

    Raises SourceError if the shard is damaged, or its parts are not encoded as the first one's `encodings`.
    """
    with Window(path) as window:
        if columns is None:
            offsets, columns = _read_head(window)
            _choose(columns, SourceOptions(column=data, label=label or ""), path)
            own = {c.name: c.encoding for c in columns if c.name in data}
            if own != encodings:
                stated, expected = (
                    listed([f"{n}: {e}" for n, e in each.items()]) for each in (own, encodings)
                )
                raise refused(
                    path, f"its columns are encoded as {stated}, those of the first shard as {expected}.",
                    "Pack the shards one by one, or write them with the same columns.",
                )  # fmt: skip
        else:
            offsets = _read_offsets(window)
        names = [c.name for c in columns]
        wanted = None if label is None else columns[names.index(label)]
        arrays = [
            k for k, c in enumerate(columns) if c.name in data and c.encoding.startswith("ndarray")
        ]
        numbers: list[int] = []
        n = len(offsets) - 1
        heads = np.zeros((len(arrays), n, _HEAD_BYTES), np.uint8)
        places = np.zeros(
            (n, len(columns) + 1), np.uint64
        )  # where columns begin, and the last ends
        for i, (at, stop) in enumerate(pairwise(offsets.tolist())):
            places[i] = ends = _column_ends(window, columns, i, at, stop)
            if wanted is not None:
                k = names.index(wanted.name)
                numbers.append(_label(window, wanted, ends[k], ends[k + 1]))
            for which, k in enumerate(arrays):
                head = window.read(ends[k], min(_HEAD_BYTES, ends[k + 1] - ends[k]))
                heads[which, i, : len(head)] = np.frombuffer(head, np.uint8)
        parts = {}
        for name in data:
            k = names.index(name)
            parts[os.fsencode(name)] = places[:, k].copy(), places[:, k + 1] - places[:, k]
        labels = None if label is None else label_array(np.array(numbers, object), path, label)
        rows = Rows(window.volume(), n, parts, labels)
        return rows, {names[k]: heads[which] for which, k in enumerate(arrays)}


def _column_ends(
    window: Window, columns: Sequence[_Column], i: int, at: int, stop: int
) -> list[int]:
    """Where the columns of sample `i`, from `at` to `stop`, begin, and where the last one ends."""
    head_bytes = 4 * sum(c.size is None for c in columns)
    head = window.read(at, min(head_bytes, stop - at))
    if len(head) < head_bytes:
        expected = f"{head_bytes} or more"
        raise damaged(window.path, f"size of sample {i}", stop - at, expected, at)
    own = iter(np.frombuffer(head, "<u4").tolist())
    sizes = (next(own) if c.size is None else c.size for c in columns)
    ends = list(accumulate(sizes, initial=at + head_bytes))
    if ends[-1] != stop:
        raise damaged(window.path, f"end of sample {i}", f"{ends[-1]:,}", f"{stop:,}", at)
    return ends


def _label(window: Window, column: _Column, begin: int, end: int) -> int:
    data = window.read(begin, min(end - begin, 32))
    try:
        if column.encoding == "str_int":
            return int(data)
        (number,) = np.frombuffer(data, _SCALARS[column.encoding])
        return int(number)
    except ValueError:
        expected = "decimal digits" if column.encoding == "str_int" else f"one {column.encoding}"
        raise damaged(window.path, "a label", data[:32], expected, begin) from None


def _array_of(encoding: str) -> tuple[str | None, bool]:
    """The type of the numbers of a column of arrays, where the column says it, and whether its shape, too."""
    kind, _, rest = encoding.partition(":")
    if kind != "ndarray":
        return None, False
    dtype, _, shape = rest.partition(":")
    return dtype if dtype in _ARRAY_TYPES.values() else None, bool(shape)


def _take_headers_off(
    listings: Sequence[tuple[Rows, _Heads]], arrays: dict[str, tuple[str | None, bool]],
    dtypes: dict[str, str],
) -> None:  # fmt: skip
    """Leaves out what stands before the values of arrays, where all have one dimension and one type.

    So a document of tokens is its tokens. Arrays of more dimensions keep the shape that stands before their
    values: without it, nobody could say what they are.
    """
    for name in listings[0][1]:
        dtype, has_shape = arrays[name]
        if has_shape:
            continue
        typed = dtype is not None
        heads = np.concatenate([heads[name] for _, heads in listings])
        kinds = {dtype} if typed else {_ARRAY_TYPES.get(k) for k in np.unique(heads[:, 0]).tolist()}
        shape = heads[:, 0 if typed else 1]
        width = 1 << (shape & 3).astype(np.uint64)
        key = os.fsencode(name)
        length = np.concatenate([rows.parts[key][1] for rows, _ in listings])
        (only,) = kinds if len(kinds) == 1 else (None,)
        skipped = width + np.uint64(1 if typed else 2)
        count = heads[:, 1 if typed else 2 :][:, :8].astype(np.uint64)
        count = np.pad(count, ((0, 0), (0, 8 - count.shape[1])))
        count[np.arange(8)[None, :] >= width[:, None]] = 0
        items = (count << (8 * np.arange(8, dtype=np.uint64))).sum(1, dtype=np.uint64)
        fits = only is not None and (shape >> 2 == 1).all() and (length >= skipped).all()
        if not fits or (items * np.uint64(np.dtype(only).itemsize) != length - skipped).any():
            dtypes.pop(name, None)
            continue
        dtypes[name] = str(only)
        first = 0
        for rows, _ in listings:
            begin, size = rows.parts[key]
            own = skipped[first : first + len(size)]
            rows.parts[key] = begin + own, size - own
            first += len(size)


# -- LitData -----------------------------------------------------------------------------------------

_TENSOR_TYPES: Final = {
    0: "float32", 1: "float32", 2: "float64", 3: "float64", 8: "float16", 9: "float16", 11: "uint8", 12: "int8",
    13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 20: "uint16",
}  # fmt: skip
_NUMPY_TYPES: Final = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


def list_litdata_folder(path: str) -> list[str]:
    """The chunks that a folder's `index.json` names, in its order."""
    where = os.path.join(path, "index.json")
    files = []
    for i, chunk in enumerate(_load_litdata(path)["chunks"]):
        chunk = chunk if isinstance(chunk, dict) else {}  # noqa: PLW2901 - what is none has no name
        files.append(_check_file(where, i, chunk.get("filename"), chunk.get("chunk_bytes")))
    if not files:
        raise refused(path, "is a LitData data set without chunks.", "Write it again.")
    return files


def _load_litdata(path: str) -> dict[str, Any]:
    where = os.path.join(path, "index.json")
    index = _load_index(where, "chunks")
    config = index.get("config")
    if not isinstance(config, dict):
        raise damaged(where, "config", str(config)[:60], "what the chunks hold", 0)
    for key in ("compression", "encryption"):
        if config.get(key):
            what = f"is a LitData data set with {key} ({str(config[key])[:60]}), expected plain chunks."
            how = f"Write it without {key}, or pack an iterable over litdata.StreamingDataset('{path}')."
            raise refused(path, what, how)
    return index


def open_litdata(paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Lists the samples of LitData's chunks, which lie beside their `index.json`."""
    folder = os.path.dirname(paths[0]) or "."
    where, index = os.path.join(folder, "index.json"), _load_litdata(folder)
    config, first = index["config"], next(iter(index["chunks"]), None)
    with Window(paths[0]) as window:
        if window.read(max(0, window.size - 8), min(8, window.size)) == LITDATA_MAGIC:
            return open_arrow(paths, options, "litdata")
    loader = config.get("item_loader")
    if loader is None:  # as earlier versions wrote it: tokens alone are counted
        loader = "TokensLoader" if isinstance(first, dict) and first.get("dim") else "PyTreeLoader"
    if loader not in ("PyTreeLoader", "TokensLoader"):
        what = f"its samples are those of {loader!r}, expected PyTreeLoader or TokensLoader."
        raise refused(where, what, "Pack an iterable over litdata.StreamingDataset.")
    leaves = _leaves(where, config)
    source = source_entry("litdata", paths, options)
    source["encodings"] = {c.name: c.encoding for c in leaves}
    dtypes = {c.name: dtype for c in leaves if (dtype := _leaf_type(c.encoding))}
    if loader == "TokensLoader":
        name = leaves[0].name
        if len(leaves) != 1 or name not in dtypes:
            what = f"its tokens are {[c.encoding for c in leaves]}, expected one array of numbers."
            raise refused(where, what, "Pack an iterable over litdata.StreamingDataset.")
        files = map_files(paths, _list_documents, options.workers)
        return scan_rows(paths, files, source | numbers_entry([""], {"": dtypes[name]}), options)
    data, label, notes = _choose(leaves, options, where)
    listings = map_files(paths, lambda path: _list_rows(path, leaves, data, label), options.workers)
    source |= numbers_entry(data, {name: dtypes[name] for name in data if name in dtypes})
    return scan_rows(paths, [rows for rows, _ in listings], source, options, notes=notes)


def _list_documents(path: str) -> Rows:
    with Window(path) as window:
        offsets = _read_offsets(window).astype(np.uint64)
        place = offsets[:-1], np.diff(offsets)
        return Rows(window.volume(), len(offsets) - 1, {b"": place})


def _leaves(where: str, config: dict[str, Any]) -> list[_Column]:
    """What a sample consists of, by the description that PyTorch's trees have in JSON."""
    try:
        formats, spec = list(config["data_format"]), json.loads(config["data_spec"])[1]
        names = _leaf_names(spec, ())
        columns = [_Column(n, str(f), None) for n, f in zip(names, formats, strict=True)]
    except (ValueError, RecursionError, LookupError, TypeError) as e:
        raise damaged(where, "config", e, "data_format and data_spec of the samples", 0) from e
    if not 0 < len(set(names)) == len(columns) <= _COLUMNS_MAX:
        expected = f"1 to {_COLUMNS_MAX} different names"
        raise damaged(where, "config", str(names)[:200], expected, 0)
    return columns


def _leaf_names(spec: Any, above: tuple[str, ...]) -> list[str]:
    children = spec["children_spec"]
    if spec["type"] is None:
        return [".".join(above)]
    keys = json.loads(spec["context"]) if spec["context"] else None
    keys = keys if isinstance(keys, list) else list(range(len(children)))
    pairs = zip(keys, children, strict=True)
    return [name for key, child in pairs for name in _leaf_names(child, (*above, str(key)))]


def _leaf_type(encoding: str) -> str | None:
    """The type of an array of one dimension, of which the values alone are stored."""
    kind, _, code = encoding.partition(":")
    number = int(code) if code.isdecimal() else -1
    if kind == "no_header_tensor":
        return _TENSOR_TYPES.get(number)
    known = kind == "no_header_numpy" and 0 <= number < len(_NUMPY_TYPES)
    return _NUMPY_TYPES[number] if known else None
