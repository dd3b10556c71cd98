"""Job: what a record says about a training job: its data set, its samples, its epochs and their order. Pure.

A program opens its own code, its libraries, settings and logs, too. The data set is the kind of file, by its
ending, that most reads and most bytes went to; a folder can be named instead. Programs that read tar or
TFRecord files from begin to end say nothing of the samples: the files' headers do, and nothing is unpacked; a
file that is gone, compressed or damaged has none. How sure all that is, is said with it.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from headrace.errors import HeadraceError, RecordError
from headrace.insight.record.log import Flag
from headrace.insight.record.rhythm import rhythm_of, trainers_of, with_reads
from headrace.store.sources.contents import format_of, format_of_bytes
from headrace.store.sources.detect import open_source
from headrace.store.sources.scan import Scan, SourceOptions
from headrace.trace.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.insight.record.log import ProcessLog, Visit
    from headrace.insight.record.rhythm import Rhythm


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
    """Checkpoints."""

    count: int
    nbytes: int  # of one, the median
    seconds: float  # that one was written, the median
    begin_ns: tuple[int, ...]  # of each
    synced: bool  # whether the program waited for the disk


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
_RANGES_OF_ONE: Final = 8  # jumps within one visit of a sample: headers, directories at the end
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
    """All reads of samples."""

    root: str
    names: list[str]  # of the files, relative to it
    file_bytes: NDArray[np.int64]
    sample_file: NDArray[np.int64]  # int64 (samples,): an index of `names`, as for the next two
    sample_offset: NDArray[np.int64]
    sample_bytes: NDArray[np.int64]
    rows: NDArray[np.void]  # dtype `READ`, in the order of their begin
    mapped: bool  # whether they were (also) mapped: what was touched is not known then
    direct: bool
    timed: bool
    """Whether it is known when each began and ended; `opens_timed`: and how long its open took."""
    opens_timed: bool


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
        if os.path.realpath(path).startswith(wanted) if wanted else is_data(os.fsencode(path)):
            kept.append(visit)
    if unread:  # where reads of a file were seen, an open without one was a look
        seen = {visit.path for visit in kept if visit.ranges or visit.mapped}
        kept = [v for v in kept if v.ranges or v.mapped or v.path not in seen]
    if wanted:
        data = [visit for visit in kept if _kind(visit.path) not in _ASIDE]
        most = 2 * sum(map(_bytes, data)) >= sum(map(_bytes, kept))
        return (
            data if data and most else _largest_kind(kept)
        )  # lines of text, and their index beside them
    return _largest_kind(kept)


def is_system(path: bytes) -> bool:
    """Whether a file belongs to the system."""
    return path.startswith(_SYSTEM)


def is_data(path: bytes) -> bool:
    """Whether a file may be data: it is neither code nor the system's."""
    return not is_system(path) and _CODE.search(path) is None


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
    reads = {kind: sum(max(1, len(v.ranges)) for v in some) for kind, some in by_kind.items()}
    all_bytes, all_reads = max(1, sum(nbytes.values())), sum(reads.values())

    def weight(kind: str) -> float:
        share = reads[kind] / all_reads + nbytes[kind] / all_bytes
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
        timed=not any(v.flags & Flag.UNTIMED for v in visits),
        opens_timed=not any(v.flags & (Flag.UNTIMED | Flag.OPEN_UNTIMED) for v in visits),
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
        took = visit.begin_ns, max(r.end_ns for r in ranges), visit.open_s, visit.read_s
        return [(path, start, nbytes, process, ranges[0].thread, *took)]
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
        times = begin, end, 0.0 if rows else visit.open_s, whole.seconds * nbytes / span
        rows.append((visit.path, offset, nbytes, visit.process, whole.thread, *times))
    return rows


_SEQUENTIAL: Final = 0.9
_IN_SHARDS: Final = 0.8


