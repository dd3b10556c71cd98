"""Deliveries: what the ranks of a job delivered, attempt after attempt, and what the order asks for.

A job that is resumed writes another file per rank, perhaps on another number of ranks. It goes on at a
position that was saved, so what the attempt before delivered behind that position was lost with it, and
comes again: only the last delivery of a position counts. One that begins at the beginning without a state,
as a loader for validation does that no checkpoint knows, goes on nowhere: its passes stand beside those before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.errors import HeadraceError
from headrace.order import Balanced, Blocked, Order, Sequential, Shuffled
from headrace.order.hash import position_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.trace import RankTrace

DELIVERY: Final = np.dtype(
    [
        ("begin", "<u8"), ("samples", "<u4"), ("rank", "<u4"), ("attempt", "<u4"), ("step", "<u4"),
        ("order_hash", "<u8"), ("left_out", "<u4"), ("left_out_hash", "<u8"),
    ]
)  # fmt: skip
"""One step of one rank: `begin` is the position of its first sample, `samples` are those asked for."""


@dataclass(slots=True)
class Attempt:
    """The ranks that ran together, and their traces by rank."""

    world_size: int
    traces: dict[int, RankTrace] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks without a trace."""
        return [rank for rank in range(self.world_size) if rank not in self.traces]

    @property
    def cut(self) -> bool:
        """Whether a rank did not end properly, or still runs."""
        return any(trace.cut for trace in self.traces.values())

    @property
    def processes(self) -> set[str]:
        """Those of its ranks."""
        return {trace.process or trace.path for trace in self.traces.values()}


@dataclass(frozen=True, slots=True)
class Passage:
    """One way of all ranks through the rest of an epoch, from the position `begin` on."""

    attempt: int
    epoch: int
    begin: int
    deliveries: NDArray[np.void]  # dtype `DELIVERY`, by `begin`
    ranks: tuple[int, ...]  # that have a trace
    world_size: int


@dataclass(slots=True)
class LoaderHistory:
    """What one loader of a job delivered, over all its attempts."""

    about: RankTrace  # a trace of the last attempt, for what it says of data and order
    attempts: list[Attempt]
    epochs: dict[int, list[Passage]]
    """The passages that count, by epoch, since the loader last began anew."""
    earlier: list[dict[int, list[Passage]]] = field(default_factory=list)
    """Those from before each time that it began anew."""
    again: int = 0  # steps that were delivered again after a resume, and do not count
    odd: list[str] = field(default_factory=list)  # what does not fit together


def histories(traces: Iterable[RankTrace]) -> list[LoaderHistory]:
    """What each of a job's loaders delivered, in the order in which they began.

    A loader is known by its data and order. A process may have several alike at once: the k-th of each belong
    together. One that begins when another has ended goes on where that one was. Processes that know of no
    other rank and run at the same time are none of them another one's resume.
    """
    loaders: dict[tuple[object, ...], list[RankTrace]] = {}
    ends: dict[tuple[object, ...], list[float]] = {}
    for trace in sorted(traces, key=lambda trace: (_began_s(trace), trace.rank)):
        if trace.world_size == 0 or not len(trace.steps):
            continue  # nothing but a beginning
        alike = (trace.fingerprint, trace.order_digest, trace.source, trace.framework)
        process = (trace.process or trace.path) if trace.world_size > 1 else ""
        mine = ends.setdefault((*alike, process, trace.rank), [])
        began_s, ended_s = _span_s(trace)
        free = next((at for at, ended in enumerate(mine) if ended <= began_s), len(mine))
        mine[free : free + 1] = [ended_s]
        loaders.setdefault((*alike, free), []).append(trace)
    return [_history(_attempts(traces)) for traces in loaders.values()]


def without_ranks(traces: Iterable[RankTrace]) -> int:
    """How many processes ran at the same time as another, each as if there were no other."""
    spans: dict[str, list[float]] = {}
    for trace in traces:
        if trace.world_size == 1 and len(trace.steps):
            spans.setdefault(trace.process or trace.path, []).extend(_span_s(trace))
    alone, longest, ended_s = set[str](), "", 0.0
    for process, times_s in sorted(spans.items(), key=lambda item: min(item[1])):
        if min(times_s) < ended_s:
            alone |= {process, longest}
        if max(times_s) > ended_s:
            longest, ended_s = process, max(times_s)
    return len(alone)


