"""Reading: why bytes came late: a limit, too few reads, a slow answer, a full storage, the network. Pure.

A storage that is asked for more than it can give answers each read later than an idle one does; a slow
storage answers late even when it is idle. So the latency of reads that met an idle storage, which every run
has at its beginnings, tells a full storage from a slow one. A full one goes on serving as much as it ever did
(reads under way over the time of one, by Little's law): one that serves much less has become slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.base.causes import Cause, cause_of
from headrace.control.stalls.waits import around
from headrace.plane.batch_trace import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.control.stalls.evidence import Evidence
    from headrace.control.stalls.waits import Waits

__all__ = ["Reading", "reading_of"]

_HOLD, _READ = PHASES.index("hold"), PHASES.index("read")

_FULL_FROM: Final = 1.7
_FULL_AT: Final = 3.2
"""Reads that take so many times as long as on an idle storage wait for each other most of that time."""

_PEAK: Final = 0.8
"""From this share of the highest rate that was ever seen on, a storage is at its full rate."""

_PINNED: Final = 0.6
"""A loader whose reads in flight are this share of those allowed would have more if it might."""

_FULL_PACE: Final = 0.4
"""A storage that has served more than twice as much is not full."""

_QUIET_ENOUGH: Final = 8.0
_QUIET_LEAST: Final = 3.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How reads went.

    Attributes:
        seconds: by cause, float64, shape (steps,); they add up to the phases `hold` and `read`.
        latency_s: mean, of a read.
        idle_latency_s: of a read that met an idle storage; 0.0: not known.
        in_flight: mean number.
        bytes_per_s: from storage.
        full: how far the storage was at its full rate, 0 to 1.
        sure: how sure that is, 0 to 1.
        few: the loader could have had more reads under way, had it been allowed to.
    """

    seconds: dict[Cause, NDArray[np.float64]]
    latency_s: float
    idle_latency_s: float
    in_flight: float
    bytes_per_s: float
    full: float
    sure: float
    few: bool


def reading_of(waits: Waits, seen: Evidence) -> Reading:
    """Divide the time that was waited for bytes."""
    reads, read_s = float(waits.reads.sum()), float(waits.read_s.sum())
    seconds = max(waits.seconds, 1e-9)
    latency_s = read_s / reads if reads else 0.0
    tiers = waits.tier_bytes()
    rate = (tiers["source"] + tiers["peer"] + tiers["disk"]) / seconds
    in_flight = read_s / seconds
    idle_s, fulls, sure = _fullness(waits, seen, rate)
    hold, read = waits.phases[:, _HOLD].copy(), waits.phases[:, _READ].copy()
    full = _mean(fulls, hold + read)
    pinned = seen.reads_allowed > 0 and in_flight >= _PINNED * seen.reads_allowed
    # Where as many reads are under way as may be, more room would not begin others sooner.
    near = _ratio(around(waits.read_s), around(waits.every_s), 0.0)
    roomy = near < _PINNED * seen.reads_allowed if seen.reads_allowed else near >= 0.0
    # Few are allowed, on purpose, and the storage could serve more.
    few = seen.reads_set and pinned and _could_more(seen) and full < 0.5
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
    return Reading(
        seconds=seconds_by_cause,
        latency_s=latency_s,
        idle_latency_s=idle_s,
        in_flight=in_flight,
        bytes_per_s=rate,
        full=full,
        sure=sure,
        few=few,
    )


def _fullness(
    waits: Waits, seen: Evidence, rate: float
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
    near_reads, near_quiet = around(waits.reads), around(waits.quiet_reads)
    latency = _ratio(around(waits.read_s), near_reads, 0.0)
    idle = _ratio(around(waits.quiet_s), near_quiet, idle_s)
    idle = np.where(near_quiet >= _QUIET_LEAST, idle, idle_s)
    ratio = _ratio(latency, idle, 1.0)
    # Where most reads met an idle storage it was hardly ever busy.
    ratio = np.where(near_quiet > 0.5 * near_reads, 1.0, ratio)
    sharp = np.clip((ratio - _FULL_FROM) / (_FULL_AT - _FULL_FROM), 0.0, 1.0)
    pace = _ratio(around(waits.depth), around(waits.read_s), 0.0)
    sharp = np.where(pace >= _FULL_PACE * pace.max(initial=0.0), sharp, 0.0)
    margin = _mean(np.abs(2.0 * sharp - 1.0), waits.phases[:, [_HOLD, _READ]].sum(axis=1))
    enough = min(1.0, (quiet or _QUIET_ENOUGH) / _QUIET_ENOUGH)
    return idle_s, (sharp > 0.5).astype(np.float64), 0.5 + 0.45 * margin * (0.4 + 0.6 * enough)


def _ratio(
    part: NDArray[np.float64], whole: NDArray[np.float64], otherwise: float
) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.full_like(part, otherwise), where=whole > 0.0)


def _mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    total = float(weights.sum())
    if total <= 0.0:
        return float(values.mean()) if len(values) else 0.0
    return float((values * weights).sum() / total)


def _could_more(seen: Evidence) -> bool:
    return seen.reads_possible == 0 or seen.reads_possible >= 1.5 * seen.reads_allowed


def _storage(
    seen: Evidence, waits: Waits, left: NDArray[np.float64], fulls: NDArray[np.float64]
) -> dict[Cause, NDArray[np.float64]]:
    """What is left of each step's wait for bytes, by what kind of storage gave them."""
    if left.sum() <= 0.0:
        return {}
    tiers = waits.tier_bytes()
    far = {name: tiers[name] for name in ("disk", "peer", "source")}
    far_bytes = sum(far.values())
    known = {"network": Cause.NETWORK, "peer": Cause.PEER}
    if not far_bytes:
        if sum(tiers.values()):
            # Where nothing came from farther than memory, memory delivered all it could.
            return {Cause.BANDWIDTH: left}
        if seen.source in known:
            return {known[seen.source]: left}
        far, far_bytes = {"source": 1.0}, 1.0
    elif seen.source in known and far.get("source"):
        far = {known[seen.source].value: far["source"], "disk": far["disk"], "peer": far["peer"]}
        if seen.source == "peer":
            far["peer"] = tiers["source"] + tiers["peer"]
    by_cause: dict[Cause, NDArray[np.float64]] = {}
    for name, count in far.items():
        share = count / far_bytes
        if name in ("network", "peer"):
            _take(by_cause, cause_of(name), share * left)
            continue
        _take(by_cause, Cause.BANDWIDTH, share * left * fulls)
        _take(by_cause, Cause.LATENCY, share * left * (1.0 - fulls))
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
