"""Data: which of the files that a program read are its data set, which samples it read, and which it saved.

A program opens its own code, its libraries, settings and logs, too. The data set is the kind of file, by its
ending, that most visits and most bytes went to; a folder can be named instead. Programs that read tar or
TFRecord files from begin to end say nothing of the samples: the files' headers do, and nothing is unpacked; a
file that is gone, compressed or damaged has none.
"""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from headrace.insight.record.log import Visit

_RECORDS_MAX: Final = 1_000_000


def records_of(path: str, size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of each sample in the order of the file; empty where it is no such file."""
    try:
        if path.endswith(".tar"):
            return _of_tar(path)
        if ".tfrecord" in os.path.basename(path):
            return _of_tfrecord(path, size)
    except (OSError, tarfile.TarError, ValueError, EOFError):
        pass
    return []


def _of_tar(path: str) -> list[tuple[int, int]]:
    """WebDataset's rule: members that share a name up to its first dot are one sample."""
    extents: list[tuple[int, int]] = []
    last = None
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, name = os.path.split(member.name)
            key = os.path.join(folder, name.split(".", 1)[0])
            end = member.offset_data + member.size
            if key == last:
                extents[-1] = (extents[-1][0], end - extents[-1][0])
            elif len(extents) == _RECORDS_MAX:
                break
            else:
                extents.append((member.offset, end - member.offset))
            last = key
    return extents


def _of_tfrecord(path: str, size: int) -> list[tuple[int, int]]:
    extents: list[tuple[int, int]] = []
    with open(path, "rb", buffering=0) as f:
        at = 0
        while at + 16 <= size and len(extents) < _RECORDS_MAX:
            (length,) = struct.unpack("<Q", os.pread(f.fileno(), 12, at)[:8])
            nbytes = length + 16
            if nbytes > size - at:
                return []
            extents.append((at, nbytes))
            at += nbytes
    return extents


# -- saves -------------------------------------------------------------------------------------------

_SAVED_MODELS: Final = (
    ".pt",
    ".pth",
    ".ckpt",
    ".safetensors",
    ".distcp",
    ".h5",
    ".keras",
    ".npz",
    ".tmp",
)
_NO_MODELS: Final = (".log", ".csv", ".txt", ".json", ".jsonl", ".html", ".png", ".svg", ".pyc")
_BYTES_LEAST: Final = 16 << 10
_BYTES_OF_ANY: Final = 1 << 20
_APART_NS: Final = 200_000_000


@dataclass(frozen=True, slots=True)
class Saves:
    """Checkpoints.

    Attributes:
        count: of them.
        nbytes: of one, the median.
        files: of one, the median.
        seconds: that one was written, the median.
        begin_ns: of each.
        synced: whether the program waited for the disk.
        folder: of the first.
    """

    count: int
    nbytes: int
    files: int
    seconds: float
    begin_ns: tuple[int, ...]
    synced: bool
    folder: str


def saves_of(visits: Iterable[Visit]) -> Saves | None:
    """The checkpoints among all that was written; None: there are none."""
    wrote = sorted((v for v in visits if _is_model(v)), key=lambda v: v.begin_ns)
    groups: list[list[Visit]] = []
    for visit in wrote:
        end = max((v.end_ns for v in groups[-1]), default=0) if groups else 0
        again = bool(groups) and any(v.path == visit.path for v in groups[-1])
        if groups and not again and visit.begin_ns - end < _APART_NS:
            groups[-1].append(visit)
        else:
            groups.append([visit])
    if not groups:
        return None
    sizes = [sum(v.written for v in group) for group in groups]
    seconds = [
        (max(v.end_ns for v in group) - min(v.begin_ns for v in group)) / 1e9 for group in groups
    ]
    return Saves(
        len(groups), int(np.median(sizes)), int(np.median([len(g) for g in groups])),
        float(np.median(seconds)), tuple(min(v.begin_ns for v in g) for g in groups),
        any(v.synced for v in wrote), os.path.dirname(groups[0][0].path),
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
    "/usr/", "/lib/", "/lib64/", "/bin/", "/sbin/", "/etc/", "/proc/", "/sys/", "/dev/", "/opt/", "/snap/",
    "/memfd:", "/var/lib/", "/var/cache/",
)  # fmt: skip
_CODE: Final = frozenset(
    {
        ".py", ".pyc", ".pyi", ".so", ".pth", ".egg-link", ".dist-info", ".conf", ".cfg", ".ini",
        ".toml", ".md", ".sh", ".h", ".cu", ".lock", ".log", ".typed",
    }
)  # fmt: skip
_CODE_FOLDERS: Final = ("/site-packages/", "/dist-packages/", "/__pycache__/", "/.git/", "/.cache/")
_ASIDE: Final = frozenset({".json", ".jsonl", ".yaml", ".yml", ".txt", ".csv", ".tsv", ".xml"})
"""Beside a data set rather than of it, where there is anything else."""
_IMAGES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
_MODELS: Final = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".distcp"})
_EVALUATION: Final = frozenset({"val", "valid", "validation", "eval", "test", "dev"})
_RANGES_OF_ONE: Final = 8
"""Jumps within one visit of a sample: headers, directories at the end."""
_SHARD_BYTES_LEAST: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SampleReads:
    """All reads of samples, in the order of their begin.

    Attributes:
        root: the folder of all files.
        names: of the files, relative to it.
        sample: int64 (reads,): index of `sample_file` and its like.
        process: int64 (reads,).
        thread: int64 (reads,).
        begin_ns: int64 (reads,): of the open, or of the first byte's read where the file was open.
        end_ns: int64 (reads,): of the last byte's read.
        open_s: float32 (reads,): 0 where the file was open.
        read_s: float32 (reads,): within the calls.
        requests: float64: calls that brought the bytes of a sample, on average.
        mapped: whether they were (also) mapped: what was touched is not known then.
    """

    root: str
    names: list[str]
    file_bytes: NDArray[np.int64]
    sample_file: NDArray[np.int64]
    sample_offset: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]
    sample: NDArray[np.int64]
    process: NDArray[np.int64]
    thread: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    open_s: NDArray[np.float32]
    read_s: NDArray[np.float32]
    requests: float
    mapped: bool
    direct: bool
    left_out: dict[str, int]
    """Files of other kinds that were read: by ending, visits."""

    @property
    def count(self) -> int:
        """Of reads."""
        return len(self.sample)


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
        elif not _is_of_the_program(path):
            kept.append(visit)
    return _without_asides(kept) if wanted else _largest_kind(kept)


