"""Rhythm: from who read what and when, to workers, batches and how long a step computes.

The sources, the surest first: headrace's own loaders tell exactly, and so do traces of a program's steps, but
for the batch; worker processes send each batch through a pipe, and the training process receives it and waits
for it in `poll`; a process that reads by itself does so in bursts, and computes between them. What is guessed
says how far it fits.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.errors import TraceError
from headrace.insight.record.log import CallKind, Flag
from headrace.trace import read_run
from headrace.trace.recorded import TrainingSteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.insight.record.log import ProcessLog
    from headrace.trace import RankTrace

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Rows = NDArray[np.void]
    Bools = NDArray[np.bool_]

_HEADER_BYTES: Final = 4  # what `multiprocessing` sends before a message
_SPAWNED: Final = ("multiprocessing.spawn", "multiprocessing.forkserver", "--multiprocessing-fork")
_GAPS_TRIED: Final = 24
_STEPS_LEAST: Final = 3
_OVERLAPS_LEAST: Final = 0.1  # of the reads of threads that read side by side
_NS: Final = 1e9
_PAUSE_NS: Final = 4_000_000  # between two messages of one handing over, at most


@dataclass(frozen=True, kw_only=True)
class Rhythm(TrainingSteps):
    """How one process trains, and how that is known.

    Decoding is what those that read did between two reads of a batch, and between the calls of one.
    """

    source: str  # trace, steps, messages, bursts or none
    batch_fits: float  # share of the reads that agree with the batch
    threads: int = 1  # of a process that read
    waits_seen: bool = True  # False: `compute_s` may contain waiting
    ahead: int = 0
    """Batches that workers had begun and training had not taken, at most; 0: not known."""
    trained: frozenset[int] = frozenset()
    """Numbers of the training processes, where they have told them."""
    epoch_steps: float = 0.0  # steps of an epoch, on average, where the source is steps


def trainers_of(
    logs: Mapping[int, ProcessLog], reads: Rows, trained: frozenset[int] = frozenset()
) -> Ints:
    """The training process that each read was for, int64 (reads,); `trained`: those that told that they are."""
    parents = {p: _trainer_of(p, logs, trained) for p in set(reads["process"].tolist())}
    return np.array([parents[p] for p in reads["process"].tolist()], np.int64)


def rhythm_of(
    logs: Mapping[int, ProcessLog], reads: Rows, trainer_of: Ints, epoch_of: Ints
) -> Rhythm:
    """Find the rhythm of reads, of which the training process and the epoch are known."""
    trainers = Counter(trainer_of.tolist())
    first, _ = trainers.most_common(1)[0]
    mine = trainer_of == first
    of_workers = mine & (reads["process"] != first)
    if of_workers.sum() * 2 >= mine.sum():
        return _of_messages(logs, reads, epoch_of, of_workers, (first, len(trainers)))
    return _of_bursts(reads, epoch_of, mine, len(trainers))


def workers_of(reads: Rows, trainer_of: Ints, epoch_of: Ints) -> int:
    """How many processes read for each training process, in an epoch; 0: it reads by itself."""
    theirs = reads["process"] != trainer_of
    columns = (column[theirs].tolist() for column in (epoch_of, trainer_of, reads["process"]))
    each = set(zip(*columns, strict=True))
    counts = Counter((epoch, trainer) for epoch, trainer, _ in each if epoch >= 0)
    return int(np.median(list(counts.values()))) if counts else 0


def _trainer_of(process: int, logs: Mapping[int, ProcessLog], trained: frozenset[int]) -> int:
    """The process that a reader reads for: itself, unless it is a worker that sends batches to its parent.

    Training processes may be forked or spawned, too: those send no batches.
    """
    log = logs[process]
    if process in trained or log.parent in trained:
        return process if process in trained else log.parent
    parent = logs.get(log.parent)
    if parent is None or (log.messages_seen and not len(_sent(log))):
        return process
    forked = log.command == parent.command
    spawned = any(word in " ".join(log.command) for word in _SPAWNED)
    if not (forked or spawned):
        return process
    of_server = any("forkserver" in word for word in parent.command)
    return parent.parent if of_server and parent.parent in logs else parent.process


# -- workers that send batches ---------------------------------------------------------------------------


def _of_messages(
    logs: Mapping[int, ProcessLog], reads: Rows, epoch_of: Ints, mine: Bools, of: tuple[int, int]
) -> Rhythm:
    """Of (a training process, one of so many)."""
    trainer, ranks = of
    workers = sorted(set(reads["process"][mine].tolist()))
    sent, sizes = 0, []
    for worker in workers:
        messages = _sent(logs[worker])
        ends = np.sort(reads["end_ns"][mine & (reads["process"] == worker)])
        sent += len(messages)
        if len(messages):
            sizes += np.diff(np.searchsorted(ends, messages), prepend=0).tolist()
    total = int(mine.sum())
    batch = _batch_size(total, sent, sizes)
    fits = 1 - min(1.0, abs(total - batch * sent) / total) if sent else 0.0
    received, waited, seen = _received(logs.get(trainer))
    hands = _hands(logs.get(trainer), received)
    epochs = [mine & (epoch_of == epoch) for epoch in np.unique(epoch_of[mine])]
    starts = np.array([reads["begin_ns"][epoch].min() for epoch in epochs], np.int64)
    compute, wait, hand = _steps(received, waited, hands, starts)
    decode, collate = _between(reads, mine, batch, logs) if sent else (np.zeros(0), 0.0)
    of_each = (reads["begin_ns"][mine & (reads["process"] == worker)] for worker in workers)
    begun = np.sort(np.concatenate([begins[::batch] for begins in of_each]))
    ahead = np.arange(1, len(begun) + 1) - np.searchsorted(received, begun, "right")
    in_epoch = [len(np.unique(reads["process"][epoch])) for epoch in epochs]
    return Rhythm(
        source="messages" if sent else "none", batch=batch, batch_fits=fits,
        workers=int(np.median(in_epoch)), ranks=ranks, compute_s=compute, wait_s=wait,
        decode_s=decode, collate_s=collate, waits_seen=seen, hand_s=hand,
        ahead=int(ahead.max(initial=0)) if len(received) else 0,
    )  # fmt: skip


def _through_pipes(slots: Rows, kind: CallKind) -> Bools:
    """Queues are pipes; through sockets go descriptors of shared memory."""
    through: Bools = (slots["kind"] == kind) & (slots["flags"] & Flag.SOCKET == 0)
    return through


def _usual(values: NDArray[Any]) -> int:
    """The value that comes most often."""
    return int(Counter(values.tolist()).most_common(1)[0][0])


def _batch_size(reads: int, sent: int, sizes: list[int]) -> int:
    """Samples of a message: a worker begins the next batch while it sends one, so single counts jitter."""
    if not sent:
        return 1
    usual = round(float(np.median([s for s in sizes if s > 0] or [1])))
    mean = reads / sent
    # The last of an epoch may be smaller: the mean lies below then, never above.
    return max(1, usual if usual >= 0.8 * mean else round(mean))


def _sent(log: ProcessLog) -> Ints:
    """When a worker sent its batches: writes to the pipe that it wrote to most often."""
    slots = log.slots
    some = _through_pipes(slots, CallKind.PIPE_WRITE) & (slots["nbytes"] > _HEADER_BYTES)
    if not some.any():
        return np.zeros(0, np.int64)
    fds = slots["fd"][some]
    times: Ints = np.sort(slots["begin_ns"][some][fds == _usual(fds)])
    return times


def _received(log: ProcessLog | None) -> tuple[Ints, Ints, bool]:
    """When batches came; the waits, (begin, end), of the thread that took them; whether it is training's."""
    nothing = np.zeros(0, np.int64), np.zeros((0, 2), np.int64), False
    if log is None:
        return nothing
    slots = log.slots
    heads = _through_pipes(slots, CallKind.PIPE_READ) & (slots["nbytes"] == _HEADER_BYTES)
    if not heads.any():
        return nothing
    taken = heads & (slots["fd"] == _usual(slots["fd"][heads]))
    thread = _usual(slots["thread"][taken])
    return np.sort(slots["begin_ns"][taken]), _waits(slots, thread), thread == log.process


