"""Waits: what each step waited for, as clean figures, and who else had a part in it. Pure.

No step has waited less than nothing. Beside the phases of a step: how far the interpreter's lock was
what Python code waited for, how long a rank waited for slower ones, and why bytes came late: a limit, too few
reads, a slow answer, a full storage, or the network. What is known beside the steps is their `Evidence`: a live
loader, a trace and an agent can all fill it in; what nobody measured stays at its default, and makes a verdict
less sure rather than wrong.

A storage that is asked for more than it can give answers each read later than an idle one does; a slow
storage answers late even when it is idle. So the latency of reads that met an idle storage, which every run
has at its beginnings, tells a full storage from a slow one. A full one goes on serving as much as it ever did
(reads under way over the time of one, by Little's law): one that serves much less has become slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from headrace.base.causes import Cause, cause_of
from headrace.plane.batch_trace import PHASES, STEP
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Source = Literal["local", "network", "peer"]
"""Where the bytes lie: on a file system of this node, in an object store, on other nodes."""

_SOURCES: Final = ("local", "network", "peer")
_TEXT_MAX: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a stretch of time. All counts are of that stretch alone."""

    source: Source = "local"
    file_system: str = ""  # that the data lie on, in words; ''
    reads_allowed: int = 0  # reads in flight that the loader may have; 0: not known
    reads_possible: int = 0  # that it could be given; 0: not known
    reads_set: bool = False  # somebody set the number on purpose: nobody turns it
    buffer_bytes: int = 0  # bytes of batches that may be read or wait; 0: not known
    idle_latency_s: float = 0.0
    """Of a read that meets an idle storage, where it was measured at another time; 0.0: it was not."""
    peak_bytes_per_s: float = 0.0
    """The most that this storage was ever seen to deliver; 0.0: not known."""
    more_reads_in_vain: bool = False
    """The tuner tried more reads in flight, and got no more out of it."""
    limit_bytes_per_s: float = 0.0  # a limit on this loader's rate; 0.0: none
    interpreter_looks: int = 0
    """How often somebody looked whether the interpreter's lock was to be had."""
    interpreter_contended: int = 0  # how often it was not
    decode_threads: int = 0  # threads or processes that decode; 0: not known
    native_decode: bool = False  # headrace's own threads decode, and no Python
    kept_decoded: bool = False  # and pictures are kept decoded
    in_process: bool = False  # whoever waits for batches makes them, in its own thread
    cpus: int = 0  # that this process may use; 0: not known
    cpu_share: float = math.nan  # of them, in use
    io_pressure: float = math.nan  # share of time in which some task waited for I/O (PSI)
    remote_retries: int = 0  # requests to remote volumes that were repeated
    remote_requests: int = 0
    without_storage: str = ""
    """What shows that samples which a data set's own code makes wait for no storage, in words; ''."""
    simulation: str = ""  # `simulated lustre` where the storage is not real

    def sane(self) -> Evidence:
        """The same without what no honest counter says, of whatever type: it counts as not known."""
        bad: dict[str, object] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool | str):
                if type(value) is not type(each.default):
                    bad[each.name] = each.default
                elif isinstance(value, str) and len(value) > _TEXT_MAX:
                    bad[each.name] = value[:_TEXT_MAX]
            elif not isinstance(value, int | float) or not 0 <= value < 1e300:
                bad[each.name] = each.default  # NaN, where that is what is not known
        if self.source not in _SOURCES:
            bad["source"] = "local"
        sane = replace(self, **bad) if bad else self  # type: ignore[arg-type]
        if sane.interpreter_contended > sane.interpreter_looks:  # they are of different stretches
            return replace(sane, interpreter_contended=0)
        return sane

    @property
    def contended(self) -> float:
        """Share of the looks at which another held the interpreter's lock."""
        looks = self.interpreter_looks
        return min(1.0, self.interpreter_contended / looks) if looks > 0 else 0.0


_HOLD, _OPEN, _READ, _QUEUE = (PHASES.index(name) for name in ("hold", "open", "read", "queue"))
_MADE: Final = [PHASES.index(name) for name in ("decode", "collate", "transfer")]
_FETCHED: Final = [_HOLD, _OPEN, _READ]

_AROUND: Final = 6

_HIDDEN: Final = 4.0
"""A batch that came late by a quarter of the time that making it takes shows that reading is what does not
keep up: the making would be hidden behind it."""

AMOUNT_MAX: Final = 1e15  # of anything, in a step: a petabyte
STEP_MAX_S: Final = 7 * 86400.0  # a wait of more than a week is a clock that jumped