class OrderStatistics(NamedTuple):
    """What an order looks like."""

    shuffle: Literal["samples", "files", "none"]  # what DLIO would call it
    correlation: float
    """Of place in the epoch and place in name order (Spearman's), over the first epoch."""
    same_each_epoch: bool | None  # None: there is one epoch only


def epochs_of(rows: NDArray[np.void], trainer_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """The epoch of each read, from 0, int64 (reads,).

    A training process that meets a sample again is in its next one.
    """
    epoch_of = np.zeros(len(rows), np.int64)
    for trainer in np.unique(trainer_of).tolist():
        epoch, seen = 0, set[int]()
        for at in np.flatnonzero(trainer_of == trainer).tolist():
            sample = int(rows["sample"][at])
            if sample in seen:
                epoch += 1
                seen.clear()
            seen.add(sample)
            epoch_of[at] = epoch
    return epoch_of


def batched(rows: NDArray[np.void], batch: int) -> NDArray[np.void]:
    """An epoch's reads with those of a batch together: workers read several batches at a time."""
    parts: list[NDArray[np.void]] = []
    for process in np.unique(rows["process"]).tolist():
        mine = rows[rows["process"] == process]
        parts += [mine[at : at + batch] for at in range(0, len(mine), batch)]
    parts.sort(key=lambda part: int(part["begin_ns"][0]))
    return np.concatenate(parts) if parts else rows


def statistics_of(recorded: Recorded) -> OrderStatistics:
    """The statistics of a record's order."""
    order, starts = recorded.order, recorded.epoch_starts
    first = _places(recorded)[order[: starts[1]]]
    correlation = _correlation(np.arange(len(first)), first)
    in_name_order = float((np.diff(first) == 1).mean()) if len(first) > 1 else 1.0
    shuffle: Literal["samples", "files", "none"] = "samples"
    if correlation >= _SEQUENTIAL:
        shuffle = "none"
    elif in_name_order >= _IN_SHARDS and len(recorded.names) < len(recorded.sample_file):
        shuffle = "files"
    same = None
    if len(starts) >= 3:
        one, two = order[: starts[1]], order[starts[1] : starts[2]]
        both = np.intersect1d(one, two)
        at = np.zeros((2, int(order.max()) + 1), np.int64)
        at[0, one], at[1, two] = np.arange(len(one)), np.arange(len(two))
        same = len(both) > 1 and _correlation(at[0, both], at[1, both]) >= _SEQUENTIAL
    return OrderStatistics(shuffle, correlation, same)


def _places(recorded: Recorded) -> NDArray[np.int64]:
    """Each sample's place in the order of names and offsets."""
    rank = np.argsort(np.argsort(np.array(recorded.names, dtype=object), kind="stable"))
    order = np.lexsort((recorded.sample_offset, rank[recorded.sample_file]))
    place: NDArray[np.int64] = np.argsort(order)
    return place


def _correlation(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Spearman's: of ranks."""
    if len(a) < 2:
        return 1.0
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


# -- job ---------------------------------------------------------------------------------------------

_FORMATS: Final = frozenset({"jpeg", "png", "npz", "npy", "hdf5", "parquet", "tfrecord"})
"""That DLIO calls as we do; csv besides."""
_FRAMEWORKS: Final = (("pytorch", "/torch/"), ("tensorflow", "/tensorflow/"), ("jax", "/jax/"))
_COVERS_LEAST: Final = 0.3
_LONG: Final = 20.0
"""Steps so much longer than the median are not computing: something else went on."""


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """A recorded job."""

    command: tuple[str, ...]
    root: str
    recorded: Recorded
    format: str  # DLIO's name for them
    format_by: str  # ending, magic or a guess
    framework: str
    rhythm: Rhythm
    statistics: OrderStatistics
    saves: Saves | None
    direct: bool  # whether files were read past the page cache
    wall_s: float
    overhead_s: float  # what recording cost, over all processes
    calls: int
    lost: int  # calls that were not kept
    blind: int  # programs that could not be seen
    notes: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    tracer: str = "headrace"  # who recorded it: headrace, DFTracer or Darshan


def job_of(
    logs: Sequence[ProcessLog], *, command: Sequence[str], cwd: str, roots: Sequence[str] = (),
    processors: int = 1, wall_s: float = 0.0, exact: Rhythm | None = None
) -> RecordedJob:  # fmt: skip
    """What logs say of a job; without roots the data set is found, without `exact` the steps are inferred.

    0 processors are not known: as many as there are processes.

    Raises RecordError if nothing that could be a data set was read.
    """
    # Of a process that became another program, the part that did most.
    by_process = {log.process: log for log in sorted(logs, key=lambda log: log.calls)}
    visits = [visit for log in logs for visit in log.visits]
    data = data_visits(visits, roots, cwd, unread=exact is not None and exact.source == "trace")
    if not data:
        raise _nothing(logs, roots)
    kept = set(map(id, data))
    left_out = (v.path for v in visits if id(v) not in kept and v.ranges)
    others = Counter(os.path.splitext(path)[1] or "(none)" for path in left_out)
    reads = reads_of(data)
    rows = reads.rows
    trainer = trainers_of(by_process, rows, exact.trained if exact else frozenset())
    notes: list[str] = []
    if any(not (visit.ranges or visit.mapped) for visit in data):
        why = "headrace reads through rings of the kernel"
        notes.append(f"not all reads were seen ({why}): files that were opened count as read")
    folders = [map(str.lower, name.split("/")[:-1]) for name in reads.names]
    is_valid = np.array([not _EVALUATION.isdisjoint(parts) for parts in folders], bool)
    is_valid &= not is_valid.all()  # evaluation alone is the job's data
    train = np.flatnonzero(~is_valid[rows["file"]])
    epoch_of = np.full(len(rows), -1, np.int64)
    epoch_of[train] = epochs_of(rows[train], trainer[train])
    epochs = int(epoch_of.max(initial=0)) + 1
    samples = len(np.unique(rows["sample"][train]))
    if epochs > 3 and len(train) / epochs < _COVERS_LEAST * samples:
        notes.append("samples come again before others have come: it is one long epoch here")
        epoch_of[train], epochs = 0, 1
    trained_reads = rows[train], trainer[train], epoch_of[train]
    if exact is not None:
        rhythm = with_reads(exact, by_process, *trained_reads)
    else:
        rhythm = rhythm_of(by_process, *trained_reads)
    rhythm = _usual(rhythm, timed=reads.timed)
    batch = max(1, rhythm.batch)
    parts = [batched(rows[epoch_of == epoch], batch) for epoch in range(epochs)]
    trained = np.concatenate(parts)
    begin_s = (trained["begin_ns"] - trained["begin_ns"].min()) / 1e9
    evaluated = is_valid[rows["file"]]
    valid = rows[evaluated]
    turns = epochs_of(valid, trainer[evaluated])
    recorded = Recorded(
        names=reads.names, file_bytes=reads.file_bytes, file_split=is_valid.astype(np.uint8),
        sample_file=reads.sample_file, sample_offset=reads.sample_offset,
        sample_bytes=np.minimum(
            reads.sample_bytes, reads.file_bytes[reads.sample_file] - reads.sample_offset
        ),
        order=trained["sample"], epoch_starts=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        valid_order=valid["sample"][np.argsort(turns, kind="stable")],
        valid_starts=np.concatenate([[0], np.cumsum(np.bincount(turns))]).astype(np.int64),
        open_s=trained["open_s"][: len(trained) * reads.opens_timed],
        read_s=trained["read_s"][: len(trained) * reads.timed],
        begin_s=begin_s[: len(trained) * reads.timed],
        processors=processors or rhythm.ranks * (1 + rhythm.workers),
        traced=int(rhythm.source == "trace"),
        **rhythm.step_figures | ({"batch": 0} if rhythm.source == "none" else {}),
    )  # fmt: skip
    paths = [*(visit.path for visit in visits), *(p for log in logs for p in log.text_of.values())]
    framework = (name for name, part in _FRAMEWORKS if any(part in path for path in paths))
    file_format, by = _format(reads)
    lost, blind = sum(log.lost for log in logs), sum(log.blind for log in logs)
    notes += _doubts(rhythm, lost, blind, reads)
    statistics = statistics_of(recorded)
    if not reads.timed:
        statistics = statistics._replace(same_each_epoch=None)
    return RecordedJob(
        command=tuple(command), root=reads.root, recorded=recorded, format=file_format, format_by=by,
        framework=next(framework, "none"), rhythm=rhythm, statistics=statistics,
        saves=saves_of(visits), direct=reads.direct, wall_s=wall_s,
        overhead_s=sum(log.spent_s for log in logs), calls=sum(log.calls for log in logs),
        lost=lost, blind=blind, notes=tuple(notes), left_out=dict(others.most_common(8)),
    )  # fmt: skip


def _nothing(logs: Sequence[ProcessLog], roots: Sequence[str]) -> RecordError:
    where = f" below {', '.join(roots)}" if roots else " besides programs, libraries and settings"
    what = f"the command read no files{where}: there is no data set to describe."
    step = "Name its folder with --root DIR, and look whether the command reads from it."
    if not any(log.calls for log in logs):
        what = "nothing was recorded: no process of the command opened a file in a way that can be seen."
        step = "Static programs, other users' and those that read by io_uring or over the network are not seen."
    return RecordError(what, next_step=step)


def _format(reads: SampleReads) -> tuple[str, str]:
    endings = [os.path.splitext(name)[1].lower() for name in reads.names]
    ending, _ = Counter(endings).most_common(1)[0]
    name = reads.names[endings.index(ending)]  # names without an ending too
    if ending == ".csv" or (known := format_of(name)) in _FORMATS:
        return ("csv" if ending == ".csv" else known), "ending"
    head = b""
    with suppress(OSError), open(os.path.join(reads.root, name), "rb") as f:
        head = f.read(16)
    if (known := format_of_bytes(head)) in _FORMATS:
        return known, "magic"
    many = len(reads.sample_file) > 2 * len(reads.names)
    return ("tfrecord" if many else "npy"), "guess"


def _usual(rhythm: Rhythm, *, timed: bool) -> Rhythm:
    """Without steps in which something else went on; none at all where reads have no times."""
    if not timed:
        none = np.zeros(0)
        return replace(
            rhythm, source="none", batch=1, threads=1, compute_s=none, wait_s=none, decode_s=none
        )
    if len(rhythm.compute_s) < 4:
        return rhythm
    usual = rhythm.compute_s <= _LONG * max(float(np.median(rhythm.compute_s)), 1e-4)
    return replace(rhythm, compute_s=rhythm.compute_s[usual], wait_s=rhythm.wait_s[usual])


def _doubts(rhythm: Rhythm, lost: int, blind: int, reads: SampleReads) -> Iterator[str]:
    if not reads.timed:
        yield (
            "of files that a process opened again the first open's time alone is known: each epoch is "
            "written in the order of the first; times, steps and the batch are not known"
        )
    if lost:
        yield f"{lost:,} calls were not kept: logs were full (--limit) or the disk was"
    if blind:
        why = "static, of another user or architecture, or without the environment"
        yield f"{blind:,} started programs could not be seen ({why})"
    if reads.mapped:
        yield "files are mapped into memory: all of a mapping counts as read"
    if rhythm.source == "none":
        yield "no steps could be told apart: batch and computing time are not known"
    elif rhythm.batch_fits < 0.9:
        yield f"the batch is a guess: {rhythm.batch_fits:.0%} of the reads agree with it"
    if rhythm.source == "messages" and len(rhythm.compute_s) and not rhythm.waits_seen:
        yield "a thread of its own takes the batches: computing time may contain waiting"
