"""Data: which of the files that a program read are its data set, which samples it read, and which it saved.

A program opens its own code, its libraries, settings and logs, too. The data set is the kind of file, by its
ending, that most visits and most bytes went to; a folder can be named instead. Programs that read tar or
TFRecord files from begin to end say nothing of the samples: the files' headers do, and nothing is unpacked; a
file that is gone, compressed or damaged has none.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.errors import HeadraceError
from headrace.insight.record.log import Flag
from headrace.store.sources.detect import open_source
from headrace.store.sources.scan import Scan, SourceOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from headrace.insight.record.log import Visit


def records_of(path: str) -> list[tuple[int, int]]:
    """(offset, bytes) of each sample in the order of the file; empty where it is no such file."""
    if not path.endswith(".tar") and ".tfrecord" not in os.path.basename(path):
        return []
    try:
        scan = open_source([path], SourceOptions(on_error="skip"))
    except (HeadraceError, OSError, ValueError):
        return []
    if not isinstance(scan, Scan):
        return []
    columns = scan.columns
    begins = columns.offset.astype(np.int64)
    ends = begins + columns.length.astype(np.int64)
    if columns.first_extent is not None:  # the parts of a sample stand side by side
        firsts = columns.first_extent[:-1].astype(np.int64)
        begins, ends = np.minimum.reduceat(begins, firsts), np.maximum.reduceat(ends, firsts)
    return sorted(zip(begins.tolist(), (ends - begins).tolist(), strict=True))


# -- saves -------------------------------------------------------------------------------------------

_SAVED_MODELS: Final = (
    ".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".h5", ".keras", ".npz", ".tmp",
)  # fmt: skip
_NO_MODELS: Final = (".log", ".csv", ".txt", ".json", ".jsonl", ".html", ".png", ".svg", ".pyc")
_BYTES_LEAST: Final = 16 << 10
_BYTES_OF_ANY: Final = 1 << 20
_APART_NS: Final = 200_000_000


@dataclass(frozen=True, slots=True)
class Saves:
    """Checkpoints.

    Attributes:
        nbytes: of one, the median.
        seconds: that one was written, the median.
        begin_ns: of each.
        synced: whether the program waited for the disk.
    """

    count: int
    nbytes: int
    seconds: float
    begin_ns: tuple[int, ...]
    synced: bool


def saves_of(visits: Iterable[Visit]) -> Saves | None:
    """The checkpoints among all that was written; None: there are none."""
    wrote = sorted((v for v in visits if _is_model(v)), key=lambda v: v.begin_ns)
    groups: list[list[Visit]] = []
    end_ns = 0
    for visit in wrote:
        again = bool(groups) and any(v.path == visit.path for v in groups[-1])
        if not groups or again or visit.begin_ns - end_ns >= _APART_NS:
            groups.append([])
            end_ns = 0
        groups[-1].append(visit)
        end_ns = max(end_ns, visit.end_ns)
    if not groups:
        return None
    begins = [group[0].begin_ns for group in groups]
    ends = [max(v.end_ns for v in group) for group in groups]
    sizes = [sum(v.written for v in group) for group in groups]
    return Saves(
        len(groups), int(np.median(sizes)), float(np.median(np.subtract(ends, begins))) / 1e9,
        tuple(begins), any(v.synced for v in wrote),
    )  # fmt: skip


def _is_model(visit: Visit) -> bool:
    path = visit.path.lower()
    if not visit.written or path.endswith(_NO_MODELS) or path.startswith(("/dev/", "/memfd:")):
        return False
    if "tfevents" in path:
        return False
    return visit.written >= (_BYTES_LEAST if path.endswith(_SAVED_MODELS) else _BYTES_OF_ANY)


# -- data --------------------------------------------------------------------------------------------

_SYSTEM: Final = (
    b"/memfd:",
    *(
        os.fsencode(f"/{name}/")
        for name in (
            "proc", "sys", "dev", "etc", "lib", "lib64", "bin", "sbin", "usr/lib", "usr/lib64", "usr/bin",
            "usr/include", "usr/libexec", "usr/local/lib", "usr/share/zoneinfo", "usr/share/locale",
            "usr/share/misc", "usr/share/mime", "usr/share/fonts", "var/lib", "var/cache", "run", "snap",
        )
    ),
)  # fmt: skip
_CODE: Final = re.compile(
    rb"/(?:site-packages|dist-packages|__pycache__|python3\.\d+|\.git|\.venv)/"
    rb"|\.(?:py|pyc|pyi|pyx|pth|so|sh|ipynb)$|\.so\.[\d.]+$|/pyvenv\.cfg$"
)
_ASIDE: Final = frozenset({".json", ".jsonl", ".yaml", ".yml", ".txt", ".csv", ".tsv", ".xml"})
"""Beside a data set rather than of it, where there is anything else."""
_IMAGES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
_MODELS: Final = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".distcp"})
_EVALUATION: Final = frozenset({"val", "valid", "validation", "eval", "test", "dev"})
_RANGES_OF_ONE: Final = 8
"""Jumps within one visit of a sample: headers, directories at the end."""
_SHARD_BYTES_LEAST: Final = 1 << 20


READ: Final = np.dtype(
    [
        ("file", "<i8"), ("offset", "<i8"), ("nbytes", "<i8"), ("process", "<i8"), ("thread", "<i8"),
        ("begin_ns", "<i8"), ("end_ns", "<i8"), ("open_s", "<f4"), ("read_s", "<f4"), ("sample", "<i8"),
    ]
)  # fmt: skip
"""A read of a sample: from the open, or the first byte's read where the file was open, to the last byte's."""


@dataclass(frozen=True, kw_only=True)
class SampleReads:
    """All reads of samples.

    Attributes:
        names: of the files, relative to it.
        sample_file: int64 (samples,): an index of `names`, as for the next two.
        rows: dtype `READ`, in the order of their begin.
        mapped: whether they were (also) mapped: what was touched is not known then.
    """

    root: str
    names: list[str]
    file_bytes: NDArray[np.int64]
    sample_file: NDArray[np.int64]
    sample_offset: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]
    rows: NDArray[np.void]
    mapped: bool
    direct: bool


def data_visits(
    visits: Iterable[Visit], roots: Sequence[str], cwd: str, *, unread: bool = False
) -> list[Visit]:
    """The visits of the data set; `unread`: those without a read count, as a ring's reads are not calls."""
    wanted = tuple(os.path.realpath(root).rstrip("/") + "/" for root in roots)
    kept: list[Visit] = []
    for visit in visits:
        path = visit.path = os.path.normpath(os.path.join(cwd, visit.path))
        if visit.for_writing or not (visit.ranges or visit.mapped or unread):
            continue
        if wanted:
            if os.path.realpath(path).startswith(wanted):
                kept.append(visit)
        elif is_data(os.fsencode(path)):
            kept.append(visit)
    if wanted:
        return [visit for visit in kept if _kind(visit.path) not in _ASIDE] or kept
    return _largest_kind(kept)


