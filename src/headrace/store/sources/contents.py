"""Contents: what a folder holds: samples, shards with many samples each, or another library's data set.

A folder of 50,000 pictures is 50,000 samples, and three tars are what lies in them; the chunks of a Zarr array
are neither. Who takes one for another trains on wrong samples without an error. So the ends of names decide,
and the files that libraries put beside their data; what these leave open is refused, with the words that decide
it (`format=`, `--as`).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.errors import SourceError
from headrace.store.sources.scan import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

_SUFFIXES: Final = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".jpe": "jpeg", ".jfif": "jpeg", ".png": "png", ".gif": "gif",
    ".webp": "webp", ".bmp": "bmp", ".tif": "tiff", ".tiff": "tiff", ".ppm": "ppm", ".pgm": "ppm",
    ".npy": "npy", ".npz": "npz",
    ".tar": "tar", ".tgz": "tar", ".tbz2": "tar", ".txz": "tar",
    ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".mds": "mds", ".array_record": "array_record",
    ".arrayrecord": "array_record", ".h5": "hdf5", ".hdf5": "hdf5",
    ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".wav": "audio", ".flac": "audio", ".mp3": "audio", ".ogg": "audio",
    ".mp4": "video", ".avi": "video", ".mkv": "video", ".webm": "video", ".mov": "video",
    ".pt": "torch", ".pth": "torch",
    **dict.fromkeys(
        (".txt", ".json", ".csv", ".tsv", ".xml", ".md", ".rst", ".yaml", ".yml", ".html", ".log"),
        "text",
    ),
}  # fmt: skip

SHARD_KINDS: Final = frozenset(
    {"tar", "tfrecord", "parquet", "arrow", "mds", "array_record", "hdf5", "jsonl"}
)
"""Files that hold many samples each."""

_IMAGES: Final = frozenset({"jpeg", "png", "gif", "webp", "bmp", "tiff", "ppm"})
_MEDIA: Final = ("image", "audio", "video")

_COMPANIONS: Final = re.compile(
    rb"(?i)readme(\..*)?|licen[cs]e(\..*)?|thumbs\.db|desktop\.ini|_success|"
    rb"_metadata|_common_metadata|"
    rb"(md5|sha1|sha256)sums?(\.txt)?|.*\.(md5|sha256|crc|lock|idx|index)"
)
"""Names of files that lie beside data and are none, whatever the data are."""

_OTHERS_MAX: Final = 0.1
"""Share of files that are no pictures in a folder of pictures; more leaves open what the samples are."""

_NOTES_MAX: Final = 1 / 3
"""The same for texts and tables; where each picture has a caption, they are half."""


def format_of(name: str) -> str:
    """By a name's end: `jpeg`, `tar`, ...; `bytes` where it says nothing."""
    lower = name.lower()
    base, dot, _ = lower.rpartition(".")
    compressed = dot and lower.endswith((".gz", ".bz2", ".xz", ".zst"))
    if compressed and base.endswith((".tar", ".jsonl", ".txt")):
        lower = base
    by_suffix = _SUFFIXES.get(lower[lower.rfind(".") :]) if "." in lower else None
    if by_suffix is None and ".tfrecord" in lower:  # train.tfrecord-00001-of-00100
        return "tfrecord"
    return by_suffix or "bytes"


_MAGICS: Final = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF87a", "gif"), (b"GIF89a", "gif"),
    (b"BM", "bmp"), (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"P6", "ppm"), (b"P5", "ppm"),
    (b"\x93NUMPY", "npy"), (b"PK\x03\x04", "npz"), (b"\x89HDF", "hdf5"), (b"PAR1", "parquet"),
)  # fmt: skip


