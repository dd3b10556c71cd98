"""Traced: runs that wrote a trace, as job pages: their tuners' decisions, their ranks, every step.

A trace may be written still: what is there is shown. `TracedRuns` knows folders by name; the sums are those of
the report (`headrace.insight.report.figures`).
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.insight.report.figures import CAUSES, COLUMNS, columns_of, curves_of, evidence_of
from headrace.plane.stage import TIERS
from headrace.telemetry.history import JobRecord
from headrace.trace import read_run
from headrace.trace.format import finite
from headrace.web.cluster import plain
from headrace.web.views import job_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.trace import RankTrace, Run

PREFIX: Final = "run:"
"""What the id of a traced run begins with, where jobs have the scheduler's number."""

POINTS: Final = 120
RUNNING_S: Final = 30.0
"""A trace without an end that was written to so lately is of a run that runs."""

_DECISIONS_MAX: Final = 200


class TracedRuns:
    """Folders of runs, by their names."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [Path(folder).absolute() for folder in folders]

    def by_id(self) -> dict[str, Path]:
        """What there is now, by id."""
        by_id: dict[str, Path] = {}
        for folder in self._folders:
            inside: list[Path] = []
            with contextlib.suppress(OSError):
                inside = [] if _is_run(folder) else sorted(filter(_is_run, folder.iterdir()))
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
        return None if path is None else _page(read_run(path), name, now_s)


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _page(run: Run, name: str, now_s: float) -> dict[str, Any]:
    curves = [curves_of(rank, evidence_of(rank)) for rank in run.ranks if len(rank.steps)]
    began_s = finite(run.facts.get("began_unix_s"))
    first = min((float(each.times[0]) for each in curves), default=began_s)
    last = max((float(each.times[-1]) for each in curves), default=first)
    # Of a short run a moment holds a few steps of each rank.
    steps = max((each.total[COLUMNS.index("steps")] for each in curves), default=0)
    points = min(POINTS, max(2, int(steps) // 3))
    edges = np.linspace(first, max(last, first + 1e-6), points + 1)
    sums = np.zeros((points + 1, len(COLUMNS)))
    for each in curves:
        for column in range(len(COLUMNS)):
            sums[:, column] += np.interp(edges, each.times, each.over_time[:, column])
    moments = np.diff(sums, axis=0)
    tiers = columns_of(moments, *TIERS).T / (edges[1] - edges[0])
    decisions = next(filter(None, (list(_decisions(rank)) for rank in run.ranks)), [])
    lately = max(1, points // 20)
    ended = all(rank.of_kind("end") for rank in run.ranks) and bool(run.ranks)
    page = job_page(
        _record(run, name, sums[-1], first, last),
        edges[1:].tolist(),
        use=[None] * points,
        stall=[_stall(moment) for moment in moments],
        tiers={tier: line.tolist() for tier, line in zip(TIERS, tiers, strict=True) if line.any()},
        events=decisions[-_DECISIONS_MAX:],
        ranks=[(each.rank, each.host, _stall(each.total) or 0.0) for each in curves],
        running=not ended and now_s - last < RUNNING_S,
        gpus=len({rank.rank for rank in run.ranks}),
        now=_stall(moments[-lately:].sum(axis=0)),
    )
    notes = sorted({plain(rank.cut) for rank in run.ranks if rank.cut})
    return {**page, "traced": True, "notes": notes}


def _stall(sums: NDArray[np.float64]) -> float | None:
    """Share of the time that was waited; None: nothing is known of it."""
    worked_s, waited_s = columns_of(sums, "worked_s", "waited_s").tolist()
    return waited_s / (worked_s + waited_s) if worked_s + waited_s > 0 else None


def _record(
    run: Run, name: str, total: NDArray[np.float64], first: float, last: float
) -> JobRecord:
    amounts = dict(zip(COLUMNS, total.tolist(), strict=True))
    command = run.facts.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    script = next((Path(word).name for word in words[1:] if not word.startswith("-")), "")
    return JobRecord(
        job_id=name,
        name=script,
        nodes=tuple(sorted({rank.host for rank in run.ranks if rank.host})),
        first_s=first,
        last_s=last,
        measured=True,
        figures={
            ("seconds", "", ""): max(0.0, last - first),
            ("worked_s", "", ""): amounts["worked_s"],
            ("samples", "", ""): amounts["samples"],
            **{("stall_s", cause.value, ""): amounts[column] for cause, column in CAUSES.items()},
            **{("tier_bytes", tier, ""): amounts[tier] for tier in TIERS},
        },
    )


def _decisions(rank: RankTrace) -> Iterator[dict[str, Any]]:
    """What a rank's tuner did; those of other ranks do much the same."""
    for event in rank.of_kind("decision"):
        before, after = event.get("before"), event.get("after")
        if not isinstance(before, dict) or not isinstance(after, dict):
            continue
        for knob, value in after.items():
            if before.get(knob) != value:
                yield {
                    "at_s": rank.unix_s(float(event["at_s"])), "knob": str(knob),
                    "before": _value(before.get(knob)), "after": _value(value),
                    "why": str(event.get("reason", "")), "kept": event.get("action") != "roll back",
                }  # fmt: skip


def _value(value: object) -> object:
    """A plain value of a file that may say anything."""
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else str(value)
    return value if isinstance(value, int) else str(value)