def _waits(slots: Rows, thread: int) -> Ints:
    """When a thread waited: (begin, end) rows, in ns."""
    waits = slots[(slots["kind"] == CallKind.WAIT) & (slots["thread"] == thread)]
    ends = waits["begin_ns"] + (waits["seconds"] * _NS).astype(np.int64)
    return np.stack([waits["begin_ns"], ends], axis=1)


def _hands(log: ProcessLog | None, received: Ints) -> Floats:
    """How long each batch's shared memory was being handed over, in ns: through sockets, right behind it."""
    hands = np.zeros(len(received))
    if log is None or not len(received):
        return hands
    kinds = (int(CallKind.PIPE_READ), int(CallKind.PIPE_WRITE))
    sockets = (log.slots["flags"] & Flag.SOCKET != 0) & np.isin(log.slots["kind"], kinds)
    slots = log.slots[sockets]
    ends = np.sort(slots["begin_ns"] + (slots["seconds"] * _NS).astype(np.int64))
    pauses = np.diff(ends, append=np.iinfo(np.int64).max) > _PAUSE_NS
    last = np.flatnonzero(pauses)
    nexts = np.append(received[1:], np.iinfo(np.int64).max)
    for i, (begin, end) in enumerate(zip(received.tolist(), nexts.tolist(), strict=True)):
        first = int(np.searchsorted(ends, begin))
        if first < len(ends) and ends[first] - begin <= _PAUSE_NS:
            at = last[np.searchsorted(last, first)]
            hands[i] = max(0, min(int(ends[at]), end) - begin)
    return hands


