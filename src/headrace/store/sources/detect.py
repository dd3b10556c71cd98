"""Finds out what a source is: from its path and its first bytes, or as an iterable of samples.

The readers of formats are imported when a source is theirs: most stores are opened without any.
"""

from __future__ import annotations

import glob
import operator
import os
import re
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import SourceError, VolumeError
from headrace.io.objects.location import base_name, expand_numbers, is_url, shown
from headrace.store.sources.scan import Scan, Stream, StreamItem, refused, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.sources.scan import SourceOptions


_SUPPORTED = (
    "a folder of files, tar files (.tar; .tar.gz, .tar.bz2, .tar.xz for packing), TFRecord files, "
    ".npy and .npz files, HDF5, Parquet and Arrow files, shards of MDS and LitData, JSON Lines, "
    "a CSV file that lists files, "
    "files of tokens; "
    "for packing ArrayRecord files, Zarr, LMDB and Lance; a data set of Hugging Face's, or an iterable of "
    "samples"
)


class _Opener(NamedTuple):
    """The module, and the function in it, that opens files of a kind."""

    module: str
    function: str
    columns: bool = False  # whether the samples' columns can be named
    objects: bool = False  # whether it is read where it lies in an object store


_OPENERS = {
    "tar": _Opener("tar", "open_tar", objects=True),
    "tfrecord": _Opener("tfrecord", "scan_tfrecord", objects=True),
    "hdf5": _Opener("hdf5", "open_hdf5", columns=True),
    "parquet": _Opener("parquet", "open_parquet", columns=True, objects=True),
    "arrow": _Opener("arrow", "open_arrow", columns=True),
    "mds": _Opener("mds", "scan_mds", columns=True, objects=True),
    "litdata": _Opener("mds", "open_litdata", columns=True),
    "array_record": _Opener("tfrecord", "stream_array_record"),
    "jsonl": _Opener("text", "open_jsonl", columns=True, objects=True),
    "lines": _Opener("text", "open_lines", objects=True),
    "manifest": _Opener("text", "open_manifest", columns=True),
    "coco": _Opener("text", "open_coco"),
    "zarr": _Opener("hdf5", "open_zarr", columns=True),
    "lmdb": _Opener("libraries", "open_lmdb", columns=True),
    "lance": _Opener("libraries", "open_lance", columns=True),
    "tokens": _Opener("tokens", "scan_tokens"),
    "megatron": _Opener("tokens", "scan_megatron"),
    **dict.fromkeys(
        ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"),
        _Opener("tokens", "scan_tokens"),
    ),
}
"""Kinds of which several files make one source."""

LIBRARIES = frozenset({"zarr", "lmdb", "lance"})  # of which one folder is a data set


def open_source(
    source: Any, options: SourceOptions, objects: ObjectEngine | None = None
) -> Scan | Stream:
    """Lists a source, whatever it is: a path, a pattern, a list of files, a `datasets.Dataset`, an iterable.

    `objects` reads URLs; one with default options is made if there are some. Raises SourceError if it is
    nothing that headrace can read, or is damaged.
    """
    opened = _open_any(source, options, objects)
    return _without_labels(opened) if options.label == "" else opened


def _without_labels(opened: Scan | Stream) -> Scan | Stream:
    """The same samples; only tables have left their labels out already."""
    if isinstance(opened, Scan):
        opened.columns.labels = opened.columns.class_names = None
        return opened

    def items() -> Iterator[StreamItem]:
        return (replace(item, label=-1) for item in opened.items())

    return replace(opened, items=items, class_names=None, label=None)


def _open_any(source: Any, options: SourceOptions, objects: ObjectEngine | None) -> Scan | Stream:
    if isinstance(source, Stream):
        return source
    urls = _urls_of(source)
    if urls:
        from headrace.store.sources.shards import open_objects

        return open_objects(urls, options, objects, _open_files)
    if isinstance(source, (str, bytes, os.PathLike)):
        return _open_path(os.fsdecode(source), options)
    if isinstance(source, (list, tuple)) and _all_paths(source):
        return _open_files([os.fsdecode(p) for p in source], options)
    from headrace.store.sources.huggingface import is_dataset, open_dataset

    if is_dataset(source):
        return open_dataset(source, options)
    _refuse_columns("an iterable", options)
    return stream_iterable(source)