def _span_s(trace: RankTrace) -> tuple[float, float]:
    return _began_s(trace), trace.unix_s(float(trace.steps["delivered_s"].max()))


def _began_s(trace: RankTrace) -> float:
    if not len(trace.steps):
        return trace.began_unix_s
    return trace.unix_s(float(trace.steps["asked_s"][0]))


def _attempts(traces: Sequence[RankTrace]) -> list[Attempt]:
    """One loader's attempts, from its traces in the order in which they began.

    Ranks that were started together are an attempt, whatever their clocks. Where processes made one loader
    after the other, the k-th of each are one.
    """
    processes: dict[tuple[object, ...], list[RankTrace]] = {}
    for trace in traces:
        process = (trace.process or trace.path, trace.rank, trace.world_size)
        processes.setdefault(process, []).append(trace)
    starts: list[dict[int, list[RankTrace]]] = []
    world_size = 0
    for mine in processes.values():
        rank = mine[0].rank
        if not starts or mine[0].world_size != world_size or rank in starts[-1]:
            starts.append({})
            world_size = mine[0].world_size
        starts[-1][rank] = mine
    attempts = []
    for start in starts:
        for number in range(max(map(len, start.values()))):
            there = {rank: mine[number] for rank, mine in start.items() if number < len(mine)}
            attempts.append(Attempt(next(iter(there.values())).world_size, there))
    return attempts


def _history(attempts: list[Attempt]) -> LoaderHistory:
    about = next(iter(attempts[-1].traces.values()))
    history = LoaderHistory(about, attempts, {})
    for number, attempt in enumerate(attempts):
        passages = _passages(number, attempt, history.odd)
        if history.epochs and passages and passages[0].begin == 0 and not went_on(attempt):
            history.earlier.append(history.epochs)
            history.epochs = {}
        for passage in passages:
            _forget(history, passage.epoch, passage.begin)
            history.epochs.setdefault(passage.epoch, []).append(passage)
    history.earlier = [dict(sorted(epochs.items())) for epochs in history.earlier]
    history.epochs = dict(sorted(history.epochs.items()))
    return history


def went_on(attempt: Attempt) -> bool:
    """Whether it may have gone on where one before was: by a state, by an epoch, or the trace does not say."""
    traces = attempt.traces.values()
    return any(
        trace.origin != "beginning" or (len(trace.steps) and trace.steps["epoch"][0] > 0)
        for trace in traces
    )


def _forget(history: LoaderHistory, epoch: int, begin: int) -> None:
    """A passage begins: what was delivered behind its beginning does not count any more."""
    for later in [number for number in history.epochs if number > epoch]:
        history.again += sum(len(p.deliveries) for p in history.epochs.pop(later))
    kept: list[Passage] = []
    for passage in history.epochs.get(epoch, ()):
        rows = passage.deliveries
        stays = rows["begin"] < begin
        history.again += int(len(rows) - stays.sum())
        if stays.any():
            kept.append(replace(passage, deliveries=rows[stays]))
    history.epochs[epoch] = kept


def _passages(number: int, attempt: Attempt, odd: list[str]) -> list[Passage]:
    """The passages of an attempt, those of all ranks together."""
    ranks = {rank: _cut_by_passages(trace.steps) for rank, trace in sorted(attempt.traces.items())}
    passages: list[Passage] = []
    for at in range(max(map(len, ranks.values()), default=0)):
        there = {rank: passed[at] for rank, passed in ranks.items() if at < len(passed)}
        epochs = Counter(int(rows["epoch"][0]) for rows in there.values())
        if len(epochs) > 1:
            where = ", ".join(f"rank {r} in {int(rows['epoch'][0])}" for r, rows in there.items())
            odd.append(f"ranks went through different epochs at the same time: {where[:300]}")
        epoch = epochs.most_common(1)[0][0]
        first = [int(rows["position"][0]) for rows in there.values() if int(rows["step"][0]) == 0]
        parts = []
        for rank, steps in there.items():
            part = np.zeros(len(steps), DELIVERY)
            part["begin"], part["rank"], part["attempt"] = steps["position"], rank, number
            for name in ("samples", "step", "order_hash", "left_out", "left_out_hash"):
                part[name] = steps[name]
            parts.append(part)
        rows = by_position(parts)
        begin = min(first, default=int(rows["begin"][0]))
        passages.append(Passage(number, epoch, begin, rows, tuple(ranks), attempt.world_size))
    return passages