def _waited_in(waits: Ints, begins: Ints) -> Floats:
    """What waits, (begin, end) rows in ns, took that began between each of some moments and the next."""
    waited = np.zeros(len(begins))
    at = np.searchsorted(begins, waits[:, 0], "right") - 1
    np.add.at(waited, at[at >= 0], (waits[:, 1] - waits[:, 0])[at >= 0].astype(float))
    return waited


def _steps(
    received: Ints, waits: Ints, hands: Floats, starts: Ints
) -> tuple[Floats, Floats, float]:
    """What each step computed and waited, and its handing over; not those in which an epoch began."""
    if len(received) < 2:
        return np.zeros(0), np.zeros(0), 0.0
    gaps = np.diff(received)
    # A wait behind a batch is for the next one: of it, and of the batch's own handing over.
    waited = np.minimum(_waited_in(waits, received)[:-1] + hands[:-1], gaps)
    begun = np.searchsorted(received, starts, "right") - 1
    kept = np.ones(len(gaps), bool)
    kept[begun[(begun >= 0) & (begun < len(gaps))]] = False
    hand = float(hands[:-1][kept].mean() / _NS) if kept.any() else 0.0
    return ((gaps - waited) / _NS)[kept], (waited / _NS)[kept], hand


def _inside(reads: Rows) -> Floats:
    """What was done between the calls of each read: libraries decode what they have while they read on."""
    took = (reads["end_ns"] - reads["begin_ns"]) / _NS
    inside: Floats = np.maximum(took - reads["open_s"] - reads["read_s"], 0.0)
    return inside


def _between(
    reads: Rows, mine: Bools, batch: int, logs: Mapping[int, ProcessLog]
) -> tuple[Floats, float]:
    """What workers did besides reading: per sample, and per batch; waits for work are taken out."""
    inner: list[float] = []
    outer: list[float] = []
    for worker in sorted(set(reads["process"][mine].tolist())):
        rows = np.flatnonzero(mine & (reads["process"] == worker))
        read = reads["end_ns"][rows][:-1]
        gaps = reads["begin_ns"][rows][1:] - read
        waits = _waits(logs[worker].slots, worker)
        busy = (gaps - np.minimum(_waited_in(waits, read), gaps)) / _NS + _inside(reads[rows])[:-1]
        ends = np.arange(1, len(rows)) % batch == 0
        inner += np.maximum(busy[~ends], 0).tolist()
        outer += np.maximum(busy[ends], 0).tolist()
    decode = np.array(inner or outer)
    if not inner or not outer:
        return decode, 0.0
    # The boundary holds the last sample's decoding, too. Epochs' ends are among them: the median.
    return decode, max(0.0, float(np.median(outer)) - float(np.median(inner)))


