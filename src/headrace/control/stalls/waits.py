"""Waits: what each step waited for, as clean figures, and who else had a part in it. Pure.

No step has waited less than nothing. Beside the phases of a step: how far the interpreter's lock was
what Python code waited for, and how long a rank waited for slower ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.plane.batch_trace import PHASES, STEP
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.control.stalls.evidence import Evidence

__all__ = [
    "TURNS_MANY",
    "Waits",
    "around",
    "lost_share",
    "others_share",
    "sensible",
    "slow_rank",
    "taken",
    "turns",
    "waits_of",
]

_HOLD, _OPEN, _READ, _QUEUE = (PHASES.index(name) for name in ("hold", "open", "read", "queue"))
_MADE: Final = [PHASES.index(name) for name in ("decode", "collate", "transfer")]
_FETCHED: Final = [_HOLD, _OPEN, _READ]

_AROUND: Final = 6

_HIDDEN: Final = 4.0
"""A batch that came late by a quarter of the time that making it takes shows that reading is what does not
keep up: the making would be hidden behind it."""

AMOUNT_MAX: Final = 1e15
"""Of anything, in a step: a petabyte."""

STEP_MAX_S: Final = 7 * 86400.0
"""A wait of more than a week is a clock that jumped."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of steps, and what their batches say for themselves.

    Attributes:
        phases: float64, shape (steps, phases): seconds, as `PHASES`; none negative.
        unknown_s: float64, shape (steps,): of the wait, what no phase accounts for.
        room_s: float64, shape (steps,): reads waited for room in the buffer.
        held_s: float64, shape (steps,): a limit on rates held them back.
        serial: bool, shape (steps,).
        bytes: float64, shape (steps, tiers), as `TIERS`.
        reads: float64, shape (steps,), and seconds that they took: `read_s`; `depth`: those under way when
            each began, added up; `quiet_reads`, `quiet_s`.
        work_s: float64, shape (steps,), and `cpu_s`: of decoding.
        looks: float64, shape (steps,), for the interpreter's lock; `contended`: those that found it taken;
            `others_s`: processor time of others' Python threads meanwhile.
        every_s: float64, shape (steps,): from the delivery before to this one.
        seconds: from the first request to the last delivery.
        dropped: rows that made no sense.
    """

    phases: NDArray[np.float64]
    unknown_s: NDArray[np.float64]
    room_s: NDArray[np.float64]
    held_s: NDArray[np.float64]
    serial: NDArray[np.bool_]
    bytes: NDArray[np.float64]
    reads: NDArray[np.float64]
    read_s: NDArray[np.float64]
    depth: NDArray[np.float64]
    quiet_reads: NDArray[np.float64]
    quiet_s: NDArray[np.float64]
    work_s: NDArray[np.float64]
    cpu_s: NDArray[np.float64]
    looks: NDArray[np.float64]
    contended: NDArray[np.float64]
    others_s: NDArray[np.float64]
    every_s: NDArray[np.float64]
    seconds: float
    dropped: int

    @property
    def stall_s(self) -> float:
        """All that was waited."""
        return float(self.phases.sum() + self.unknown_s.sum())

    def tier_bytes(self) -> dict[str, float]:
        """Bytes by where they came from."""
        sums = self.bytes.sum(axis=0) if len(self.bytes) else np.zeros(len(TIERS))
        return {name: float(sums[at]) for at, name in enumerate(TIERS)}


def waits_of(steps: NDArray[np.void]) -> Waits:
    """Clean the steps of one rank up.

    Args:
        steps: dtype `STEP` or one that lacks some of its fields, shape (steps,).
    """
    asked, delivered = _column(steps, "asked_s"), _column(steps, "delivered_s")
    good = sensible(steps)
    rows = steps[good]
    waited = delivered[good] - asked[good]
    phases = _amounts(rows, "waited_s", len(PHASES))
    total = phases.sum(axis=1)
    # Phases are kept in fewer digits than moments; what is more than that is not explained.
    scale = np.divide(waited, total, out=np.zeros_like(waited), where=total > 0.0)
    scale = np.where(total > waited, scale, np.where(total > 0.999 * waited, scale, 1.0))
    phases *= scale[:, None]
    unknown = np.maximum(0.0, waited - phases.sum(axis=1))
    serial = rows["serial"].astype(bool) if "serial" in (rows.dtype.names or ()) else np.zeros(
        len(rows), bool
    )  # fmt: skip
    _hide(phases, serial)
    _share_queue(phases)
    span = float(delivered[good].max() - asked[good].min()) if len(rows) else 0.0
    return Waits(
        phases=phases,
        unknown_s=unknown,
        serial=serial,
        bytes=_amounts(rows, "bytes", len(TIERS)),
        every_s=_every(delivered[good], waited),
        seconds=span,
        dropped=int(len(steps) - good.sum()),
        **{
            name: _amounts(rows, name)
            for name in ("room_s", "held_s", "reads", "read_s", "depth", "quiet_reads", "quiet_s", "work_s",
                         "cpu_s", "looks", "contended", "others_s")
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
    with np.errstate(invalid="ignore", divide="ignore"):
        idle = np.where(making > 0.0, np.maximum(0.0, 1.0 - 4.0 * queued / making), 0.0)
    hidden = np.where(serial, 0.0, np.minimum(making * idle, _HIDDEN * fetched))
    share = np.divide(hidden, making, out=np.zeros_like(making), where=making > 0.0)
    more = np.divide(hidden, fetched, out=np.zeros_like(making), where=fetched > 0.0)
    phases[:, _MADE] *= (1.0 - share)[:, None]
    phases[:, _FETCHED] *= (1.0 + more)[:, None]


def _share_queue(phases: NDArray[np.float64]) -> None:
    """Who waits for a thread waits for whatever the threads do: decoding, collating, copying.

    Judged by what the steps around were seen to do; the waits stay in `queue` where that was decoding.
    """
    if not len(phases):
        return
    near = np.stack([around(phases[:, at]) for at in _MADE], axis=1)
    total = near.sum(axis=1)
    share = np.divide(near, total[:, None], out=np.zeros_like(near), where=total[:, None] > 0.0)
    queued = phases[:, _QUEUE].copy()
    for column, at in enumerate(_MADE[1:], start=1):
        phases[:, at] += queued * share[:, column]
        phases[:, _QUEUE] -= queued * share[:, column]
    np.maximum(phases, 0.0, out=phases)


def around(values: NDArray[np.float64]) -> NDArray[np.float64]:
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

TURNS_MANY: Final = 0.25
"""Threads that wait for one another for such a share of their time are better off as processes."""


def taken(waits: Waits, seen: Evidence) -> NDArray[np.float64]:
    """How far the interpreter's lock was what Python code waited for, at each step: 0 to 1."""
    looks = around(waits.looks)
    share = np.divide(
        np.minimum(around(waits.contended), looks), looks,
        out=np.full(len(looks), seen.contended), where=looks >= _LOOKS_LEAST,
    )  # fmt: skip
    share_taken: NDArray[np.float64] = np.clip(
        (share - _CONTENDED_FROM) / (_CONTENDED - _CONTENDED_FROM), 0.0, 1.0
    )
    return share_taken