def format_of_bytes(head: bytes) -> str:
    """By a file's or a sample's first 16 bytes; `bytes` where they say nothing."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _MAGICS if head.startswith(magic)), "bytes")


def family_of(name: str) -> str:
    """`image`, or the format itself."""
    return "image" if name in _IMAGES else name


def is_companion(name: bytes) -> bool:
    """Whether a file of this name lies beside data, whatever they are: a README, checksums, ..."""
    return _COMPANIONS.fullmatch(name) is not None


class FolderKind(NamedTuple):
    """What the files of a folder are."""

    kind: str  # one of `SHARD_KINDS`, or `lines` of texts, or `files`: each is a sample
    family: str | None = None
    """Of `files`: that samples have; others are left out; None: all are samples. Of `lines`: `text`."""

    def takes(self, format: str) -> bool:  # noqa: A002 - as everywhere
        """Whether files of this format are samples, or shards."""
        family = family_of(format)
        if self.kind == "files":
            return self.family in (None, family)
        return family == (self.family or self.kind)


def judge(path: str, formats: Mapping[str, float], wanted: str | None = None) -> FolderKind:
    """What files are, by how many have each format (companions not counted); `path` is for the error.

    `wanted` is the user's own word: `files`, a family, `npy` for rows, `lines`, or one of `SHARD_KINDS`.
    Raises SourceError if the files are of several kinds, or none is of the wanted one.
    """
    counts = Counter[str]()
    for name, count in formats.items():
        counts[family_of(name)] += count  # type: ignore[assignment]  # estimates are no integers
    if wanted == "files":
        return FolderKind("files")
    if wanted is not None:
        if wanted == "lines" and counts["text"]:
            return FolderKind("lines", "text")
        if counts and not counts[wanted]:
            raise refused(path, f"no file is {wanted}: {_shares(counts)}.", "Check --as.")
        many = wanted in SHARD_KINDS or wanted == "npy"
        return FolderKind(wanted) if many else FolderKind("files", wanted)
    shards = [kind for kind in SHARD_KINDS if counts[kind]]
    media = max(_MEDIA, key=lambda family: counts[family])
    notes, total = counts["text"], counts.total()
    if not shards and not counts[media]:
        return FolderKind("files")
    others = total - notes - counts[shards[0] if shards else media]
    if len(shards) == 1 and not others:
        return FolderKind(shards[0])
    few = others <= _OTHERS_MAX * total and notes <= _NOTES_MAX * total
    if shards or not few:
        ways = [*sorted(shards), *(family for family in _MEDIA if counts[family])]
        raise refused(
            path, f"holds files of several kinds ({_shares(counts)}): which are the samples?",
            f"Say it: --as {' or --as '.join([*ways, 'files'])} (in Python format=...; `files`: each file is "
            "a sample), or --ext jpg,png.",
        )  # fmt: skip
    return FolderKind("files", media)


def _shares(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,.0f} {_plural(kind)}" for kind, count in counts.most_common(6))


def _plural(kind: str) -> str:
    return {"image": "images", "text": "texts", "bytes": "others"}.get(kind, kind)


def sort_files(
    path: str, names: list[bytes], wanted: str | None
) -> tuple[FolderKind, set[bytes], list[str]]:
    """What the files below a folder are, which of them are no samples, and a line that says so.

    Raises SourceError if they are of several kinds, or of several splits of one data set.
    """
    if wanted == "files":
        return FolderKind("files"), set(), []
    others = [name for name in names if not is_companion(os.path.basename(name))]
    others = others or names  # a folder of nothing but READMEs is meant so
    verdict = judge(path, Counter(format_of(os.fsdecode(name)) for name in others), wanted)
    kept = [name for name in others if verdict.takes(format_of(os.fsdecode(name)))]
    if wanted is None and (verdict.family or verdict.kind != "files"):
        check_splits(path, verdict, kept)
    left = set(names).difference(kept)
    if not left:
        return verdict, left, []
    shown = ", ".join(os.fsdecode(name) for name in sorted(left)[:4])
    more = f" and {len(left) - 4:,} more" if len(left) > 4 else ""
    return verdict, left, [f"left out, as they are no samples: {shown}{more}"]


def labels_of(
    names: Sequence[bytes], notes: list[str]
) -> tuple[NDArray[np.int32] | None, tuple[bytes, ...] | None]:
    """ImageFolder's rule: if each file lies in a first-level folder, these are the classes, sorted.

    One file that lies in none takes all labels away: `notes` gets a line that says so.
    """
    folders = [name.partition(b"/") for name in names]
    loose = [name for name, slash, _ in folders if not slash]
    if loose:
        notes += no_labels(len(loose), loose[0]) if len(loose) < len(names) else ()
        return None, None
    classes = sorted({first for first, _, _ in folders})
    number = {name: i for i, name in enumerate(classes)}
    labels = np.fromiter((number[first] for first, _, _ in folders), np.int32, len(names))
    return labels, tuple(classes)


def no_labels(loose: int, first: bytes) -> list[str]:
    """The note that so many files lie beside folders, which thus are no classes."""
    lie, them = ("1 file lies", "it") if loose == 1 else (f"{loose:,} files lie", "them")
    what = f"no labels: {lie} in no class folder, the first is {os.fsdecode(first)}"
    return [f"{what} (leave {them} out, or put {them} into a folder)"]


_SPLITS: Final = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip
_WORDS: Final = re.compile(r"[^a-z]+")


def check_splits(path: str, verdict: FolderKind, names: Iterable[bytes]) -> None:
    """Who trains on the test set by mistake is not told by anybody.

    Raises SourceError if the names are those of several splits; says which one to name.
    """
    splits: dict[str, str] = {}
    for name in names:
        folder, _, base = os.fsdecode(name).lower().rpartition("/")
        first = folder.split("/")[0]
        words = [first] if verdict.kind == "files" else [first, *_WORDS.split(base)]
        split = next((_SPLITS[word] for word in words if word in _SPLITS), None)
        if split is None:
            return
        splits.setdefault(split, first if first in _SPLITS else f"*{split}*")
    if len(splits) > 1:
        example = os.path.join(path, splits.get("train", next(iter(splits.values()))))
        kind = verdict.family or verdict.kind
        raise refused(
            path, f"holds several splits of one data set ({', '.join(sorted(splits))}): which is meant?",
            f"Name one: '{example}'; or take all: --as {kind} (in Python format='{kind}').",
        )  # fmt: skip


# -- what libraries put beside their data ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LibraryFolder:
    """A data set that a library wrote as a folder."""

    kind: str
    """`zarr`, `lmdb`, `lance`, `mds`, `litdata`, `arrow`, `megatron`; `folder`: another one has it."""
    paths: list[str]  # its shards, or the folder itself


_JSON_BYTES_MAX: Final = 64 << 20

_REFUSED: Final = {
    "_delta_log": ("a Delta table", "Read it with its library, and pack the rows as an iterable."),
    "metadata/version-hint.text": (
        "an Iceberg table",
        "Read it with its library, and pack the rows as an iterable.",
    ),
    "dataset_meta.json": ("a Deep Lake data set", "Pack an iterable over it."),
    "__tiledb_group.tdb": ("a TileDB group", "Pack an iterable over it."),
    "__schema": ("a TileDB array", "Pack an iterable over it."),
}
"""A file or folder that tells, what it tells, and the way to read it."""


def library_folder(path: str) -> LibraryFolder | None:
    """What a library wrote, by the files that it puts beside its data; None: a folder of files.

    Raises SourceError if it cannot be read here; names it, and says what can be done.
    """

    def has(*names: str) -> bool:
        return all(os.path.lexists(os.path.join(path, name)) for name in names)

    for name, (what, how) in _REFUSED.items():
        if has(name):
            raise refused(path, f"is {what}, which is not read here.", how)
    for kind, names in _LIBRARIES:
        if has(*names):
            return LibraryFolder(kind, [path])
    if has("snapshots", "refs"):
        return _hub_snapshot(path)
    if has("dataset_dict.json"):
        raise _many_splits(path)
    if has("state.json", "dataset_info.json"):
        return LibraryFolder("arrow", _saved_files(path))
    return _by_index(path) if has("index.json") else _tokens(path)


_LIBRARIES: Final = (
    ("zarr", ("zarr.json",)), ("zarr", (".zarray",)), ("zarr", (".zgroup",)), ("lmdb", ("data.mdb",)),
    ("lance", ("_versions", "_transactions")), ("lance", ("_versions", "data")),
)  # fmt: skip


def _many_splits(path: str) -> SourceError:
    splits = _json(os.path.join(path, "dataset_dict.json")).get("splits")
    names = [str(split) for split in splits] if isinstance(splits, list) else []
    return refused(
        path, f"is a DatasetDict of Hugging Face's with the splits {', '.join(names) or 'none'}.",
        f"Name one: {os.path.join(path, (names or ['train'])[0])}",
    )  # fmt: skip


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as f:
            document = json.loads(f.read(_JSON_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as e:
        raise refused(path, f"cannot be read: {e}.", "Fetch the data set again.") from e
    if not isinstance(document, dict):
        raise refused(path, "is no JSON object.", "Fetch the data set again.")
    return document


def _named_files(path: str, where: str, names: Iterable[Any]) -> list[str]:
    """Files in the same folder that a description names."""
    files = []
    for name in names:
        if not isinstance(name, str) or not name or os.path.basename(name) != name or "\0" in name:
            raise refused(where, f"names {name!r}, expected a file beside it.", "Fetch it again.")
        files.append(os.path.join(path, name))
    return files


def _saved_files(path: str) -> list[str]:
    """The Arrow files of `Dataset.save_to_disk`, in order."""
    where = os.path.join(path, "state.json")
    state = _json(where)
    if state.get("_indices_data_files"):
        raise refused(
            path, "was saved with a selection of its rows beside the table.",
            "Save it again: load_from_disk(...).flatten_indices().save_to_disk(...).",
        )  # fmt: skip
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise refused(where, "names no data files.", "Save the data set again.")
    names = (entry.get("filename") if isinstance(entry, dict) else entry for entry in entries)
    return _named_files(path, where, names)


def _hub_snapshot(path: str) -> LibraryFolder:
    """A repository in the hub's cache: what its snapshot holds is a folder of its own."""
    snapshots = os.path.join(path, "snapshots")
    names = sorted(os.listdir(snapshots))
    try:
        with open(os.path.join(path, "refs", "main"), encoding="ascii") as f:
            main = f.read(256).strip()
    except (OSError, ValueError):
        main = names[0] if len(names) == 1 else ""
    if main not in names:
        raise refused(
            path, f"is a cache of the Hugging Face hub with {len(names)} snapshots.",
            f"Name one: {os.path.join(snapshots, (names or ['REVISION'])[0])}",
        )  # fmt: skip
    return LibraryFolder("folder", [os.path.join(snapshots, main)])