def _cut_by_passages(steps: NDArray[np.void]) -> list[NDArray[np.void]]:
    """A rank's steps, cut where another passage begins."""
    if not len(steps):
        return []
    epoch, step = steps["epoch"].astype(np.int64), steps["step"].astype(np.int64)
    cuts = np.flatnonzero((np.diff(epoch) != 0) | (np.diff(step) <= 0)) + 1
    # A step that comes twice in a row is a doubled one, not a passage.
    cuts = cuts[(step[cuts] == 0) | (epoch[cuts] != epoch[cuts - 1])]
    return np.split(steps, cuts)


def delivered_hashes(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """The order hash of what each delivery had; uint64, shape (deliveries,)."""
    hashes: NDArray[np.uint64] = rows["order_hash"] - rows["left_out_hash"]  # mod 2^64
    return hashes


def by_position(parts: Iterable[NDArray[np.void]]) -> NDArray[np.void]:
    """Deliveries together, by `begin`."""
    rows = np.concatenate(list(parts))
    return rows[np.argsort(rows["begin"], kind="stable")]


# -- expected ----------------------------------------------------------------------------------------

_TOGETHER: Final = 1 << 21  # positions that are hashed at a time: 100 MB of intermediate arrays

_LENGTH_MAX: Final = 1 << 33


def order_of(trace: RankTrace) -> tuple[Order | None, str]:
    """The order that a trace names, made again; or None, and why there is none."""
    described = trace.order
    if not described:
        return None, "the order is not headrace's"
    if trace.length > _LENGTH_MAX:
        return None, f"an epoch of {trace.length:,} positions is too long to go through"
    mode = described.get("mode")
    try:
        if mode == "balanced":
            order: Order = _balanced(described, trace)
        elif mode in _MODES:
            order = _MODES[mode](**{key: described[key] for key in described if key != "mode"})
        else:
            return None, f"an order of mode {str(mode)[:40]!r} cannot be made again from the trace"
    except (HeadraceError, ValueError, TypeError, KeyError, OSError, ImportError) as e:
        return None, f"the order cannot be made again: {e}"
    if order.digest() != trace.order_digest or order.length != trace.length:
        return None, "the order that the trace describes is not the one that it names"
    return order, ""


_MODES: Mapping[object, Callable[..., Order]] = {
    "shuffled": Shuffled, "sequential": Sequential, "blocked": Blocked,
}  # fmt: skip


def _balanced(described: Mapping[str, Any], trace: RankTrace) -> Order:
    """Labels are not in the trace: the store has them, where it is still there and the same."""
    from headrace.api import open as open_store

    if "://" in trace.source:
        raise ValueError("its labels lie behind a URL, which is not asked for a proof")
    with open_store(trace.source) as store:
        if store.fingerprint != trace.fingerprint or store.labels is None:
            raise ValueError(f"{trace.source} is not the data of this run any more")
        seed, length = described["seed"], described["length"]
        return Balanced(np.array(store.labels), seed=seed, epoch_length=length)


def sums_at(order: Order, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sums, mod 2^64, of the hashes of all deliveries before each position: uint64, like `positions`.

    Two of them differ by the order hash of what lies between.
    """
    sums_before = np.zeros(len(positions), np.uint64)
    if not len(positions):
        return sums_before
    by_place = np.argsort(positions, kind="stable")
    wanted = positions[by_place]
    before = np.uint64(0)
    for begin in range(0, int(wanted[-1]), _TOGETHER):
        end = min(begin + _TOGETHER, int(wanted[-1]))
        hashes = position_hashes(begin, order.wrapped(epoch, begin, end))
        sums = np.concatenate([[before], before + np.cumsum(hashes, dtype=np.uint64)])
        here = slice(*np.searchsorted(wanted, [np.uint64(begin), np.uint64(end + 1)]))
        sums_before[by_place[here]] = sums[(wanted[here] - np.uint64(begin)).astype(np.int64)]
        before = sums[-1]
    return sums_before
