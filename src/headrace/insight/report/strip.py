"""Strip: the stall of each step by its cause: the report's first picture, and the tables behind it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.base.text import counted, percent_text, seconds_text
from headrace.insight.report.curves import CAUSES, columns_of
from headrace.insight.report.figures import causes_of, phases_of
from headrace.insight.report.words import (
    PHASE_WORDS,
    cause_colours,
    cause_word,
)
from headrace.pages.charts import Part, areas, count_axis, figure, share_axis, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.insight.report.figures import Epoch, RunFigures

__all__ = ["stall_strip"]

STEP_BINS: Final = 180
TABLE_ROWS: Final = 30


def stall_strip(run: RunFigures) -> str:
    """Share of each step that was waited, by its cause."""
    if run.main is None:
        return ""
    edges, sums = run.main.by_step(STEP_BINS)
    total = run.main.total
    whole = float(columns_of(total, "waited_s")[0])
    found = [(c, spent) for c, spent in causes_of(total).items() if spent > _CAUSE_SEEN * whole]
    if not found:
        return ""
    colours = cause_colours(run.causes)
    parts = [Part(cause_word(cause), spent, "", colours[cause]) for cause, spent in found]
    shares = _cause_shares(sums, [c for c, _ in found])
    top = _top(float(shares.sum(axis=1).max()))
    ranks = len({curve.rank for curve in run.main.curves})
    told = list(zip(_stretches(edges), shares, strict=True))
    drawn = areas(
        "Share of each step's time that went to waiting for data, by cause", parts, shares.T / top,
        count_axis(float(edges[-1]), "step of the run"), share_axis("of a step's time", top),
        [f"steps {steps}: {_causes_told(row, found)}" for steps, row in told],
        _beginnings(run.main.epochs(), ranks),
    )  # fmt: skip
    said = (
        f"Of each step's time, over {counted(ranks, 'rank')}, by why it waited: the rest is the "
        "training's own work."
    )
    if Cause.SLOW_RANK in run.causes:
        said += " Waiting for a slower rank is part of that work here: it comes after the batch."
    return figure("Stall by step", drawn, _stall_tables(run, edges, sums, found), said)


_CAUSE_SEEN: Final = 0.0005
"""Causes of a smaller share of the wait are not drawn."""


def _cause_shares(sums: NDArray[np.float64], causes: Sequence[Cause]) -> NDArray[np.float64]:
    """Of each stretch's time, shape (stretches, causes)."""
    seconds = columns_of(sums, "worked_s", "waited_s").sum(axis=1)[:, None]
    waited = columns_of(sums, *(CAUSES[cause] for cause in causes))
    shares: NDArray[np.float64] = np.divide(
        waited, seconds, out=np.zeros_like(waited), where=seconds > 0
    )
    return shares


def _stretches(edges: NDArray[np.float64]) -> list[str]:
    return [
        f"{begin:,.0f} to {end - 1:,.0f}" if end - begin > 1 else f"{begin:,.0f}"
        for begin, end in pairwise(edges)
    ]


def _causes_told(shares: NDArray[np.float64], found: Sequence[tuple[Cause, float]]) -> str:
    most = [
        f", {cause_word(cause)} {percent_text(share)}"
        for (cause, _), share in zip(found, shares, strict=True)
        if share >= _CAUSE_SEEN
    ]
    return f"{percent_text(shares.sum())} waited" + "".join(most[:4])


def _stall_tables(
    run: RunFigures,
    edges: NDArray[np.float64],
    sums: NDArray[np.float64],
    found: Sequence[tuple[Cause, float]],
) -> str:
    """By cause over the steps, and what batches were doing meanwhile."""
    assert run.main is not None
    every = -(-len(sums) // TABLE_ROWS)
    begins = np.arange(0, len(sums), every)
    shares = _cause_shares(np.add.reduceat(sums, begins), [cause for cause, _ in found])
    steps = _stretches(np.append(edges[begins], edges[-1]))
    rows = [
        (at, percent_text(row.sum()), *map(percent_text, row))
        for at, row in zip(steps, shares, strict=True)
    ]
    by_step = table(["steps", "waited", *(cause_word(cause) for cause, _ in found)], rows)
    whole = float(columns_of(run.main.total, "waited_s")[0])
    phases = [
        (PHASE_WORDS[phase], seconds_text(spent), percent_text(spent / whole))
        for phase, spent in phases_of(run.main.total).items()
        if spent > 0
    ]
    return by_step + table(["what the batch was doing", "waited, all ranks", "of the wait"], phases)


def _beginnings(found: Sequence[Epoch], ranks: int) -> list[tuple[float, str]]:
    """Where epochs begin, as shares of all steps; none where there are too many."""
    steps = np.cumsum([one.of("steps") / ranks for one in found])
    if not 1 < len(found) <= _EPOCHS_MARKED:
        return []
    return [
        (float(before / steps[-1]), f"epoch {one.epoch}")
        for before, one in zip(steps[:-1], found[1:], strict=True)
    ]


_EPOCHS_MARKED: Final = 8


def _top(most: float) -> float:
    """A round share above all."""
    return next((top for top in (0.02, 0.05, 0.1, 0.2, 0.5) if most <= top), 1.0)