# -- a process that reads by itself ----------------------------------------------------------------------


def _of_bursts(reads: Rows, epoch_of: Ints, mine: Bools, ranks: int) -> Rhythm:
    rows = np.flatnonzero(mine)
    begin, end = reads["begin_ns"][rows], np.maximum.accumulate(reads["end_ns"][rows])
    gaps = np.maximum(begin[1:] - end[:-1], 0) / _NS
    threads = len(set(reads["thread"][rows].tolist()))
    if len(gaps) and (gaps == 0).mean() < _OVERLAPS_LEAST:  # a pool whose threads read in turns
        threads = 1
    same_epoch = np.diff(epoch_of[rows]) == 0
    batch, fits, breaks = _bursts(gaps, same_epoch)
    within, inside = ~breaks & same_epoch, _inside(reads[rows])
    inner = gaps[within]
    decode = np.zeros(0)
    if threads == 1:
        decode = inner + inside[:-1][within] if len(inner) else inside
    usual = float(np.median(inner)) if len(inner) else 0.0
    steps = np.flatnonzero(breaks & same_epoch)
    compute = np.maximum(gaps[steps] - usual, 0.0)
    # A step waited while the burst before its break lasted.
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    first = firsts[np.searchsorted(firsts, steps, "right") - 1]
    wait = (end[steps] - begin[first]) / _NS + usual
    return Rhythm(
        source="bursts" if len(steps) else "none", batch=batch, batch_fits=fits, threads=threads,
        ranks=ranks, compute_s=compute, wait_s=wait, decode_s=decode,
    )  # fmt: skip


def _bursts(gaps: Floats, same_epoch: Bools) -> tuple[int, float, Bools]:
    """Where one step's reads end: at the gaps that part them into runs of one length.

    Gives that length, the share of reads in runs of it, and which gaps they are (ends of epochs among them).
    """
    nowhere = ~same_epoch
    best, most = (1, 0.0, nowhere), 0.0
    sizes = np.sort(gaps[gaps > 0])
    jumps = sizes[1:] / np.maximum(sizes[:-1], 1e-7)
    for at in np.argsort(jumps)[::-1][:_GAPS_TRIED].tolist():
        breaks = (gaps > sizes[at]) | nowhere
        runs = np.diff(np.concatenate([[-1], np.flatnonzero(breaks), [len(gaps)]]))
        if len(runs) <= _STEPS_LEAST:
            continue
        length, times = Counter(runs.tolist()).most_common(1)[0]
        # Ends of epochs and of the record are shorter, and agree.
        agreeing = length * times + sum(r for r in runs[runs < length].tolist()[-2:])
        fits = min(1.0, agreeing / (len(gaps) + 1))
        score = fits * min(1.0, float(np.log(jumps[at]) / np.log(3.0)))
        if fits >= 0.5 and score > most:
            best, most = (int(length), fits, breaks), score
    return best


# -- exact -------------------------------------------------------------------------------------------

_TRACED_STEPS_LEAST: Final = 2


def exact_rhythm(folder: Path) -> tuple[Rhythm | None, str]:
    """The rhythm that loaders told in a run's traces, and what is wrong with these; or None and ''."""
    if not folder.is_dir():
        return None, ""
    try:
        traces = read_run(folder).ranks
    except (TraceError, OSError) as e:
        return None, f"what headrace's loader told is left out: {e}"
    return rhythm_of_traces(traces), ""