def is_system(path: bytes) -> bool:
    """Whether a file belongs to the system."""
    return path.startswith(_SYSTEM)


def is_data(path: bytes) -> bool:
    """Whether a file may be data: it is neither code nor the system's."""
    return not is_system(path) and _CODE.search(path) is None


def is_evaluation(name: str) -> bool:
    """Whether a file is of evaluation, by the folders that it lies in."""
    return any(part.lower() in _EVALUATION for part in name.split("/")[:-1])


def _kind(path: str) -> str:
    """The ending; images of all kinds are one."""
    ending = os.path.splitext(path)[1].lower()
    return ".jpg" if ending in _IMAGES else ending


def _largest_kind(visits: list[Visit]) -> list[Visit]:
    by_kind: dict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        by_kind[_kind(visit.path)].append(visit)
    if not by_kind:
        return []
    nbytes = {kind: sum(_bytes(v) for v in some) for kind, some in by_kind.items()}
    all_bytes, all_visits = max(1, sum(nbytes.values())), len(visits)

    def weight(kind: str) -> float:
        share = len(by_kind[kind]) / all_visits + nbytes[kind] / all_bytes
        return share / 4 if kind in _MODELS else share  # a model that is loaded is no data set

    return by_kind[max(by_kind, key=weight)]


def _bytes(visit: Visit) -> int:
    return sum(r.end - r.start for r in visit.ranges) or visit.mapped or visit.size