def _urls_of(source: Any) -> list[str]:
    """The URLs that a source names; empty where it names none."""
    items = source if isinstance(source, (list, tuple)) else [source]
    urls = [item for item in items if is_url(item)]
    if urls and len(urls) < len(items):
        what = (
            f"{len(urls)} URLs and {len(items) - len(urls)} others were given, expected one kind."
        )
        raise SourceError(what, path=shown(urls[0]), next_step="Name objects or local files.")
    return urls


def _refuse_columns(kind: str, options: SourceOptions) -> None:
    """Options that would be ignored are a mistake; to be without labels any source can."""
    if options.column is not None or options.label:
        given = f"column={options.column!r}" if options.column else f"label={options.label!r}"
        raise ValueError(f"{given} is for tables and arrays with names, the source is {kind}")


def _all_paths(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, (str, os.PathLike)) for item in items)


def _open_path(path: str, options: SourceOptions) -> Scan | Stream:
    if os.path.isdir(path):
        return _open_folder(path, options)
    if os.path.lexists(path):
        return _open_files([path], options)
    files = matches_of(path)
    if not files:
        raise refused(path, "there is no such file or folder.", "Check the path.")
    return _open_files(files, options)


def matches_of(pattern: str) -> list[str]:
    """The files that a pattern with `*`, `?`, `[` or `{000..146}` stands for; none where it is no pattern."""
    numbered = expand_numbers(pattern) if "{" in pattern else []
    if len(numbered) > 1:
        return numbered
    return sorted(glob.glob(pattern)) if glob.has_magic(pattern) else []


def _open_folder(path: str, options: SourceOptions) -> Scan | Stream:
    """A folder of samples, of shards, or of a library's data set."""
    from headrace.store.sources.contents import library_folder
    from headrace.store.sources.folder import scan_folder

    if os.path.isfile(os.path.join(path, "store.json")):
        what = f"{path} is a headrace store, expected {_SUPPORTED}."
        raise SourceError(what, path=path, next_step="Open it, or copy its folder.")
    library = library_folder(path) if options.format is None and not options.extensions else None
    if library is None:
        scan = scan_folder(path, options)
        if isinstance(scan, Scan):
            _refuse_columns("a folder of files", options)
            return scan
        opened = _open_kind(scan.kind, scan.paths, options)
        opened.notes.extend(scan.notes)
        return opened
    if library.kind == "folder":
        return _open_folder(library.paths[0], options)
    return _open_kind(library.kind, library.paths, options)


def _open_files(paths: list[str], options: SourceOptions) -> Scan | Stream:
    if options.format in _OPENERS:
        return _open_kind(options.format, paths, options)
    kinds = {path: detect_file(path) for path in paths}
    if len(set(kinds.values())) > 1:
        other = next(p for p in paths if kinds[p] != kinds[paths[0]])
        raise SourceError(
            f"{paths[0]} is {kinds[paths[0]]} and {other} is {kinds[other]}, expected files of one "
            "kind.",
            path=other,
            next_step="Name files of one kind.",
        )
    return _open_kind(kinds[paths[0]], paths, options)


def _open_kind(kind: str, paths: list[str], options: SourceOptions) -> Scan | Stream:
    """Files of one kind, or a library's folder."""
    opener = _OPENERS.get(kind) or _Opener("npy", "scan_npy")
    if not opener.objects and is_url(paths[0]):
        what = f"files of the kind {kind} in an object store cannot be read where it lies."
        raise refused(str(paths[0]), what, "Copy it to a disk first.")
    if not opener.columns:
        _refuse_columns(f"a file of the kind {kind}", options)
    if len(paths) > 1 and kind in LIBRARIES:
        raise refused(paths[1], f"is a second {kind} data set, expected one.", "Append stores.")
    if len(paths) > 1 and kind == "npz":
        what = f"{len(paths)} {kind} files were given, expected one."
        raise SourceError(what, path=paths[1], next_step="Give them one by one, or append them.")
    module = import_module(f"headrace.store.sources.{opener.module}")
    given = paths[0] if kind in LIBRARIES else paths
    opened: Scan | Stream = getattr(module, opener.function)(given, options)
    return opened