def rhythm_of_traces(traces: Iterable[RankTrace]) -> Rhythm | None:
    """The rhythm of a run whose loaders told of their steps; None: none has two."""
    traces = [trace for trace in traces if len(trace.steps) >= _TRACED_STEPS_LEAST]
    if not traces:
        return None
    one = max(traces, key=lambda trace: len(trace.steps))
    compute, wait = _compute_and_wait(one.steps)
    samples = np.maximum(one.steps["samples"].astype(float), 1)
    work = one.steps["work_s"].astype(float) / samples
    return Rhythm(
        source="trace", batch=max(1, int(one.batch_size or np.median(samples))), batch_fits=1.0,
        ranks=len({trace.rank for trace in traces}), compute_s=compute, wait_s=wait,
        decode_s=work if work.any() else np.zeros(0),
        trained=frozenset(trace.pid for trace in traces if trace.pid),
    )  # fmt: skip


def _compute_and_wait(steps: Rows) -> tuple[Floats, Floats]:
    """What each step computed and then waited for the next batch, in seconds.

    Without an epoch's last, which nobody sees end, and its first wait, in which the epoch begins.
    """
    computed = steps["asked_s"][1:] - steps["delivered_s"][:-1]
    waited = (steps["delivered_s"] - steps["asked_s"])[1:]
    kept = (steps["epoch"][1:] == steps["epoch"][:-1]) & (computed >= 0) & (waited >= 0)
    return computed[kept].astype(float), waited[kept].astype(float)


FETCH: Final = np.dtype([("asked_s", "<f8"), ("delivered_s", "<f8"), ("epoch", "<i8")])
"""A batch that training asked for and had."""


def rhythm_of_fetches(fetches: Mapping[int, Rows]) -> Rhythm | None:
    """The rhythm of processes that told when they fetched their batches, dtype `FETCH`; None: none has two.

    How many samples they had, the reads say: `with_reads`.
    """
    fetches = {p: rows for p, rows in fetches.items() if len(rows) >= _TRACED_STEPS_LEAST}
    if not fetches:
        return None
    one = max(fetches.values(), key=len)
    compute, wait = _compute_and_wait(one)
    return Rhythm(
        source="steps", batch_fits=0.0, ranks=len(fetches), compute_s=compute, wait_s=wait,
        trained=frozenset(fetches), epoch_steps=len(one) / len(np.unique(one["epoch"])),
    )  # fmt: skip


def with_reads(
    rhythm: Rhythm, logs: Mapping[int, ProcessLog], reads: Rows, trainer_of: Ints, epoch_of: Ints
) -> Rhythm:
    """A rhythm that was told, with what reads say of it: workers, and of `steps` batch and decoding.

    Batches go to workers in turn: those of one that did not have the last, perhaps shorter one are whole. The
    batch stays 0 where there are more steps than reads: samples of shards were not told apart.
    """
    rhythm = replace(rhythm, workers=workers_of(reads, trainer_of, epoch_of))
    first = _usual(trainer_of)
    mine = trainer_of == first
    of_epoch = mine & (epoch_of == epoch_of[mine].min())
    count = int(of_epoch.sum())
    steps = rhythm.epoch_steps
    if rhythm.source != "steps" or count < steps:
        return rhythm
    alone = rhythm_of(logs, reads, trainer_of, epoch_of)
    if not rhythm.workers and -(-count // alone.batch) == round(steps):
        return replace(rhythm, batch=alone.batch, batch_fits=1.0, decode_s=alone.decode_s)
    each = list(Counter(reads["process"][of_epoch].tolist()).values())
    turns = [max(1, math.ceil((steps - k) / len(each))) for k in range(len(each))]
    batch = math.ceil(max(n / turn for n, turn in zip(each, turns, strict=True)))
    whole = round(steps) * batch
    fits = 1.0 if whole - batch < count <= whole else min(count, whole) / max(count, whole)
    decode = np.zeros(0)
    if rhythm.workers and batch > 1:
        decode, _ = _between(reads, mine & (reads["process"] != first), batch, logs)
    return replace(rhythm, batch=batch, batch_fits=fits, decode_s=decode)