@dataclass(frozen=True, slots=True)
class StepWaits:
    """Waits of steps, and what their batches say for themselves: float64, shape (steps,), but for some."""

    phases: NDArray[np.float64]  # shape (steps, phases): seconds, as `PHASES`; none negative
    unknown_s: NDArray[np.float64]  # of the wait, what no phase accounts for
    room_s: NDArray[np.float64]  # reads waited for room in the buffer
    held_s: NDArray[np.float64]  # a limit on rates held them back
    serial: NDArray[np.bool_]  # made by another process, one thing after the other
    bytes: NDArray[np.float64]  # shape (steps, tiers), as `TIERS`
    reads: NDArray[np.float64]
    read_s: NDArray[np.float64]  # that they took
    depth: NDArray[np.float64]  # those under way when each began, added up
    quiet_reads: NDArray[np.float64]
    quiet_s: NDArray[np.float64]
    samples: NDArray[np.float64]
    work_s: NDArray[np.float64]  # of decoding
    cpu_s: NDArray[np.float64]
    looks: NDArray[np.float64]  # for the interpreter's lock
    contended: NDArray[np.float64]  # those that found it taken
    others_s: NDArray[np.float64]  # processor time of others' Python threads meanwhile
    every_s: NDArray[np.float64]  # from the delivery before to this one
    seconds: float  # from the first request to the last delivery
    dropped: int  # rows that made no sense

    @property
    def stall_s(self) -> float:
        """All that was waited."""
        return float(self.phases.sum() + self.unknown_s.sum())

    def tier_bytes(self) -> dict[str, float]:
        """Bytes by where they came from."""
        sums = self.bytes.sum(axis=0) if len(self.bytes) else np.zeros(len(TIERS))
        return {name: float(sums[at]) for at, name in enumerate(TIERS)}


def waits_of(steps: NDArray[np.void], *, in_process: bool = False) -> StepWaits:
    """Clean the steps of one rank up, of dtype `STEP` or one that lacks some of its fields."""
    asked, delivered = _column(steps, "asked_s"), _column(steps, "delivered_s")
    good = sensible(steps)
    rows = steps[good]
    waited = delivered[good] - asked[good]
    phases = _amounts(rows, "waited_s", len(PHASES))
    total = phases.sum(axis=1)
    # Phases are kept in fewer digits than moments; what is more than that is not explained.
    scale = _ratio(waited, total)
    scale = np.where(total > waited, scale, np.where(total > 0.999 * waited, scale, 1.0))
    phases *= scale[:, None]
    unknown = np.maximum(0.0, waited - phases.sum(axis=1))
    serial = rows["serial"].astype(bool) if "serial" in (rows.dtype.names or ()) else np.zeros(
        len(rows), bool
    )  # fmt: skip
    _hide(phases, serial)
    _share_queue(phases)
    span = float(delivered[good].max() - asked[good].min()) if len(rows) else 0.0
    return StepWaits(
        phases=phases,
        unknown_s=unknown,
        serial=serial & (not in_process),
        bytes=_amounts(rows, "bytes", len(TIERS)),
        every_s=_every(delivered[good], waited),
        seconds=span,
        dropped=int(len(steps) - good.sum()),
        **{
            name: _amounts(rows, name)
            for name in ("room_s", "held_s", "reads", "read_s", "depth", "quiet_reads", "quiet_s", "samples",
                         "work_s", "cpu_s", "looks", "contended", "others_s")
        },
    )  # fmt: skip