RIEGELI_MAGIC = bytes.fromhex("83af70d10d884a3f0000000000000000 4000000000000000".replace(" ", ""))
"""How each Riegeli file begins: the header of its first block, and where its first chunk ends."""

_LMDB_MAGIC = bytes.fromhex("dec0efbe")  # behind the header of an LMDB's first page
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"

_TABLES: tuple[tuple[str, tuple[bytes, ...], tuple[str, ...]], ...] = (
    ("mds", (), (".mds",)),
    ("hdf5", (_HDF5_MAGIC,), (".h5", ".hdf5")),
    ("parquet", (b"PAR1", b"PARE"), (".parquet",)),
    ("arrow", (b"ARROW1",), (".arrow", ".feather", ".arrows", ".ipc")),
    ("array_record", (RIEGELI_MAGIC,), (".array_record", ".arrayrecord")),
)


def detect_file(path: str) -> str:
    """What a file is: a key of `_OPENERS`, `npy` or `npz`."""
    from headrace.store.sources.contents import format_of
    from headrace.store.sources.shards import read_head

    try:
        head = read_head(path, 1024)
    except OSError as e:
        if isinstance(e, VolumeError):
            raise
        raise unreadable(path, e, "Check the path.") from e
    name = (base_name(path) if is_url(path) else os.path.basename(path)).lower()
    kind = (
        _detect_array(head, name) or _detect_table(head, name) or _detect_tokens(path, head, name)
        # A file's own name counts before its content, so that a damaged tar is called that.
        or _BY_NAME.get(format_of(name)) or _detect_shard(head, name)
    )  # fmt: skip
    if kind is None:
        how = "Turn it into one of these, or pack it from an iterable."
        if format_of(name) == "text":
            how = "If each of its lines is a sample, say so: --as lines (in Python format='lines')."
        if name.endswith(".bin"):
            how = "If it holds tokens, say what they are: --as uint16 (in Python format='uint16')."
        raise refused(
            path, f"begins with {head[:16].hex(' ') or 'nothing'}, expected {_SUPPORTED}.",
            how,
        )  # fmt: skip
    return kind


_LITDATA_NAME = re.compile(r"chunk-\d+-\d+(\..*)?\.bin")
_BY_NAME = {kind: kind for kind in ("tar", "tfrecord", "jsonl")}


def _detect_tokens(path: str, head: bytes, name: str) -> str | None:
    """Files of tokens that say what they are."""
    from headrace.store.sources.tokens import MEGATRON_MAGIC, index_of_bin, is_llmc

    if head.startswith(MEGATRON_MAGIC):
        return "megatron"
    if not name.endswith(".bin") or is_url(path):
        return None
    if index_of_bin(path) is not None:
        return "megatron"
    if _LITDATA_NAME.fullmatch(name) and os.path.exists(
        os.path.join(os.path.dirname(path), "index.json")
    ):
        return "litdata"
    return "tokens" if is_llmc(head) else None


def _detect_array(head: bytes, name: str) -> str | None:
    if head[:6] == b"\x93NUMPY" or name.endswith(".npy"):
        return "npy"
    return "npz" if name.endswith(".npz") else None


def _detect_shard(head: bytes, name: str) -> str | None:
    from headrace.store.sources.shards import is_compressed
    from headrace.store.sources.tfrecord import looks_like_tfrecord

    if name.endswith((".csv", ".tsv")):
        return "manifest"
    if name.endswith(".json"):
        return "coco"
    if ".tar." in name:
        return "tar"
    if looks_like_tfrecord(head):
        return "tfrecord"
    packed = is_compressed(head) and name.endswith((".gz", ".bz2", ".xz", ".zst"))
    return "tar" if packed or head[257:262] == b"ustar" else None