def lost_share(waits: Waits, seen: Evidence) -> NDArray[np.float64]:
    """Of the time of decoding each batch, that in which its threads waited for Python code of others.

    Threads that decode and do not compute wait for the interpreter's lock, if it is seen to be taken
    and is not taken by decoding itself.
    """
    work, cpu = waits.work_s, np.minimum(waits.cpu_s, waits.work_s)
    stopped = np.divide(work - cpu, work, out=np.zeros_like(work), where=work > 0.0)
    others = others_share(waits, unseen=0.0)
    return np.where(waits.serial, 0.0, stopped * others * taken(waits, seen))


def others_share(waits: Waits, unseen: float) -> NDArray[np.float64]:
    """Of all Python code that ran while the lock was wanted, that which is not decoding.

    Args:
        waits: of some steps.
        unseen: what it is where nobody was seen to run.

    Returns:
        float64, shape (steps,): 0 to 1.
    """
    own = np.where(waits.serial, 0.0, np.minimum(waits.cpu_s, waits.work_s))
    if not waits.looks.any():  # nobody noted it with the steps
        return np.maximum(0.0, 1.0 - own / np.maximum(waits.every_s, 1e-9))
    other = around(waits.others_s)
    both = other + around(own)
    return np.divide(other, both, out=np.full_like(both, unseen), where=both > 0.0)


def turns(waits: Waits, seen: Evidence) -> float:
    """Of the time that its threads decoded, that in which they waited for one another: 0 to 1."""
    work = np.where(waits.serial, 0.0, waits.work_s)
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
    if not len(steps) or not {"epoch", "step", "asked_s", "delivered_s"} <= set(
        steps.dtype.names or ()
    ):
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
