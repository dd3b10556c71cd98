"""Job: what a record says about a training job, its epochs and their order, and how sure that is. Pure."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.errors import RecordError
from headrace.insight.record.data import data_visits, is_evaluation, reads_of, saves_of
from headrace.insight.record.log import visits_of
from headrace.insight.record.rhythm import rhythm_of, trainers_of, workers_of
from headrace.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from numpy.typing import NDArray

    from headrace.insight.record.data import SampleReads, Saves
    from headrace.insight.record.log import ProcessLog
    from headrace.insight.record.rhythm import Rhythm

_SEQUENTIAL: Final = 0.9
_IN_SHARDS: Final = 0.8


@dataclass(frozen=True, slots=True)
class OrderStatistics:
    """What an order looks like.

    Attributes:
        correlation: of place in the epoch and place in name order (Spearman's), over the first epoch.
        next_share: share of reads that read what comes next in name order.
        file_changes: share of reads that read another file than the one before.
        same_each_epoch: None: there is one epoch only.
        shuffle: what DLIO would call it.
    """

    correlation: float
    next_share: float
    file_changes: float
    same_each_epoch: bool | None
    shuffle: Literal["samples", "files", "none"]


def epochs_of(rows: NDArray[np.void], trainer_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """The epoch of each read, from 0: a training process that meets a sample again is in its next one.

    Returns:
        int64 (reads,).
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


def statistics_of(
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    place: NDArray[np.int64],
    file: NDArray[np.int64],
) -> OrderStatistics:
    """The statistics of an order.

    Args:
        order: samples, epoch after epoch.
        starts: where each epoch begins in it, and its end.
        place: int64 (samples,): of each in name order.
        file: int64 (samples,): that it lies in.
    """
    first = place[order[: starts[1]]] if len(starts) > 1 else place[order]
    steps = np.diff(first)
    changes = np.diff(file[order[: starts[1]]]) != 0 if len(starts) > 1 else np.zeros(0, bool)
    next_share = float((steps == 1).mean()) if len(steps) else 1.0
    file_changes = float(changes.mean()) if len(changes) else 0.0
    correlation = _correlation(np.arange(len(first)), first)
    shuffle: Literal["samples", "files", "none"] = "samples"
    if correlation >= _SEQUENTIAL:
        shuffle = "none"
    elif next_share >= _IN_SHARDS and len(np.unique(file)) < len(file):
        shuffle = "files"
    return OrderStatistics(correlation, next_share, file_changes, _same(order, starts), shuffle)


def _same(order: NDArray[np.int64], starts: NDArray[np.int64]) -> bool | None:
    if len(starts) < 3:
        return None
    one, two = order[starts[0] : starts[1]], order[starts[1] : starts[2]]
    both = np.intersect1d(one, two)
    if len(both) < 2:
        return False
    most = int(order.max()) + 1
    at = np.zeros((2, most), np.int64)
    at[0, one], at[1, two] = np.arange(len(one)), np.arange(len(two))
    return _correlation(at[0, both], at[1, both]) >= _SEQUENTIAL


def _correlation(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Spearman's: of ranks."""
    if len(a) < 2:
        return 1.0
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


# -- job ---------------------------------------------------------------------------------------------

_FORMATS: Final = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".npz": "npz", ".npy": "npy", ".h5": "hdf5",
    ".hdf5": "hdf5", ".csv": "csv", ".parquet": "parquet", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord",
}  # fmt: skip
_MAGIC: Final = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG", "png"), (b"PK\x03\x04", "npz"), (b"\x93NUMPY", "npy"),
    (b"\x89HDF", "hdf5"), (b"PAR1", "parquet"),
)  # fmt: skip
_FRAMEWORKS: Final = (("pytorch", "/torch/"), ("tensorflow", "/tensorflow/"), ("jax", "/jax/"))
_COVERS_LEAST: Final = 0.3
_LONG: Final = 20.0
"""Steps so much longer than the median are not computing: something else went on."""


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """A recorded job.

    Attributes:
        format: DLIO's name for them.
        format_by: ending, magic or a guess.
        requests: system calls that bring a sample, on average.
        direct: whether files were read past the page cache.
        overhead_s: what recording cost, over all processes.
        lost: calls that were not kept.
        blind: programs that could not be seen.
    """

    command: tuple[str, ...]
    root: str
    recorded: Recorded
    format: str
    format_by: str
    framework: str
    rhythm: Rhythm
    statistics: OrderStatistics
    saves: Saves | None
    requests: float
    direct: bool
    processors: int
    wall_s: float
    overhead_s: float
    calls: int
    lost: int
    blind: int
    notes: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Samples of a step of one training process."""
        return self.rhythm.batch


def job_of(
    logs: Sequence[ProcessLog], *, command: Sequence[str], cwd: str, roots: Sequence[str] = (),
    processors: int = 1, wall_s: float = 0.0, exact: Rhythm | None = None,
) -> RecordedJob:  # fmt: skip
    """What logs say of a job; without roots the data set is found, without `exact` the steps are inferred.

    Raises:
        RecordError: nothing that could be a data set was read.
    """
    by_process = _by_process(logs)
    visits = [visit for log in logs for visit in visits_of(log)]
    data = data_visits(visits, roots, cwd, unread=exact is not None)
    if not data:
        raise _nothing(logs, roots)
    kept = set(map(id, data))
    others = Counter(
        os.path.splitext(v.path)[1] or "(none)" for v in visits if id(v) not in kept and v.ranges
    )
    reads = reads_of(data, dict(others.most_common(8)))
    rows = reads.rows
    trainer = trainers_of(by_process, rows, exact.trained if exact else frozenset())
    notes: list[str] = []
    if any(not (visit.ranges or visit.mapped) for visit in data):
        notes.append(
            "not all reads were seen (headrace reads through rings of the kernel): files that were "
            "opened count as read"
        )
    is_valid = _split(reads)
    train = np.flatnonzero(~is_valid[rows["file"]])
    epoch_of = np.full(len(rows), -1, np.int64)
    epoch_of[train] = _epochs(rows[train], trainer[train], notes)
    if exact is not None:
        exact = replace(exact, workers=workers_of(rows, trainer, epoch_of))
    rhythm = _usual(exact or rhythm_of(by_process, rows[train], trainer[train], epoch_of[train]))
    recorded = _recorded(
        reads, is_valid, epoch_of, rhythm=rhythm, trainer=trainer, processors=processors
    )
    statistics = statistics_of(
        recorded.order, recorded.epoch_starts, _places(recorded), recorded.sample_file
    )
    file_format, by = _format(reads)
    lost, blind = sum(log.lost for log in logs), sum(log.blind for log in logs)
    _remark(notes, reads, rhythm, lost, blind)
    return RecordedJob(
        command=tuple(command), root=reads.root, recorded=recorded, format=file_format, format_by=by,
        framework=_framework(logs), rhythm=rhythm, statistics=statistics, saves=saves_of(visits),
        requests=reads.requests, direct=reads.direct, processors=processors, wall_s=wall_s,
        overhead_s=sum(log.spent_s for log in logs), calls=sum(len(log.slots) for log in logs),
        lost=lost, blind=blind, notes=tuple(notes), left_out=reads.left_out,
    )  # fmt: skip


def _by_process(logs: Sequence[ProcessLog]) -> dict[int, ProcessLog]:
    """By number; of a process that became another program, the part that did most."""
    longest: dict[int, ProcessLog] = {}
    for log in sorted(logs, key=lambda log: len(log.slots), reverse=True):
        longest.setdefault(log.process, log)
    return longest


def _nothing(logs: Sequence[ProcessLog], roots: Sequence[str]) -> RecordError:
    if not any(len(log.slots) for log in logs):
        return RecordError(
            "nothing was recorded: no process of the command opened a file in a way that can be seen.",
            next_step="Static programs, other users' and those that read by io_uring or over the "
            "network are not seen.",
        )
    where = f" below {', '.join(roots)}" if roots else " besides programs, libraries and settings"
    return RecordError(
        f"the command read no files{where}: there is no data set to describe.",
        next_step="Name its folder with --root DIR, and look whether the command reads from it.",
    )


def _split(reads: SampleReads) -> NDArray[np.bool_]:
    """Which files are of evaluation; none where all would be."""
    is_valid = np.array([is_evaluation(name) for name in reads.names], bool)
    return np.zeros(len(is_valid), bool) if is_valid.all() else is_valid


def _epochs(
    rows: NDArray[np.void], trainer: NDArray[np.int64], notes: list[str]
) -> NDArray[np.int64]:
    epoch = epochs_of(rows, trainer)
    count = int(epoch.max(initial=0)) + 1
    samples = len(np.unique(rows["sample"]))
    if count > 3 and len(rows) / count < _COVERS_LEAST * samples:
        notes.append("samples come again before others have come: it is one long epoch here")
        return np.zeros(len(rows), np.int64)
    return epoch


def _usual(rhythm: Rhythm) -> Rhythm:
    """Without steps in which something else went on: a checkpoint, an evaluation."""
    if len(rhythm.compute_s) < 4:
        return rhythm
    kept = rhythm.compute_s <= _LONG * max(float(np.median(rhythm.compute_s)), 1e-4)
    return replace(rhythm, compute_s=rhythm.compute_s[kept], wait_s=rhythm.wait_s[kept])


def _recorded(
    reads: SampleReads,
    is_valid: NDArray[np.bool_],
    epoch_of: NDArray[np.int64],
    *,
    rhythm: Rhythm,
    trainer: NDArray[np.int64],
    processors: int,
) -> Recorded:
    rows = reads.rows
    parts = [
        batched(rows[epoch_of == e], rhythm.batch) for e in range(int(epoch_of.max(initial=0)) + 1)
    ]
    train = np.concatenate(parts)
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    evaluated = is_valid[rows["file"]]
    valid = rows[evaluated]
    turns = epochs_of(valid, trainer[evaluated])
    return Recorded(
        names=reads.names, file_bytes=reads.file_bytes, file_split=is_valid.astype(np.uint8),
        sample_file=reads.sample_file, sample_offset=reads.sample_offset,
        sample_bytes=np.minimum(
            reads.sample_bytes, reads.file_bytes[reads.sample_file] - reads.sample_offset
        ),
        order=train["sample"], epoch_starts=starts.astype(np.int64),
        valid_order=valid["sample"][np.argsort(turns, kind="stable")],
        valid_starts=np.concatenate([[0], np.cumsum(np.bincount(turns))]).astype(np.int64),
        open_s=train["open_s"], read_s=train["read_s"],
        compute_s=rhythm.compute_s.astype(np.float32),
        wait_s=rhythm.wait_s.astype(np.float32),
        decode_s=rhythm.decode_s.astype(np.float32),
        batch=rhythm.batch if rhythm.source != "none" else 0,
        workers=rhythm.workers,
        ranks=rhythm.ranks,
        processors=processors,
        collate_s=rhythm.collate_s,
        hand_s=rhythm.hand_s,
        traced=int(rhythm.source == "trace"),
    )  # fmt: skip


def _places(recorded: Recorded) -> NDArray[np.int64]:
    """Each sample's place in the order of names and offsets."""
    by_name = sorted(range(len(recorded.names)), key=lambda i: recorded.names[i])
    rank = np.empty(len(by_name), np.int64)
    rank[by_name] = np.arange(len(by_name))
    order = np.lexsort((recorded.sample_offset, rank[recorded.sample_file]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


def _format(reads: SampleReads) -> tuple[str, str]:
    endings = Counter(os.path.splitext(name)[1].lower() for name in reads.names)
    ending, _ = endings.most_common(1)[0]
    name = reads.names[0].lower()
    if ending in _FORMATS:
        return _FORMATS[ending], "ending"
    if ".tfrecord" in os.path.basename(name):
        return "tfrecord", "ending"
    try:
        with open(os.path.join(reads.root, reads.names[0]), "rb") as f:
            head = f.read(8)
    except OSError:
        head = b""
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name, "magic"
    many = len(reads.sample_file) > 2 * len(reads.names)
    return ("tfrecord" if many else "npy"), "guess"


def _framework(logs: Sequence[ProcessLog]) -> str:
    paths = [path for log in logs for path in log.text_of.values()]
    for name, part in _FRAMEWORKS:
        if any(part in path for path in paths):
            return name
    return "none"


def _remark(notes: list[str], reads: SampleReads, rhythm: Rhythm, lost: int, blind: int) -> None:
    if lost:
        notes.append(f"{lost:,} calls were not kept: logs were full (--limit) or the disk was")
    if blind:
        notes.append(
            f"{blind:,} started programs could not be seen (static, of another user or "
            "architecture, or without the environment)"
        )
    if reads.mapped:
        notes.append("files are mapped into memory: all of a mapping counts as read")
    if rhythm.source == "none":
        notes.append("no steps could be told apart: batch and computing time are not known")
    elif rhythm.batch_fits < 0.9:
        notes.append(f"the batch is a guess: {rhythm.batch_fits:.0%} of the reads agree with it")
    if rhythm.source == "messages" and len(rhythm.compute_s) and not rhythm.waits_seen:
        notes.append("a thread of its own takes the batches: computing time may contain waiting")