def _detect_table(head: bytes, name: str) -> str | None:
    """Files of rows, by their magic; by name where it stands elsewhere or is damaged."""
    if head[257:262] == b"ustar":  # whatever its first member is
        return "tar"
    for kind, magics, endings in _TABLES:
        if head.startswith(magics) or name.endswith(endings):
            return kind
    if head[512:520] == _HDF5_MAGIC:
        return "hdf5"
    if head[16:20] == _LMDB_MAGIC:
        return "lmdb"
    # An Arrow stream begins with a message's frame: a flatbuffer of some size, whose root lies inside it.
    if len(head) < 16 or head[:4] != b"\xff\xff\xff\xff":
        return None
    size, root = (int.from_bytes(head[at : at + 4], "little", signed=at == 4) for at in (4, 8))
    return "arrow" if 8 <= size < 1 << 24 and size % 8 == 0 and root < size else None


_ITEM_KEYS = frozenset({"name", "data", "label", "columns"})
_EXPECTED = "bytes, (name, bytes), (name, bytes, label) or a dict with name, data, label, columns"


def stream_iterable(source: Iterable[Any] | Callable[[], Iterable[Any]]) -> Stream:
    """A stream over an iterable, or over what a function returns each time it is called."""
    from headrace.store.store import Store  # which imports sources

    # An open store would be packed as bytes alone, without names and labels.
    if not callable(source) and (not hasattr(source, "__iter__") or isinstance(source, Store)):
        raise SourceError(
            f"The source is {type(source).__name__}, expected a path or an iterable of samples.",
            next_step="Pass a folder, files, or an iterable of " + _EXPECTED + ".",
        )

    def items() -> Iterator[StreamItem]:
        for i, item in enumerate(source() if callable(source) else source):
            yield to_item(i, item)

    return Stream(items, {"kind": "iterable"})


def to_item(i: int, item: Any) -> StreamItem:
    """Sample `i` of an iterable."""
    number = b"%012d" % i
    if isinstance(item, (bytes, bytearray, memoryview)):
        return StreamItem(number, ((b"", _data(i, item)),))
    if isinstance(item, tuple) and len(item) in (2, 3):
        label = _label(i, item[2]) if len(item) == 3 else -1
        return StreamItem(_name(i, item[0]), _parts(i, item[1]), label)
    if isinstance(item, dict):
        unknown = sorted(str(k) for k in item if k not in _ITEM_KEYS)
        if unknown or "data" not in item:
            raise _bad(i, f"a dict with the keys {sorted(map(str, item))}")
        name = item.get("name")
        return StreamItem(
            number if name is None else _name(i, name),
            _parts(i, item["data"]),
            _label(i, item["label"]) if item.get("label") is not None else -1,
            _columns(i, item.get("columns") or {}),
        )
    raise _bad(i, type(item).__name__)


def _bad(i: int, given: str, expected: str = _EXPECTED) -> SourceError:
    return SourceError(
        f"Sample {i} is {given}, expected {expected}.", next_step="Change what the iterable yields."
    )


def _name(i: int, name: Any) -> bytes:
    if not isinstance(name, (str, bytes, os.PathLike)) or not os.fspath(name):
        raise _bad(i, f"named {name!r}", "a non-empty string or bytes as its name")
    return os.fsencode(name)


def _data(i: int, data: Any) -> memoryview:
    try:
        # A copy: the caller may reuse its buffer while we collect a batch.
        return memoryview(bytes(data) if not isinstance(data, bytes) else data)
    except TypeError:
        raise _bad(i, f"of {type(data).__name__}", "bytes as its data") from None


def _parts(i: int, data: Any) -> tuple[tuple[bytes, memoryview], ...]:
    if isinstance(data, dict):
        if not data:
            raise _bad(i, "without any part", "one part or more")
        return tuple(sorted((_name(i, k), _data(i, v)) for k, v in data.items()))
    if isinstance(data, (str, int)):
        raise _bad(i, f"of {type(data).__name__}", "bytes as its data")
    return ((b"", _data(i, data)),)


def _label(i: int, label: Any) -> int:
    try:
        value = operator.index(label)
    except TypeError:
        raise _bad(i, f"labelled {label!r}", "an integer of -1 or more") from None
    if not -1 <= value < 1 << 63:
        raise _bad(i, f"labelled {value}", "an integer from -1 to 2^63-1")
    return value


def _columns(i: int, columns: Any) -> dict[str, int | float]:
    out: dict[str, int | float] = {}
    for name, value in columns.items():
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, (int, float)):
            raise _bad(i, f"with {value!r} in column {name!r}", "a number")
        out[str(name)] = number
    return out