def _by_index(path: str) -> LibraryFolder | None:
    """MDS and LitData both call their description so, and so may a folder of other files."""
    try:
        index = _json(os.path.join(path, "index.json"))
    except SourceError:
        return None
    shards, chunks = index.get("shards"), index.get("chunks")
    if isinstance(shards, list) and any(
        isinstance(s, dict) and s.get("format") == "mds" for s in shards
    ):
        from headrace.store.sources.mds import list_mds_folder

        return LibraryFolder("mds", list_mds_folder(path))
    if isinstance(chunks, list) and isinstance(index.get("config"), dict):
        from headrace.store.sources.mds import list_litdata_folder

        return LibraryFolder("litdata", list_litdata_folder(path))
    return None


def _tokens(path: str) -> LibraryFolder | None:
    """Token files say nothing of themselves but by their names, or by an index beside them."""
    from headrace.store.sources.tokens import index_of_bin

    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries)[:10_000]
    files = {name for name in names if not name.startswith(".")}
    bare = {"train.bin", "val.bin", "test.bin"}
    if files & bare and files <= {*bare, "meta.pkl"}:
        example = os.path.join(path, min(files & bare))
        raise refused(
            path, "holds token files as nanoGPT writes them, which do not say what they hold.",
            f"Name one and what its tokens are: '{example}' --as uint16 (in Python format='uint16').",
        )  # fmt: skip
    pairs = [
        name for name in sorted(files)
        if name.endswith(".bin") and index_of_bin(os.path.join(path, name)) is not None
    ]  # fmt: skip
    if not pairs:
        return None
    others = files.difference(pairs, (f"{name[:-4]}.idx" for name in pairs))
    others = {name for name in others if not is_companion(os.fsencode(name))}
    if others:
        raise refused(
            path, f"holds Megatron's token files and others ({', '.join(sorted(others)[:4])}).",
            f"Name the token files: '{os.path.join(path, pairs[0])}'; or take each file as a sample: --as "
            "files (in Python format='files').",
        )  # fmt: skip
    check_splits(path, FolderKind("megatron"), map(os.fsencode, pairs))
    return LibraryFolder("megatron", [os.path.join(path, name) for name in pairs])
