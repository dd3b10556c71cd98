"""Curves: a rank's steps as running sums, at some moments and steps: as large for 100 steps as for 10^7.

Sums stay exact where they are kept: what happened between two moments is a difference, and a wait that
spans several moments is shared out among them. Beside the steps: what stages, tuner and machine reported over
time, that is latencies of reads, knobs and decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.base.causes import Cause
from headrace.control.stalls import Evidence
from headrace.control.stalls.verdict import causes_by_step
from headrace.plane.batch_trace import PHASES
from headrace.plane.stage import KNOBS, LATENCY_BUCKETS, TIERS
from headrace.trace.format import finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from headrace.trace import RankTrace


class Decision(NamedTuple):
    """A decision of the tuner; `change` is what it turned, in words, '' if nothing."""

    at_unix_s: float
    rank: int
    action: str
    change: str
    reason: str
    evidence: str


class Latencies(NamedTuple):
    """Reads that finished between two looks (Unix times), by how long they took: (`LATENCY_BUCKETS`,)."""

    from_s: float
    to_s: float
    counts: NDArray[np.float64]


def decisions_of(trace: RankTrace) -> Iterator[Decision]:
    """The tuner's decisions, in their order."""
    for event in trace.of_kind("decision"):
        before, after = _dict(event.get("before")), _dict(event.get("after"))
        turned = [
            f"{name} {finite(before.get(name)):,.0f} to {finite(after.get(name)):,.0f}"
            for name in KNOBS
            if before.get(name) != after.get(name)
        ]
        yield Decision(
            trace.unix_s(finite(event["at_s"])), trace.rank, _text(event.get("action")),
            ", ".join(turned), _text(event.get("reason")), _text(event.get("evidence")),
        )  # fmt: skip


def knobs_of(trace: RankTrace) -> dict[str, list[tuple[float, float]]]:
    """Where each knob stood over time: (Unix time, value), only those that there are."""
    values: dict[str, list[tuple[float, float]]] = {}
    for event in trace.of_kind("look"):
        knobs = _dict(event.get("knobs"))
        for name in KNOBS:
            if (value := finite(knobs.get(name))) > 0:
                values.setdefault(name, []).append((trace.unix_s(finite(event["at_s"])), value))
    return values


def latencies_of(trace: RankTrace) -> Iterator[Latencies]:
    """Reads between each two looks, of the stage that reads most."""
    before: tuple[float, NDArray[np.float64]] | None = None
    for event in trace.of_kind("look"):
        at_s = trace.unix_s(finite(event["at_s"]))
        counts = _histogram(_dict(event.get("stages")))
        if before is not None and at_s > before[0]:
            grown = counts - before[1]
            if np.any(grown < 0):  # a stage began anew
                grown = counts
            yield Latencies(before[0], at_s, grown)
        before = at_s, counts


def _histogram(stages: Mapping[str, Any]) -> NDArray[np.float64]:
    histograms = [_dict(_dict(stage).get("latency_us")) for stage in stages.values()]
    most = max(histograms, key=lambda counts: sum(map(finite, counts.values())), default={})
    return np.array([max(0.0, finite(most.get(str(at)))) for at in range(LATENCY_BUCKETS)])


def evidence_of(trace: RankTrace) -> Evidence:
    """What was known of the run beside its steps, when it was last looked at."""
    last: Mapping[str, Any] = next(iter(reversed(trace.of_kind("evidence"))), {})
    written = _dict(last.get("found"))
    plain = Evidence()
    values: dict[str, Any] = {}
    for field in fields(Evidence):
        value, default = written.get(field.name), getattr(plain, field.name)
        if isinstance(default, bool):
            values[field.name] = value is True
        elif isinstance(default, str):
            values[field.name] = _text(value) or default
        elif isinstance(value, (int, float)):
            number = finite(value)
            values[field.name] = int(number) if isinstance(default, int) else number
    if values.get("source") not in ("local", "network", "peer"):
        values.pop("source", None)
    return Evidence(**values)


_TEXT_MAX: Final = 400


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:_TEXT_MAX] if isinstance(value, str) else ""


# -- curves ------------------------------------------------------------------------------------------

CAUSES: Final = {cause: f"for_{cause.value}" for cause in Cause}
"""The column of each cause. A slower rank is not seen in one rank's steps: its column stays 0."""

COLUMNS: Final = ("worked_s", "waited_s", "samples", "steps", *PHASES, *TIERS, *CAUSES.values())
"""What is added up."""

_AT_ONCE: Final = 1 << 16
"""Steps whose causes are found together: what that takes is many times as large as they are."""

POINTS: Final = 512

SLOWEST: Final = 12


def columns_of(sums: NDArray[np.float64], *names: str) -> NDArray[np.float64]:
    """Some columns of sums, by name, along the last axis."""
    return sums[..., [COLUMNS.index(name) for name in names]]


def stall_of(sums: NDArray[np.float64]) -> float:
    """Share of the time that was waited, of sums by `COLUMNS`."""
    worked, waited = columns_of(sums, "worked_s", "waited_s")
    return float(waited / (worked + waited)) if worked + waited > 0 else 0.0


class EpochSum(NamedTuple):
    """One epoch, on a rank or on all: its sums by `COLUMNS`, and when it was gone through, in Unix time."""

    epoch: int
    sums: NDArray[np.float64]
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """From its first request to its last delivery, on whichever rank."""
        return self.ended_s - self.began_s

    @property
    def stall(self) -> float:
        """Share of the ranks' time."""
        return stall_of(self.sums)

    def of(self, name: str) -> float:
        """One column."""
        return float(self.sums[COLUMNS.index(name)])


