"""MosaicML's MDS shards as a source: each sample's columns are its parts.

A shard is the number of samples (u32), where each begins and where the last ends (u32 each, in the
file), a JSON description of the columns, and the samples. A sample is the sizes (u32) of those columns
that have none of their own, and then all columns. `index.json` beside the shards says which belong
together and how long they are.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.store.sources.scan import (
    Rows,
    SourceOptions,
    choose_label,
    damaged,
    label_array,
    listed,
    refused,
    scan_rows,
    source_entry,
    unreadable,
)
from headrace.store.sources.shards import Window, map_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.errors import SourceError
    from headrace.store.sources.scan import Scan

_CONFIG_BYTES_MAX = 1 << 20
_INDEX_BYTES_MAX = 256 << 20
_COLUMNS_MAX = 256

_SCALARS = {"int": "<i8", **{f"{k}{8 * w}": f"<{k[0]}{w}" for k in ("int", "uint") for w in (1, 2, 4, 8)},
            "float16": "<f2", "float32": "<f4", "float64": "<f8"}  # fmt: skip
_TEXT_SCALARS = ("str_int", "str_float", "str_decimal")


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a shard; `size` in bytes, None where each sample says it."""

    name: str
    encoding: str
    size: int | None

    @property
    def is_number(self) -> bool:
        return self.encoding in _SCALARS or self.encoding in _TEXT_SCALARS


def list_mds_folder(path: str) -> list[str]:
    """The shards that a folder's `index.json` names, in its order."""
    where = os.path.join(path, "index.json")
    shards = _load_index(path)["shards"]
    return [_check_shard(path, where, shard, i) for i, shard in enumerate(shards)]


def _load_index(path: str) -> dict[str, Any]:
    where = os.path.join(path, "index.json")
    with open(where, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size > _INDEX_BYTES_MAX:
            raise damaged(where, "size", f"{size:,}", f"at most {_INDEX_BYTES_MAX:,}", 0)
        try:
            index = json.loads(f.read())
            list(index["shards"])
        except (ValueError, RecursionError, LookupError, TypeError) as e:
            raise damaged(where, "content", e, "the shards of an MDS data set", 0) from e
    return dict(index)


def _check_shard(path: str, where: str, shard: Any, i: int) -> str:
    def bad(what: str, stated: object, expected: str) -> SourceError:
        return damaged(where, f"{what} of shard {i}", repr(stated)[:200], expected, 0)

    if not isinstance(shard, dict) or shard.get("format") != "mds":
        raise bad("format", shard.get("format") if isinstance(shard, dict) else shard, "'mds'")
    raw = shard.get("raw_data")
    raw = raw if isinstance(raw, dict) else {}
    name = raw.get("basename")
    if not isinstance(name, str) or not name or "\0" in name:
        raise bad("name", name, "a file name")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise bad("name", name, "a file in the same folder")
    file = os.path.join(path, name)
    try:
        size = os.stat(file).st_size
    except OSError as e:
        if shard.get("compression"):
            what = f"is there only compressed ({shard['compression']}), expected plain bytes."
            how = "Decompress the shards, or write them with compression=None."
            raise refused(file, what, how) from e
        raise unreadable(file, e, "Fetch the shard again.") from e
    if size != raw.get("bytes"):
        expected = f"{raw.get('bytes')}, as index.json says"
        raise damaged(file, "size in bytes", f"{size:,}", expected, 0)
    return file


def scan_mds(paths: list[str], options: SourceOptions) -> Scan:
    """Lists the samples of MDS shards."""
    with Window(paths[0]) as window:
        _, described = _read_head(window)
    data, label = _choose(described, options, paths[0])
    files = map_files(paths, lambda path: _list_rows(path, data, label), options.workers)
    source = source_entry("mds", paths, options)
    source["encodings"] = {c.name: c.encoding for c in described if c.name in data}
    return scan_rows(paths, files, source, options)


def _choose(
    columns: list[_Column], options: SourceOptions, path: str
) -> tuple[tuple[str, ...], str | None]:
    """The columns that are parts, and the one of labels."""
    types = [(c.name, c.encoding) for c in columns]
    label = choose_label(types, _is_label, options, path, "integers")
    data = options.column or tuple(c.name for c in columns if not c.is_number)
    if not data:
        what = (
            f"all columns are numbers ({listed([c.name for c in columns])}), expected one of bytes."
        )
        raise refused(path, what, "Name the samples' columns: column='x'.")
    return data, label


def _is_label(encoding: str) -> bool:
    return encoding == "str_int" or _SCALARS.get(encoding, "<f")[1] in "iu"


def _read_head(window: Window) -> tuple[NDArray[np.uint32], list[_Column]]:
    """The offsets of the samples, (n+1,), and the columns."""
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
    size = first - 4 - table
    if size > _CONFIG_BYTES_MAX:
        most = f"at most {_CONFIG_BYTES_MAX:,}"
        raise damaged(window.path, "size of the description", f"{size:,}", most, 4)
    return offsets, _parse_config(window.path, window.read(4 + table, size), 4 + table)


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


def _list_rows(path: str, data: tuple[str, ...], label: str | None) -> Rows:
    with Window(path) as window:
        offsets, columns = _read_head(window)
        _choose(columns, SourceOptions(column=data, label=label or ""), path)
        names = [c.name for c in columns]
        wanted = None if label is None else columns[names.index(label)]
        numbers: list[int] = []
        n = len(offsets) - 1
        places = np.zeros(
            (n, len(columns) + 1), np.uint64
        )  # where columns begin, and the last ends
        for i, (at, stop) in enumerate(pairwise(offsets.tolist())):
            places[i] = ends = _column_ends(window, columns, i, at, stop)
            if wanted is not None:
                k = columns.index(wanted)
                numbers.append(_label(window, wanted, ends[k], ends[k + 1]))
        parts = {}
        for name in data:
            k = names.index(name)
            parts[os.fsencode(name)] = places[:, k].copy(), places[:, k + 1] - places[:, k]
        labels = None if label is None else label_array(np.array(numbers, object), path, label)
        return Rows(window.volume(), n, parts, labels)


def _column_ends(window: Window, columns: list[_Column], i: int, at: int, stop: int) -> list[int]:
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
    if column.encoding != "str_int":
        return int(np.frombuffer(data, _SCALARS[column.encoding])[0])
    try:
        return int(data)
    except ValueError:
        raise damaged(window.path, "a label", data[:32], "decimal digits", begin) from None