def sensible(steps: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which steps have a wait that a step can have, bool, shape (steps,)."""
    with np.errstate(invalid="ignore", over="ignore"):
        waited = _column(steps, "delivered_s") - _column(steps, "asked_s")
        good: NDArray[np.bool_] = np.isfinite(waited) & (waited >= 0.0) & (waited <= STEP_MAX_S)
    return good


def _hide(phases: NDArray[np.float64], serial: NDArray[np.bool_]) -> None:
    """Where bytes came late to idle threads, reading is waited for, and not what followed it.

    Making one batch runs beside the reading of the next: with endlessly fast threads the next bytes would
    still come no sooner.
    """
    making = phases[:, _MADE].sum(axis=1)
    fetched = phases[:, _FETCHED].sum(axis=1)
    queued = phases[:, _QUEUE]
    idle = np.maximum(0.0, 1.0 - 4.0 * _ratio(queued, making, 0.25))
    hidden = np.where(serial, 0.0, np.minimum(making * idle, _HIDDEN * fetched))
    phases[:, _MADE] *= (1.0 - _ratio(hidden, making))[:, None]
    phases[:, _FETCHED] *= (1.0 + _ratio(hidden, fetched))[:, None]


def _share_queue(phases: NDArray[np.float64]) -> None:
    """Who waits for a thread waits for whatever the threads do: decoding, collating, copying.

    Judged by what the steps around were seen to do; the waits stay in `queue` where that was decoding.
    """
    if not len(phases):
        return
    near = np.stack([_around(phases[:, at]) for at in _MADE], axis=1)
    share = _ratio(near, near.sum(axis=1)[:, None])
    queued = phases[:, _QUEUE].copy()
    for column, at in enumerate(_MADE[1:], start=1):
        phases[:, at] += queued * share[:, column]
        phases[:, _QUEUE] -= queued * share[:, column]
    np.maximum(phases, 0.0, out=phases)


def by_sample(seconds: float, waits: StepWaits) -> str:
    """` (2 ms a sample)`; '' where nobody counted samples."""
    samples = float(waits.samples.sum())
    return f" ({1e3 * seconds / samples:.3g} ms a sample)" if samples else ""


def _ratio(
    part: NDArray[np.float64], whole: NDArray[np.float64], otherwise: float = 0.0
) -> NDArray[np.float64]:
    """Part by part of its whole; `otherwise` where that is nothing."""
    with np.errstate(over="ignore"):  # seconds of one step over next to none of another
        return np.divide(part, whole, out=np.full_like(part, otherwise), where=whole > 0.0)


def _around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over each step and those around it, shape (steps,)."""
    if not len(values):
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    last = np.minimum(at + _AROUND + 1, len(values))
    near: NDArray[np.float64] = np.maximum(0.0, sums[last] - sums[np.maximum(at - _AROUND, 0)])
    return near


def _every(delivered: NDArray[np.float64], waited: NDArray[np.float64]) -> NDArray[np.float64]:
    """From one delivery to the next; where that is unknown or nonsense, the wait."""
    every = waited.copy()
    if len(every) > 1:
        with np.errstate(invalid="ignore", over="ignore"):
            between = np.diff(delivered)
        every[1:] = np.where((between > 0.0) & (between <= STEP_MAX_S), between, waited[1:])
    return every


def _column(rows: NDArray[np.void], name: str) -> NDArray[np.float64]:
    if name not in (rows.dtype.names or ()):
        return np.zeros(len(rows))
    with np.errstate(invalid="ignore"):
        column: NDArray[np.float64] = rows[name].astype(np.float64)
    return column


def _amounts(rows: NDArray[np.void], name: str, width: int = 0) -> NDArray[Any]:
    """A column of amounts; what is missing, negative, too much or no number is 0."""
    shape = (len(rows), width) if width else (len(rows),)
    if name not in (rows.dtype.names or ()) or rows[name].shape != shape:
        return np.zeros(shape)
    with np.errstate(invalid="ignore"):  # any bytes: even the cast of some NaNs
        values = rows[name].astype(np.float64)
        return np.where((values > 0.0) & (values <= AMOUNT_MAX), values, 0.0)


assert set(STEP.names or ()) >= {"waited_s", "asked_s", "delivered_s"}

_CONTENDED_FROM: Final = 0.15
_CONTENDED: Final = 0.4
"""From such a share of looks on that find the interpreter's lock taken, it is what Python code waits for:
somewhat, and wholly. A busy machine alone makes a few."""

_LOOKS_LEAST: Final = 4.0
_LOOKS_SURE: Final = 20
_SHORT_S: Final = 1.0
"""Fewer in so short a time say nothing: on a busy machine whoever holds the lock is often just not running."""

TURNS_MANY: Final = 0.25
"""Threads that wait for one another for such a share of their time are better off as processes."""


def taken(waits: StepWaits, seen: Evidence) -> NDArray[np.float64]:
    """How far the interpreter's lock was what Python code waited for, at each step: 0 to 1."""
    few = max(float(waits.looks.sum()), seen.interpreter_looks) < _LOOKS_SURE
    if few and waits.seconds < _SHORT_S:  # over longer ones they are few because the lock is held
        return np.zeros(len(waits.looks))
    looks = _around(waits.looks)
    share = _ratio(np.minimum(_around(waits.contended), looks), looks)
    share = np.where(looks >= _LOOKS_LEAST, share, seen.contended)
    return np.clip((share - _CONTENDED_FROM) / (_CONTENDED - _CONTENDED_FROM), 0.0, 1.0)


def locked_out_s(waits: StepWaits, seen: Evidence) -> NDArray[np.float64]:
    """How long a thread that makes its own batches stood still because of others' Python code."""
    stood_s: NDArray[np.float64] = waits.phases[:, _READ] * (waits.reads == 0.0) * seen.in_process
    return stood_s * taken(waits, seen) * others_share(waits, unseen=0.0)


def lost_share(waits: StepWaits, seen: Evidence) -> NDArray[np.float64]:
    """Of the time of decoding each batch, that in which its threads waited for Python code of others.

    Threads that decode and do not compute wait for the interpreter's lock, if it is seen to be taken
    and is not taken by decoding itself.
    """
    work, cpu = waits.work_s, np.minimum(waits.cpu_s, waits.work_s)
    stopped = _ratio(work - cpu, work)
    lost = stopped * others_share(waits, unseen=0.0) * taken(waits, seen)
    return np.where(waits.serial, 0.0, lost)


def others_share(waits: StepWaits, unseen: float) -> NDArray[np.float64]:
    """Of all Python code that ran while the lock was wanted, the share that is not decoding; shape (steps,).

    `unseen` is what it is where nobody was seen to run.
    """
    own = np.where(waits.serial, 0.0, np.minimum(waits.cpu_s, waits.work_s))
    if not waits.looks.any():  # nobody noted it with the steps
        return np.maximum(0.0, 1.0 - own / np.maximum(waits.every_s, 1e-9))
    other = _around(waits.others_s)
    return _ratio(other, other + _around(own), unseen)


def turns(waits: StepWaits, seen: Evidence) -> float:
    """Of the time that its threads decoded, that in which they waited for one another: 0 to 1."""
    work = np.where(waits.serial | seen.in_process, 0.0, waits.work_s)
    stopped = np.maximum(0.0, work - waits.cpu_s)
    alone = stopped * (1.0 - others_share(waits, unseen=1.0)) * taken(waits, seen)
    total = float(work.sum())
    return float(alone.sum()) / total if total else 0.0


_PATIENCE_S = 7 * 86400.0


def slow_rank(
    own: NDArray[np.void], others: Sequence[NDArray[np.void]]
) -> tuple[float, int | None]:
    """How long this rank waited for slower ones, and which one it waited for most.

    A rank that has its batch and must wait for another spends that time between its delivery and its next
    request, as a longer step. Both must be so: the other waited longer for its batch, and this one's
    step took longer than the shortest one. Only durations are compared: clocks of nodes differ.

    Args:
        own: steps of this rank, dtype `STEP`.
        others: those of the other ranks; they are matched by epoch and step.

    Returns:
        Seconds, and the number of the other rank among `others`; None: none was slower.
    """
    mine = _durations(own)
    theirs = [_durations(each) for each in others]
    total, by_rank = 0.0, np.zeros(len(others))
    for key, (waited_s, worked_s) in mine.items():
        same_step = [(at, rank[key]) for at, rank in enumerate(theirs) if key in rank]
        if not same_step or worked_s is None:
            continue
        at, (slowest_s, _) = max(same_step, key=lambda each: each[1][0])
        works = [worked for _, (_, worked) in same_step if worked is not None]
        shortest_s = min([worked_s, *works])
        lost_s = min(slowest_s - waited_s, worked_s - shortest_s)
        if works and lost_s > 0.0:
            total += lost_s
            by_rank[at] += lost_s
    return total, int(by_rank.argmax()) if total else None


def _durations(steps: NDArray[np.void]) -> dict[tuple[int, int], tuple[float, float | None]]:
    """By epoch and step: the wait, and the work until the next request; None: there was none."""
    names = {"epoch", "step", "asked_s", "delivered_s"}
    if not len(steps) or not names <= set(steps.dtype.names or ()):
        return {}
    asked = steps["asked_s"].astype(np.float64)
    worked = np.full(len(steps), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        waited = steps["delivered_s"].astype(np.float64) - asked
        worked[:-1] = asked[1:] - steps["delivered_s"][:-1]
    worked[:-1][steps["epoch"][1:] != steps["epoch"][:-1]] = np.nan
    durations = {}
    for at in range(len(steps)):
        if not 0.0 <= waited[at] <= _PATIENCE_S:
            continue
        work = float(worked[at])
        key = int(steps["epoch"][at]), int(steps["step"][at])
        durations[key] = float(waited[at]), work if 0.0 <= work <= _PATIENCE_S else None
    return durations


# -- why bytes came late --------------------------------------------------------------------------

_FULL_FROM: Final = 1.7
_FULL_AT: Final = 3.2
"""Reads that take so many times as long as on an idle storage wait for each other most of that time."""

_PEAK: Final = 0.8
"""From this share of the highest rate that was ever seen on, a storage is at its full rate."""

_PINNED: Final = 0.6
"""A loader whose reads in flight are this share of those allowed would have more if it might."""

_FULL_PACE: Final = 0.4  # a storage that has served more than twice as much is not full
_QUIET_ENOUGH: Final = 8.0
_QUIET_LEAST: Final = 3.0

PROCESSORS_BUSY: Final = 0.9
"""Of the processors: whoever is ready waits for one."""

_NEAR: Final = [TIERS.index("ram"), TIERS.index("page_cache")]
_NEARLY_ALL: Final = 0.95
"""Of a step's bytes. Where so many lay in memory and processors are busy, its few reads waited for one, too."""


@dataclass(frozen=True, slots=True)
class ReadWaits:
    """How reads went."""

    seconds: dict[Cause, NDArray[np.float64]]
    """By cause, float64, shape (steps,); they add up to the phases `hold` and `read`."""
    latency_s: float  # mean, of a read
    idle_latency_s: float  # of a read that met an idle storage; 0.0: not known
    in_flight: float  # mean number
    bytes_per_s: float  # from storage
    full: float  # how far the storage was at its full rate, 0 to 1
    sure: float  # how sure that is, 0 to 1
    few: bool  # the loader could have had more reads under way, had it been allowed to

    @property
    def stood_s(self) -> float:
        """For how long samples stood still that wait for no storage."""
        return float(np.sum(self.seconds.get(Cause.DECODE, 0.0)))


def reading_of(waits: StepWaits, seen: Evidence) -> ReadWaits:
    """Divide the time that was waited for bytes."""
    reads, read_s = float(waits.reads.sum()), float(waits.read_s.sum())
    seconds = max(waits.seconds, 1e-9)
    latency_s = read_s / reads if reads else 0.0
    tiers = waits.tier_bytes()
    rate = (tiers["source"] + tiers["peer"] + tiers["disk"]) / seconds
    in_flight = read_s / seconds
    idle_s, fulls, sure = _fullness(waits, seen, rate)
    hold, read = waits.phases[:, _HOLD].copy(), waits.phases[:, _READ] - locked_out_s(waits, seen)
    full = _mean(fulls, hold + read)
    pinned = seen.reads_allowed > 0 and in_flight >= _PINNED * seen.reads_allowed
    # Where as many reads are under way as may be, more room would not begin others sooner.
    near = _ratio(_around(waits.read_s), _around(waits.every_s), 0.0)
    roomy = near < _PINNED * seen.reads_allowed if seen.reads_allowed else near >= 0.0
    # Few are allowed, on purpose, and the storage could serve more.
    could_more = seen.reads_possible == 0 or seen.reads_possible >= 1.5 * seen.reads_allowed
    few = seen.reads_set and pinned and could_more and full < 0.5
    seconds_by_cause: dict[Cause, NDArray[np.float64]] = {}
    _take(seconds_by_cause, Cause.POLICY, _part(hold, waits.held_s.copy()))
    # A batch that was held back came later by as much, even if it was being read when it was waited for.
    left = np.maximum(0.0, waits.held_s - waits.phases[:, _HOLD])
    _take(seconds_by_cause, Cause.POLICY, _part(read, left))
    if few:
        _take(seconds_by_cause, Cause.PREFETCH, _part(hold, hold.copy()) + _part(read, read.copy()))
    room = waits.room_s * (1.0 - fulls) * roomy
    _take(seconds_by_cause, Cause.PREFETCH, _part(hold, room) + _part(read, room))
    for cause, part_s in _storage(seen, waits, hold + read, fulls).items():
        _take(seconds_by_cause, cause, part_s)
    return ReadWaits(seconds_by_cause, latency_s, idle_s, in_flight, rate, full, sure, few)


def _fullness(
    waits: StepWaits, seen: Evidence, rate: float
) -> tuple[float, NDArray[np.float64], float]:
    """An idle storage's latency; how full the storage was at each step, 0 or 1; and how sure that is.

    Storage changes: reads are compared with those of the steps around them, as far as these met an idle
    storage.
    """
    steps = len(waits.phases)
    quiet, quiet_s = float(waits.quiet_reads.sum()), float(waits.quiet_s.sum())
    reads = float(waits.reads.sum())
    idle_s = quiet_s / quiet if quiet else seen.idle_latency_s
    if seen.more_reads_in_vain or 0.0 < _PEAK * seen.peak_bytes_per_s <= rate:
        return idle_s, np.ones(steps), 0.9
    if not reads or not idle_s:
        return idle_s, np.zeros(steps), 0.5
    near_reads, near_quiet = _around(waits.reads), _around(waits.quiet_reads)
    latency = _ratio(_around(waits.read_s), near_reads, 0.0)
    idle = _ratio(_around(waits.quiet_s), near_quiet, idle_s)
    idle = np.where(near_quiet >= _QUIET_LEAST, idle, idle_s)
    slower = _ratio(latency, idle, 1.0)
    # Where most reads met an idle storage it was hardly ever busy.
    slower = np.where(near_quiet > 0.5 * near_reads, 1.0, slower)
    sharp = np.clip((slower - _FULL_FROM) / (_FULL_AT - _FULL_FROM), 0.0, 1.0)
    pace = _ratio(_around(waits.depth), _around(waits.read_s), 0.0)
    sharp = np.where(pace >= _FULL_PACE * pace.max(initial=0.0), sharp, 0.0)
    margin = _mean(np.abs(2.0 * sharp - 1.0), waits.phases[:, [_HOLD, _READ]].sum(axis=1))
    enough = min(1.0, (quiet or _QUIET_ENOUGH) / _QUIET_ENOUGH)
    return idle_s, (sharp > 0.5).astype(np.float64), 0.5 + 0.45 * margin * (0.4 + 0.6 * enough)


def _mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    total = float(weights.sum())
    if total <= 0.0:
        return float(values.mean()) if len(values) else 0.0
    return float((values * weights).sum() / total)


def _from_memory(waits: StepWaits, seen: Evidence) -> NDArray[np.bool_]:
    """At which steps bytes came out of memory, and nothing was waited for from farther: shape (steps,)."""
    total = waits.bytes.sum(axis=1)
    near = waits.bytes[:, _NEAR].sum(axis=1)
    enough = _NEARLY_ALL if seen.cpu_share >= PROCESSORS_BUSY else 1.0
    mostly: NDArray[np.bool_] = near >= enough * total
    return np.where(total > 0.0, mostly, 0.0 < total.sum() <= near.sum())


def _storage(
    seen: Evidence, waits: StepWaits, left: NDArray[np.float64], fulls: NDArray[np.float64]
) -> dict[Cause, NDArray[np.float64]]:
    """What is left of each step's wait for bytes, by what kind of storage gave them."""
    if left.sum() <= 0.0:
        return {}
    if seen.without_storage and not waits.reads.any():
        return {Cause.DECODE: left}
    tiers = waits.tier_bytes()
    far = {name: tiers[name] for name in ("disk", "peer", "source")}
    far_bytes = sum(far.values())
    known = {"network": Cause.NETWORK, "peer": Cause.PEER}
    near = _from_memory(waits, seen)
    by_cause, left = {Cause.MEMORY: left * near}, left * ~near
    if not sum(tiers.values()) and seen.source in known:
        return {known[seen.source]: left}
    if not far_bytes:
        far, far_bytes = {"source": 1.0}, 1.0
    elif seen.source in known and far.get("source"):
        far = {known[seen.source].value: far["source"], "disk": far["disk"], "peer": far["peer"]}
        if seen.source == "peer":
            far["peer"] = tiers["source"] + tiers["peer"]
    # Where a program opens and reads by itself, whether answers or opens were slow is not known.
    slow = Cause.LATENCY if waits.reads.any() else Cause.STORAGE
    for name, count in far.items():
        share = count / far_bytes
        if name in ("network", "peer"):
            _take(by_cause, cause_of(name), share * left)
            continue
        _take(by_cause, Cause.BANDWIDTH, share * left * fulls)
        _take(by_cause, slow, share * left * (1.0 - fulls))
    return by_cause


def _part(of: NDArray[np.float64], most: NDArray[np.float64]) -> NDArray[np.float64]:
    """Take up to so much out of each row; how much that was."""
    taken: NDArray[np.float64] = np.minimum(of, most)
    of -= taken
    most -= taken
    return taken


def _take(
    by_cause: dict[Cause, NDArray[np.float64]], cause: Cause, seconds: NDArray[np.float64]
) -> None:
    by_cause[cause] = by_cause.get(cause, 0.0) + seconds