@dataclass(frozen=True, slots=True)
class Curves:
    """One trace, of bounded size.

    Attributes:
        times: Unix seconds, shape (points,).
        over_time: sums up to these, shape (points, columns).
        ordinals: steps of this trace, shape (points,).
        slowest: the longest waits, dtype `STEP`.
        total: of all steps.
    """

    rank: int
    host: str
    times: NDArray[np.float64]
    over_time: NDArray[np.float64]
    ordinals: NDArray[np.float64]
    over_steps: NDArray[np.float64]
    epochs: list[EpochSum]
    slowest: NDArray[np.void]
    total: NDArray[np.float64]


def curves_of(trace: RankTrace, evidence: Evidence) -> Curves:
    """Add a trace's steps up; `evidence` is what else is known of them."""
    steps = trace.steps
    sums = np.zeros((len(steps) + 1, len(COLUMNS)))
    amounts = sums[1:]
    worked_s = _add_amounts(amounts, steps, evidence)
    epochs = _epochs(steps, amounts, trace.began_unix_s - trace.began_s)
    for column in range(len(COLUMNS)):  # in place: of a long run they take gigabytes
        amounts[:, column] = np.cumsum(amounts[:, column])
    ordinals = np.linspace(0, len(steps), min(POINTS, len(steps)) + 1).round()
    times, over_time = _over_time(steps, sums, worked_s)
    slowest = np.argsort(steps["asked_s"] - steps["delivered_s"], kind="stable")[:SLOWEST]
    return Curves(
        rank=trace.rank, host=trace.host, times=times + (trace.began_unix_s - trace.began_s),
        over_time=over_time, ordinals=ordinals, over_steps=sums[ordinals.astype(np.int64)],
        epochs=epochs, slowest=steps[slowest], total=sums[-1],
    )  # fmt: skip


def _add_amounts(
    amounts: NDArray[np.float64], steps: NDArray[np.void], evidence: Evidence
) -> NDArray[np.float64]:
    """Fill in what each step adds, shape (steps, columns); return how long its consumer worked before it."""
    waited_s = steps["delivered_s"] - steps["asked_s"]
    worked_s = np.zeros(len(steps))
    if len(steps):
        # Between two passes nobody worked on a batch: validation, a checkpoint, or a resume.
        same = (np.diff(steps["epoch"].astype(np.int64)) == 0) & (
            np.diff(steps["step"].astype(np.int64)) > 0
        )
        between = steps["asked_s"][1:] - steps["delivered_s"][:-1]
        worked_s[1:] = np.where(same & (between > 0), between, 0.0)
    amounts[:, :4] = np.stack([worked_s, waited_s, steps["samples"], np.ones(len(steps))], axis=1)
    phases = steps["waited_s"].astype(np.float64)
    # They add up to the wait, but for rounding; what a foreign trace does not say is `read`.
    total = phases.sum(axis=1)
    scale = np.divide(waited_s, total, out=np.zeros_like(total), where=total > 0)
    phases *= scale[:, None]
    phases[total <= 0, PHASES.index("read")] = waited_s[total <= 0]
    first = 4 + len(PHASES)
    amounts[:, 4:first] = phases
    amounts[:, first : first + len(TIERS)] = steps["bytes"]
    for at in range(0, len(steps), _AT_ONCE):
        rows = slice(at, at + _AT_ONCE)
        amounts[rows, first + len(TIERS) :] = causes_by_step(steps[rows], evidence)
    return worked_s


def _over_time(
    steps: NDArray[np.void], sums: NDArray[np.float64], worked_s: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums at even moments: a step's work grows until the next batch is asked for, then all else does."""
    if not len(steps):
        return np.zeros(1), np.zeros((1, len(COLUMNS)))
    asked, delivered = steps["asked_s"], np.maximum.accumulate(steps["delivered_s"])
    times = np.linspace(asked[0] - worked_s[0], delivered[-1], POINTS)
    at = np.minimum(np.searchsorted(delivered, times), len(steps) - 1)
    before, after = sums[at], sums[at + 1]
    waited = _share(times - asked[at], delivered[at] - asked[at])
    over_time = before + (after - before) * waited[:, None]
    worked = _share(times - asked[at] + worked_s[at], worked_s[at])
    over_time[:, 0] = before[:, 0] + (after - before)[:, 0] * worked
    return times, over_time


def _share(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far something has come, 0 to 1; what takes no time is done as soon as it has begun."""
    done = np.where(part >= 0, 1.0, 0.0)
    return np.clip(np.divide(part, whole, out=done, where=whole > 0), 0.0, 1.0)


def _epochs(
    steps: NDArray[np.void], amounts: NDArray[np.float64], offset_s: float
) -> list[EpochSum]:
    if not len(steps):
        return []
    order = np.argsort(steps["epoch"], kind="stable")
    if np.all(np.diff(order) == 1):  # without a copy: of a long run they take gigabytes
        order = slice(None)  # type: ignore[assignment]
    numbers, begins = np.unique(steps["epoch"][order], return_index=True)
    sums = np.add.reduceat(amounts[order], begins, axis=0)
    began = np.minimum.reduceat(steps["asked_s"][order], begins) + offset_s
    ended = np.maximum.reduceat(steps["delivered_s"][order], begins) + offset_s
    each = zip(numbers.tolist(), sums, began.tolist(), ended.tolist(), strict=True)
    return [EpochSum(*one) for one in islice(each, _EPOCHS_MAX)]


_EPOCHS_MAX: Final = 4096
