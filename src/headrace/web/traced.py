"""Traced: runs that wrote a trace, as job pages: their tuners' decisions, their ranks, every step.

A trace may be written still: what is there is shown. Plain functions of `headrace.trace.Run`, and
`TracedRuns`, which knows folders by name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.control.stalls.verdict import causes_by_step
from headrace.insight.report.curves import evidence_of
from headrace.plane.stage import TIERS
from headrace.telemetry.history import JobRecord
from headrace.trace import read_run
from headrace.web.cluster import plain
from headrace.web.views import job_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.trace import RankTrace, Run

PREFIX: Final = "run:"
"""What the id of a traced run begins with, where jobs have the scheduler's number."""

POINTS: Final = 120
RUNNING_S: Final = 30.0
"""A trace without an end that was written to so lately is of a run that runs."""

_STEPS_AT_ONCE: Final = 1 << 16


class TracedRuns:
    """Folders of runs, by their names."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [Path(folder).absolute() for folder in folders]

    def by_id(self) -> dict[str, Path]:
        """What there is now, by id."""
        by_id: dict[str, Path] = {}
        for folder in self._folders:
            inside = [] if _is_run(folder) else sorted(p for p in _listed(folder) if _is_run(p))
            for path in inside or [folder]:
                name, number = f"{PREFIX}{plain(path.name)}", 2
                while name in by_id:
                    name, number = f"{PREFIX}{plain(path.name)} {number}", number + 1
                by_id[name] = path
        return by_id

    def page(self, name: str, now_s: float) -> dict[str, Any] | None:
        """A run's page; None: there is no such run.

        Raises:
            TraceError: it is damaged.
            OSError: it cannot be read.
        """
        path = self.by_id().get(name)
        return None if path is None else page_of(read_run(path), name, now_s)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def page_of(run: Run, name: str, now_s: float) -> dict[str, Any]:
    """A run as a job's page."""
    ranks = [rank for rank in run.ranks if len(rank.steps)]
    spans = [_span(rank) for rank in ranks]
    first = min((span[0] for span in spans), default=_number(run.facts.get("began_unix_s")))
    last = max((span[1] for span in spans), default=first)
    # Of a short run a moment holds a few steps of each rank.
    points = min(POINTS, max(2, max((len(rank.steps) for rank in ranks), default=0) // 3))
    edges = np.linspace(first, max(last, first + 1e-6), points + 1)
    waited, worked = np.zeros(points), np.zeros(points)
    tiers = {tier: np.zeros(points) for tier in TIERS}
    for rank in ranks:
        _add(rank, edges, waited, worked, tiers)
    known = waited + worked
    width, lately = float(edges[1] - edges[0]), max(1, points // 20)
    ended = all(rank.of_kind("end") for rank in run.ranks) and bool(run.ranks)
    page = job_page(
        _record(run, name, ranks, first, last),
        edges[1:].tolist(),
        use=[None] * points,
        stall=[float(w / k) if k > 0 else None for w, k in zip(waited, known, strict=True)],
        tiers={tier: (line / width).tolist() for tier, line in tiers.items() if line.any()},
        events=_decisions(run.ranks),
        ranks=[(rank.rank, rank.host, _stall_of(rank)) for rank in ranks],
        running=not ended and now_s - last < RUNNING_S,
        gpus=len({rank.rank for rank in run.ranks}),
        now=float(waited[-lately:].sum() / known[-lately:].sum())
        if known[-lately:].any()
        else None,
    )
    notes = sorted({plain(rank.cut) for rank in run.ranks if rank.cut})
    return {**page, "traced": True, "notes": notes}


def _number(value: object) -> float:
    """A number of a file that may say anything; 0 where it is none."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _span(rank: RankTrace) -> tuple[float, float]:
    steps = rank.steps
    return rank.unix_s(float(steps["asked_s"][0])), rank.unix_s(float(steps["delivered_s"][-1]))


def _waits(rank: RankTrace) -> NDArray[np.float64]:
    waits: NDArray[np.float64] = np.maximum(0.0, rank.steps["delivered_s"] - rank.steps["asked_s"])
    return waits


def _works(rank: RankTrace) -> NDArray[np.float64]:
    """Between a delivery and the next question, within an epoch."""
    steps = rank.steps
    between = np.maximum(0.0, steps["asked_s"][1:] - steps["delivered_s"][:-1])
    same: NDArray[np.bool_] = steps["epoch"][1:] == steps["epoch"][:-1]
    works: NDArray[np.float64] = np.where(same, between, 0.0)
    return works


def _add(
    rank: RankTrace,
    edges: NDArray[np.float64],
    waited: NDArray[np.float64],
    worked: NDArray[np.float64],
    tiers: Mapping[str, NDArray[np.float64]],
) -> None:
    """Put a rank's steps into the moments in which they were delivered."""
    at = rank.began_unix_s + (rank.steps["delivered_s"] - rank.began_s)
    points = len(waited)
    place = np.clip(np.searchsorted(edges, at, "left") - 1, 0, points - 1)
    waited += np.bincount(place, _waits(rank), points)
    worked += np.bincount(place[:-1], _works(rank), points)
    for number, tier in enumerate(TIERS):
        tiers[tier][:] += np.bincount(place, rank.steps["bytes"][:, number], points)


def _stall_of(rank: RankTrace) -> float:
    waited, worked = float(_waits(rank).sum()), float(_works(rank).sum())
    return waited / (waited + worked) if waited + worked > 0 else 0.0


def _causes(ranks: Sequence[RankTrace]) -> dict[str, float]:
    """Seconds of all ranks by cause."""
    sums = np.zeros(len(Cause))
    for rank in ranks:
        evidence = evidence_of(rank)
        for at in range(0, len(rank.steps), _STEPS_AT_ONCE):
            sums += causes_by_step(rank.steps[at : at + _STEPS_AT_ONCE], evidence).sum(axis=0)
    return dict(zip((cause.value for cause in Cause), sums.tolist(), strict=True))


def _record(
    run: Run, name: str, ranks: Sequence[RankTrace], first: float, last: float
) -> JobRecord:
    figures = {
        ("seconds", "", ""): max(0.0, last - first),
        **{("stall_s", cause, ""): seconds for cause, seconds in _causes(ranks).items()},
        ("worked_s", "", ""): float(sum(_works(rank).sum() for rank in ranks)),
        ("samples", "", ""): float(sum(int(rank.steps["samples"].sum()) for rank in ranks)),
    }
    for number, tier in enumerate(TIERS):
        figures["tier_bytes", tier, ""] = float(
            sum(int(r.steps["bytes"][:, number].sum()) for r in ranks)
        )
    command = run.facts.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    script = next((Path(word).name for word in words[1:] if not word.startswith("-")), "")
    return JobRecord(
        job_id=name, name=script, nodes=tuple(sorted({rank.host for rank in run.ranks if rank.host})),
        first_s=first, last_s=last, measured=True, figures=figures,
    )  # fmt: skip


def _decisions(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """What the tuner of the first rank that has one did; those of others do much the same."""
    for rank in ranks:
        decisions = [
            {
                "at_s": rank.unix_s(float(event["at_s"])),
                "knob": knob,
                "before": before,
                "after": after,
                "why": str(event.get("reason", "")),
                "kept": event.get("action") != "roll back",
            }
            for event in rank.of_kind("decision")
            for knob, before, after in _turned(event.get("before"), event.get("after"))
        ]
        if decisions:
            return decisions[-200:]
    return []


def _turned(before: object, after: object) -> list[tuple[str, Any, Any]]:
    """The knobs that differ, with plain values."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    return [
        (str(knob), _value(before.get(knob)), _value(value))
        for knob, value in after.items()
        if before.get(knob) != value
    ]


def _value(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else str(value)
    return value if isinstance(value, int) else str(value)