def reads_of(visits: list[Visit]) -> SampleReads:
    """The reads of samples that visits of a data set, at least one, are."""
    root = os.path.commonpath([os.path.dirname(visit.path) for visit in visits])
    sizes: dict[str, int] = {}
    listed: list[_Row] = []
    shards: dict[str, list[tuple[int, int]]] = {}
    for visit in visits:
        end = max((r.end for r in visit.ranges), default=0)
        sizes[visit.path] = max(sizes.get(visit.path, 0), visit.size, end)
        listed += _rows(visit, shards)
    numbers = {path: number for number, path in enumerate(sizes)}
    rows = np.array([(numbers[path], *row, 0) for path, *row in listed], READ)
    places, rows["sample"] = np.unique(rows[["file", "offset"]], return_inverse=True)
    sample_bytes = np.zeros(len(places), np.int64)
    np.maximum.at(sample_bytes, rows["sample"], rows["nbytes"])
    return SampleReads(
        root=root, names=[os.path.relpath(path, root) for path in sizes],
        file_bytes=np.array(list(sizes.values()), np.int64), sample_file=places["file"],
        sample_offset=places["offset"], sample_bytes=sample_bytes, rows=_joined(rows),
        mapped=any(v.mapped for v in visits), direct=any(v.flags & Flag.DIRECT for v in visits),
    )  # fmt: skip


def _joined(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Without repeats: a sample that a process reads twice in a row (its header first) is read once."""
    rows = rows[np.lexsort((rows["begin_ns"], rows["process"]))]
    another = np.diff(rows["process"]) | np.diff(rows["sample"])
    firsts = np.flatnonzero(np.concatenate([[1], another]))
    joined = rows[firsts]
    joined["end_ns"] = np.maximum.reduceat(rows["end_ns"], firsts)
    for name in ("open_s", "read_s"):
        joined[name] = np.add.reduceat(rows[name], firsts)
    return joined[np.argsort(joined["begin_ns"], kind="stable")]


_Row = tuple[str, int, int, int, int, int, int, float, float]
"""(path, offset, bytes, process, thread, begin, end, open_s, read_s)."""


def _rows(visit: Visit, shards: dict[str, list[tuple[int, int]]]) -> list[_Row]:
    """The reads of samples that a visit is; `shards`: those that were looked into."""
    path, process, ranges = visit.path, visit.process, visit.ranges
    if not ranges:
        nbytes, times = visit.mapped or visit.size, (visit.begin_ns, visit.end_ns)
        return [(path, 0, nbytes, process, process, *times, visit.open_s, 0.0)]
    covered = reached = 0  # bytes of the visit, each counted once
    for start, end in sorted((r.start, r.end) for r in ranges):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    if len(ranges) == 1 and covered >= _SHARD_BYTES_LEAST:
        if path not in shards:
            shards[path] = records_of(path)
        if len(shards[path]) > 1:
            return _of_shard(visit, shards[path])
    if len(ranges) <= _RANGES_OF_ONE:
        whole = covered >= 0.9 * visit.size
        start = 0 if whole else min(r.start for r in ranges)
        nbytes = visit.size if whole else covered
        nbytes = max(0, min(nbytes, max(visit.size, covered) - start))
        times = visit.begin_ns, max(r.end_ns for r in ranges)
        return [
            (path, start, nbytes, process, ranges[0].thread, *times, visit.open_s, visit.read_s)
        ]
    return [
        (path, r.start, r.end - r.start, process, r.thread, r.begin_ns, r.end_ns, 0.0, r.seconds)
        for r in ranges
    ]


def _of_shard(visit: Visit, records: list[tuple[int, int]]) -> list[_Row]:
    """A shard that was read through: its records, at about the time that they were passed."""
    whole = visit.ranges[0]
    span, ns = max(1, whole.end - whole.start), whole.end_ns - whole.begin_ns
    rows: list[_Row] = []
    for offset, nbytes in records:
        if offset + nbytes > whole.end:
            break
        begin = whole.begin_ns + ns * (offset - whole.start) // span
        end = whole.begin_ns + ns * (offset + nbytes - whole.start) // span
        seconds, open_s = whole.seconds * nbytes / span, 0.0 if rows else visit.open_s
        rows.append(
            (visit.path, offset, nbytes, visit.process, whole.thread, begin, end, open_s, seconds)
        )
    return rows