def is_evaluation(name: str) -> bool:
    """Whether a file is of evaluation, by the folders that it lies in."""
    return any(part.lower() in _EVALUATION for part in name.split("/")[:-1])


def _is_of_the_program(path: str) -> bool:
    ending = os.path.splitext(path)[1].lower()
    if ending in _CODE or any(folder in path for folder in _CODE_FOLDERS):
        return True
    own = (sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"])
    return path.startswith(_SYSTEM) or any(path.startswith(p + "/") for p in own if p != "/")


def _kind(path: str) -> str:
    """The ending; images of all kinds are one."""
    ending = os.path.splitext(path)[1].lower()
    return ".jpg" if ending in _IMAGES else ending


def _without_asides(visits: list[Visit]) -> list[Visit]:
    return [visit for visit in visits if _kind(visit.path) not in _ASIDE] or visits


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


class _Samples:
    """Samples by where they lie, numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {}
        self.file: list[int] = []
        self.offset: list[int] = []
        self.nbytes: list[int] = []

    def number(self, file: int, offset: int, nbytes: int) -> int:
        found = self.numbers.setdefault((file, offset), len(self.file))
        if found == len(self.file):
            self.file.append(file)
            self.offset.append(offset)
            self.nbytes.append(nbytes)
        else:
            self.nbytes[found] = max(self.nbytes[found], nbytes)
        return found


def reads_of(visits: list[Visit], left_out: dict[str, int]) -> SampleReads:
    """The reads of samples that visits of a data set are."""
    root = os.path.commonpath([os.path.dirname(visit.path) for visit in visits])
    files: dict[str, int] = {}
    sizes: list[int] = []
    samples, rows = _Samples(), []
    requests = 0
    shards: dict[str, list[tuple[int, int]]] = {}
    for visit in visits:
        name = os.path.relpath(visit.path, root)
        file = files.setdefault(name, len(files))
        if file == len(sizes):
            sizes.append(0)
        end = max((r.end for r in visit.ranges), default=0)
        sizes[file] = max(sizes[file], visit.size, end)
        requests += sum(r.reads for r in visit.ranges)
        rows.extend(_rows(visit, file, samples, shards))
    rows = _joined(sorted(rows, key=lambda row: row[3]))
    table = np.array([row[:5] for row in rows], np.int64).reshape(-1, 5)
    times = np.array([row[5:] for row in rows], np.float32).reshape(-1, 2)
    return SampleReads(
        root=root, names=list(files), file_bytes=np.array(sizes, np.int64),
        sample_file=np.array(samples.file, np.int64), sample_offset=np.array(samples.offset, np.int64),
        sample_bytes=np.array(samples.nbytes, np.int64),
        sample=table[:, 0], process=table[:, 1], thread=table[:, 2], begin_ns=table[:, 3],
        end_ns=table[:, 4], open_s=times[:, 0], read_s=times[:, 1],
        requests=requests / max(1, len(rows)), mapped=any(v.mapped for v in visits),
        direct=any(v.flags & 8 for v in visits), left_out=left_out,
    )  # fmt: skip


_Row = tuple[int, int, int, int, int, float, float]


def _joined(rows: list[_Row]) -> list[_Row]:
    """Without repeats: a sample that a process reads twice in a row (its header first) is read once."""
    found: list[_Row] = []
    last: dict[int, int] = {}
    for row in rows:
        at = last.get(row[1])
        if at is not None and found[at][0] == row[0]:
            one = found[at]
            found[at] = (*one[:4], max(one[4], row[4]), one[5] + row[5], one[6] + row[6])
        else:
            last[row[1]] = len(found)
            found.append(row)
    return found


def _rows(
    visit: Visit, file: int, samples: _Samples, shards: dict[str, list[tuple[int, int]]]
) -> list[_Row]:
    """(sample, process, thread, begin, end, open_s, read_s) of a visit."""
    if not visit.ranges:
        number = samples.number(file, 0, visit.mapped or visit.size)
        begin, end = visit.begin_ns, visit.end_ns
        return [(number, visit.process, visit.process, begin, end, visit.open_s, 0.0)]
    covered = _covered(visit)
    thread = visit.ranges[0].thread
    if len(visit.ranges) == 1 and covered >= _SHARD_BYTES_LEAST:
        if visit.path not in shards:
            shards[visit.path] = records_of(visit.path, visit.size)
        if len(shards[visit.path]) > 1:
            return _of_shard(visit, file, samples, shards[visit.path])
    if len(visit.ranges) <= _RANGES_OF_ONE:
        start = 0 if covered >= 0.9 * visit.size else min(r.start for r in visit.ranges)
        nbytes = visit.size if covered >= 0.9 * visit.size else covered
        number = samples.number(file, start, max(0, min(nbytes, max(visit.size, covered) - start)))
        end = max(r.end_ns for r in visit.ranges)
        return [(number, visit.process, thread, visit.begin_ns, end, visit.open_s, visit.read_s)]
    return [
        (
            samples.number(file, r.start, r.end - r.start), visit.process, r.thread, r.begin_ns,
            r.end_ns, 0.0, r.seconds,
        )
        for r in visit.ranges
    ]  # fmt: skip


def _covered(visit: Visit) -> int:
    """Bytes of a visit, each counted once."""
    total, reached = 0, 0
    for start, end in sorted((r.start, r.end) for r in visit.ranges):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _of_shard(
    visit: Visit, file: int, samples: _Samples, records: list[tuple[int, int]]
) -> list[_Row]:
    """A shard that was read through: its records, at about the time that they were passed."""
    whole = visit.ranges[0]
    span, ns = max(1, whole.end - whole.start), whole.end_ns - whole.begin_ns
    rows: list[_Row] = []
    for offset, nbytes in records:
        if offset + nbytes > whole.end:
            break
        begin = whole.begin_ns + ns * (offset - whole.start) // span
        end = whole.begin_ns + ns * (offset + nbytes - whole.start) // span
        seconds = whole.seconds * nbytes / span
        number = samples.number(file, offset, nbytes)
        open_s = 0.0 if rows else visit.open_s
        rows.append((number, visit.process, whole.thread, begin, end, open_s, seconds))
    return rows
