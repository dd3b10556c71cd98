"""Phases: the waits of a stretch of steps, as clean figures: no step has waited less than nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.plane.stage import TIERS
from headrace.plane.step import PHASES, STEP

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Waits", "around", "sensible", "waits_of"]

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
    made = phases[:, _MADE].sum(axis=1)
    fetched = phases[:, _FETCHED].sum(axis=1)
    queued = phases[:, _QUEUE]
    with np.errstate(invalid="ignore", divide="ignore"):
        idle = np.where(made > 0.0, np.maximum(0.0, 1.0 - 4.0 * queued / made), 0.0)
    hidden = np.where(serial, 0.0, np.minimum(made * idle, _HIDDEN * fetched))
    share = np.divide(hidden, made, out=np.zeros_like(made), where=made > 0.0)
    more = np.divide(hidden, fetched, out=np.zeros_like(made), where=fetched > 0.0)
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
    found: NDArray[np.float64] = np.maximum(0.0, sums[last] - sums[np.maximum(at - _AROUND, 0)])
    return found


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
        found: NDArray[np.float64] = rows[name].astype(np.float64)
    return found


def _amounts(rows: NDArray[np.void], name: str, width: int = 0) -> NDArray[Any]:
    """A column of amounts; what is missing, negative, too much or no number is 0."""
    shape = (len(rows), width) if width else (len(rows),)
    if name not in (rows.dtype.names or ()) or rows[name].shape != shape:
        return np.zeros(shape)
    with np.errstate(invalid="ignore"):  # any bytes: even the cast of some NaNs
        values = rows[name].astype(np.float64)
        return np.where((values > 0.0) & (values <= AMOUNT_MAX), values, 0.0)


assert set(STEP.names or ()) >= {"waited_s", "asked_s", "delivered_s"}
