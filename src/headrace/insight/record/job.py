"""Job: what a record says about a training job, its epochs and their order, and how sure that is. Pure."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from headrace.errors import RecordError
from headrace.insight.record.data import data_visits, is_evaluation, reads_of, saves_of
from headrace.insight.record.log import visits_of
from headrace.insight.record.rhythm import rhythm_of, trainers_of, workers_of
from headrace.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.insight.record.data import SampleReads, Saves
    from headrace.insight.record.log import ProcessLog
    from headrace.insight.record.rhythm import Rhythm


_SEQUENTIAL: Final = 0.9
_IN_SHARDS: Final = 0.8


class OrderStatistics(NamedTuple):
    """What an order looks like.

    Attributes:
        shuffle: what DLIO would call it.
        correlation: of place in the epoch and place in name order (Spearman's), over the first epoch.
        same_each_epoch: None: there is one epoch only.
    """

    shuffle: Literal["samples", "files", "none"]
    correlation: float
    same_each_epoch: bool | None


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
    direct: bool
    wall_s: float
    overhead_s: float
    calls: int
    lost: int
    blind: int
    notes: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)


def job_of(
    logs: Sequence[ProcessLog], *, command: Sequence[str], cwd: str, roots: Sequence[str] = (),
    processors: int = 1, wall_s: float = 0.0, exact: Rhythm | None = None
) -> RecordedJob:  # fmt: skip
    """What logs say of a job; without roots the data set is found, without `exact` the steps are inferred.

    Raises:
        RecordError: nothing that could be a data set was read.
    """
    # Of a process that became another program, the part that did most.
    by_process = {log.process: log for log in sorted(logs, key=lambda log: len(log.slots))}
    visits = [visit for log in logs for visit in visits_of(log)]
    data = data_visits(visits, roots, cwd, unread=exact is not None)
    if not data:
        raise _nothing(logs, roots)
    kept = set(map(id, data))
    others = Counter(
        os.path.splitext(v.path)[1] or "(none)" for v in visits if id(v) not in kept and v.ranges
    )
    reads = reads_of(data)
    rows = reads.rows
    trainer = trainers_of(by_process, rows, exact.trained if exact else frozenset())
    notes: list[str] = []
    if any(not (visit.ranges or visit.mapped) for visit in data):
        notes.append(
            "not all reads were seen (headrace reads through rings of the kernel): files that were "
            "opened count as read"
        )
    is_valid = np.array([is_evaluation(name) for name in reads.names], bool)
    is_valid &= not is_valid.all()  # evaluation alone is the job's data
    train = np.flatnonzero(~is_valid[rows["file"]])
    epoch_of = np.full(len(rows), -1, np.int64)
    epoch_of[train] = epochs_of(rows[train], trainer[train])
    epochs = int(epoch_of.max(initial=0)) + 1
    samples = len(np.unique(rows["sample"][train]))
    if epochs > 3 and len(train) / epochs < _COVERS_LEAST * samples:
        notes.append("samples come again before others have come: it is one long epoch here")
        epoch_of[train], epochs = 0, 1
    if exact is not None:
        rhythm = replace(exact, workers=workers_of(rows, trainer, epoch_of))
    else:
        rhythm = rhythm_of(by_process, rows[train], trainer[train], epoch_of[train])
    if len(rhythm.compute_s) >= 4:  # without steps in which something else went on
        usual = rhythm.compute_s <= _LONG * max(float(np.median(rhythm.compute_s)), 1e-4)
        rhythm = replace(rhythm, compute_s=rhythm.compute_s[usual], wait_s=rhythm.wait_s[usual])
    parts = [batched(rows[epoch_of == epoch], rhythm.batch) for epoch in range(epochs)]
    trained = np.concatenate(parts)
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
        open_s=trained["open_s"], read_s=trained["read_s"],
        compute_s=rhythm.compute_s.astype(np.float32), wait_s=rhythm.wait_s.astype(np.float32),
        decode_s=rhythm.decode_s.astype(np.float32),
        batch=rhythm.batch if rhythm.source != "none" else 0, workers=rhythm.workers,
        ranks=rhythm.ranks, processors=processors, collate_s=rhythm.collate_s, hand_s=rhythm.hand_s,
        traced=int(rhythm.source == "trace"),
    )  # fmt: skip
    paths = [path for log in logs for path in log.text_of.values()]
    framework = (name for name, part in _FRAMEWORKS if any(part in path for path in paths))
    file_format, by = _format(reads)
    lost, blind = sum(log.lost for log in logs), sum(log.blind for log in logs)
    notes += _doubts(rhythm, lost, blind, mapped=reads.mapped)
    return RecordedJob(
        command=tuple(command), root=reads.root, recorded=recorded, format=file_format, format_by=by,
        framework=next(framework, "none"), rhythm=rhythm, statistics=statistics_of(recorded),
        saves=saves_of(visits), direct=reads.direct, wall_s=wall_s,
        overhead_s=sum(log.spent_s for log in logs), calls=sum(len(log.slots) for log in logs),
        lost=lost, blind=blind, notes=tuple(notes), left_out=dict(others.most_common(8)),
    )  # fmt: skip


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


def _doubts(rhythm: Rhythm, lost: int, blind: int, *, mapped: bool) -> Iterator[str]:
    """What makes the record less sure."""
    if lost:
        yield f"{lost:,} calls were not kept: logs were full (--limit) or the disk was"
    if blind:
        yield (
            f"{blind:,} started programs could not be seen (static, of another user or "
            "architecture, or without the environment)"
        )
    if mapped:
        yield "files are mapped into memory: all of a mapping counts as read"
    if rhythm.source == "none":
        yield "no steps could be told apart: batch and computing time are not known"
    elif rhythm.batch_fits < 0.9:
        yield f"the batch is a guess: {rhythm.batch_fits:.0%} of the reads agree with it"
    if rhythm.source == "messages" and len(rhythm.compute_s) and not rhythm.waits_seen:
        yield "a thread of its own takes the batches: computing time may contain waiting"
