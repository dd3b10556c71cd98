"""Pictures: the report's, each with what to see in it and the table behind it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.base.text import (
    bytes_text,
    counted,
    duration_text,
    number_text,
    percent_text,
    seconds_text,
)
from headrace.insight.report.curves import CAUSES, columns_of
from headrace.insight.report.figures import (
    PHASE_WORDS,
    TIER_COLOURS,
    TIER_WORDS,
    cause_colours,
    cause_word,
    causes_of,
    phases_of,
    stall_of,
    tiers_of,
)
from headrace.pages.charts import (
    FEW_ROWS,
    SHADES,
    Axis,
    Part,
    StepLine,
    areas,
    columns,
    count_axis,
    figure,
    heat,
    lines,
    round_up,
    share_axis,
    table,
    time_axis,
)
from headrace.plane.batch_trace import PHASES
from headrace.plane.stage import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.insight.report.figures import EpochFigures, TraceFigures

STEP_BINS: Final = 180


def stall_strip(run: TraceFigures) -> str:
    """Share of each step that was waited, by its cause."""
    if run.main is None:
        return ""
    edges, sums = run.main.by_step(STEP_BINS)
    total = run.main.total
    whole = float(columns_of(total, "waited_s")[0])
    causes = [(c, spent) for c, spent in causes_of(total).items() if spent > _CAUSE_SEEN * whole]
    if not causes:
        return ""
    colours = cause_colours(run.causes)
    parts = [Part(cause_word(cause), spent, "", colours[cause]) for cause, spent in causes]
    shares = _cause_shares(sums, [c for c, _ in causes])
    top = _top(float(shares.sum(axis=1).max()))
    ranks = len({curve.rank for curve in run.main.curves})
    stretches = list(zip(_stretches(edges), shares, strict=True))
    drawn = areas(
        "Share of each step's time that went to waiting for data, by cause", parts, shares.T / top,
        count_axis(float(edges[-1]), "step of the run"), share_axis("of a step's time", top),
        [f"steps {steps}: {_causes_text(row, causes)}" for steps, row in stretches],
        _beginnings(run.main.epochs(), ranks),
    )  # fmt: skip
    caption = (
        f"Of each step's time, over {counted(ranks, 'rank')}, by why it waited: the rest is the "
        "training's own work."
    )
    if Cause.SLOW_RANK in run.causes:
        caption += " Waiting for a slower rank is part of that work here: it comes after the batch."
    return figure("Stall by step", drawn, _stall_tables(run, edges, sums, causes), caption)


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


def _causes_text(shares: NDArray[np.float64], causes: Sequence[tuple[Cause, float]]) -> str:
    most = [
        f", {cause_word(cause)} {percent_text(share)}"
        for (cause, _), share in zip(causes, shares, strict=True)
        if share >= _CAUSE_SEEN
    ]
    return f"{percent_text(shares.sum())} waited" + "".join(most[:4])


def _stall_tables(
    run: TraceFigures,
    edges: NDArray[np.float64],
    sums: NDArray[np.float64],
    causes: Sequence[tuple[Cause, float]],
) -> str:
    """By cause over the steps, and what batches were doing meanwhile."""
    assert run.main is not None
    every = -(-len(sums) // TABLE_ROWS)
    begins = np.arange(0, len(sums), every)
    shares = _cause_shares(np.add.reduceat(sums, begins), [cause for cause, _ in causes])
    steps = _stretches(np.append(edges[begins], edges[-1]))
    rows = [
        (at, percent_text(row.sum()), *map(percent_text, row))
        for at, row in zip(steps, shares, strict=True)
    ]
    by_step = table(["steps", "waited", *(cause_word(cause) for cause, _ in causes)], rows)
    whole = float(columns_of(run.main.total, "waited_s")[0])
    phases = [
        (PHASE_WORDS[phase], seconds_text(spent), percent_text(spent / whole))
        for phase, spent in phases_of(run.main.total).items()
        if spent > 0
    ]
    return by_step + table(["what the batch was doing", "waited, all ranks", "of the wait"], phases)


def _beginnings(epochs: Sequence[EpochFigures], ranks: int) -> list[tuple[float, str]]:
    """Where epochs begin, as shares of all steps; none where there are too many."""
    steps = np.cumsum([one.of("steps") / ranks for one in epochs])
    if not 1 < len(epochs) <= _EPOCHS_MARKED:
        return []
    return [
        (float(before / steps[-1]), f"epoch {one.epoch}")
        for before, one in zip(steps[:-1], epochs[1:], strict=True)
    ]


_EPOCHS_MARKED: Final = 8


def _top(most: float) -> float:
    """A round share above all."""
    return next((top for top in (0.02, 0.05, 0.1, 0.2, 0.5) if most <= top), 1.0)


# -- pictures ----------------------------------------------------------------------------------------

TIME_BINS: Final = 150
ROWS_MOST: Final = 64
EPOCHS_MOST: Final = 60
TABLE_ROWS: Final = 30


def pictures(run: TraceFigures) -> list[str]:
    """All that there is something to draw for, from the most telling on."""
    drawn = [
        draw(run) for draw in (stall_strip, rank_map, bytes_by_tier, latency_map, decisions, epochs)
    ]
    return [picture for picture in drawn if picture]


def bytes_by_tier(run: TraceFigures) -> str:
    """Rate at which bytes came, by where from, over time."""
    edges, sums = run.over_time(TIME_BINS)
    total = tiers_of(run.total)
    if not total or run.seconds <= 0:
        return ""
    seconds = np.diff(edges)
    rates = np.stack([columns_of(sums, tier)[..., 0].sum(axis=0) / seconds for tier in total])
    top = round_up(float(rates.sum(axis=0).max()))
    whole = sum(total.values())
    parts = [
        Part(TIER_WORDS[t], n, f"{bytes_text(n)}, {percent_text(n / whole)}", TIER_COLOURS[t])
        for t, n in total.items()
    ]
    each = [
        f"{duration_text(edge - edges[0])}: {bytes_text(column.sum())}/s"
        for edge, column in zip(edges[:-1], rates.T, strict=True)
    ]
    up = Axis("", [(at, f"{bytes_text(at * top)}/s") for at in (0.0, 0.5, 1.0)])
    drawn = areas(
        "Bytes delivered per second, by where they came from", parts, rates / top,
        time_axis(run.seconds), up, each,
    )  # fmt: skip
    rows = [(TIER_WORDS[t], bytes_text(n), percent_text(n / whole)) for t, n in total.items()]
    behind = table(["came from", "bytes", "of all"], rows) + _rates_table(edges, rates, list(total))
    return figure("Bytes by where they came from", drawn, behind, "All ranks together, over time.")


def _rates_table(
    edges: NDArray[np.float64], rates: NDArray[np.float64], tiers: Sequence[str]
) -> str:
    every = max(1, rates.shape[1] // TABLE_ROWS)
    rows = [
        (
            duration_text(edges[at] - edges[0]),
            *(f"{bytes_text(n)}/s" for n in rates[:, at : at + every].mean(axis=1)),
        )
        for at in range(0, rates.shape[1], every)
    ]
    return table(["from", *(TIER_WORDS[tier] for tier in tiers)], rows)


def latency_map(run: TraceFigures) -> str:
    """How long reads took, over time."""
    counts = run.latency_map(TIME_BINS)
    seen = np.flatnonzero(counts.sum(axis=0))
    if not len(seen):
        return ""
    low, high = max(0, int(seen[0]) - 1), min(LATENCY_BUCKETS, int(seen[-1]) + 2)
    counts = counts[:, low:high]
    whole = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, whole, out=np.zeros_like(counts), where=whole > 0)
    shades = np.where(whole > 0, np.searchsorted(_READS_SHARES, shares, side="left"), -1)
    legend = ["none", *(f"up to {100 * to:g} %" for to in _READS_SHARES[1:-1]), "more"]
    marks = [
        ((high - bucket) / (high - low), _bucket_text(bucket))  # the first row is the highest
        for bucket in range(low, high + 1)
        if bucket % 4 == 0
    ]
    drawn = heat(
        "Reads by how long they took, over time", np.flipud(shades.T).astype(np.int64),
        time_axis(run.seconds), Axis("", marks, crowded=True), legend,
        height=min(300.0, max(90.0, 12.0 * (high - low))),
    )  # fmt: skip
    total = counts.sum(axis=0)
    table_rows = [
        (
            f"{_bucket_text(low + at)} to {_bucket_text(low + at + 1)}",
            f"{count:,.0f}", percent_text(count / total.sum()),
        )
        for at, count in enumerate(total) if count
    ]  # fmt: skip
    behind = table(["latency of a read", "reads", "of all"], table_rows)
    caption = "Each column is a stretch of time: the stronger the colour, the more of its reads took that long."
    return figure("Latency of reads", drawn, behind, caption)


def _bucket_text(bucket: int) -> str:
    """Where a bucket of latencies begins."""
    return seconds_text(2.0 ** (bucket / 2) * 1e-6)


_READS_SHARES: Final = np.array([0.0, 0.02, 0.08, 0.2, 0.5, 1.0])


def decisions(run: TraceFigures) -> str:
    """Where knobs stood over time, and when the tuner decided something."""
    if not run.decisions and not run.knobs:
        return ""
    first, last = run.span_s
    seconds = max(last - first, 1e-9)
    knob_lines = []
    for colour, (name, points) in zip(("l1", "l2", "l3"), sorted(run.knobs.items()), strict=False):
        most = max(value for _, value in points)
        top = bytes_text(most) if name.endswith("bytes") else number_text(most)
        before = [None, *(value for _, value in points)]
        shown = [  # only where a line goes up or down
            (min(1.0, max(0.0, (at - first) / seconds)), value / most)
            for (at, value), last in zip(points, before, strict=False)
            if value != last
        ]
        knob_lines.append(StepLine(f"{name.replace('_', ' ')} (top: {top})", shown, colour))
    marks = [
        (
            min(1.0, max(0.0, (one.at_s - first) / seconds)),
            f"rank {one.rank}: {one.action} {one.change}: {one.reason}",
        )
        for one in run.decisions[:_MARKS_MOST]
    ]
    rows = [
        (
            duration_text(max(0.0, one.at_s - first)), one.rank, one.action, one.change, one.reason,
            one.evidence,
        )
        for one in run.decisions[:_DECISIONS_SHOWN]
    ]  # fmt: skip
    drawn = lines(
        "Knobs over time, and decisions of the tuner", knob_lines, marks, time_axis(seconds),
        Axis("", [(0.0, "0"), (1.0, "top")]),
    )  # fmt: skip
    heads = ["after", "rank", "decision", "what it turned", "why", "evidence"]
    behind = table(heads, rows).replace("<table>", '<table class="words">', 1)
    hidden = len(run.decisions) - len(rows)
    caption = (
        f"{counted(len(run.decisions), 'decision')}, upright bars; knobs are those of one rank."
    )
    if hidden > 0:
        caption += f" The table has the first {len(rows)}."
    return figure("What the tuner did", drawn, behind, caption)


_MARKS_MOST: Final = 400
_DECISIONS_SHOWN: Final = 100


def rank_map(run: TraceFigures) -> str:
    """Share of each rank's time that was waited, over time."""
    if not run.ranks or run.seconds <= 0:
        return ""
    _, sums = run.over_time(TIME_BINS)
    waited = columns_of(sums, "waited_s")[..., 0]
    seconds = columns_of(sums, "worked_s", "waited_s").sum(axis=2)
    shares = np.divide(waited, seconds, out=np.full_like(waited, -1.0), where=seconds > 1e-9)
    together = -(-len(shares) // ROWS_MOST)
    rows = [shares[at : at + together].max(axis=0) for at in range(0, len(shares), together)]
    grid = np.stack(rows)
    shades = np.where(grid < 0, -1, np.searchsorted(_STALL_SHARES, grid, side="left")).clip(
        -1, SHADES - 1
    )
    names = [run.ranks[at].about.rank for at in range(0, len(shares), together)]
    every = max(1, -(-len(names) // 16))
    ticks = [((at + 0.5) / len(names), f"rank {names[at]}") for at in range(0, len(names), every)]
    legend = ["under 1 %", "to 5 %", "to 15 %", "to 30 %", "to 60 %", "more"]
    drawn = heat(
        "Share of each rank's time that was waited, over time", shades.astype(np.int64),
        time_axis(run.seconds), Axis("rank", ticks, crowded=len(names) > FEW_ROWS), legend,
    )  # fmt: skip
    order = sorted(run.ranks, key=lambda rank: -stall_of(rank.total))
    table_rows = [
        (
            f"rank {rank.about.rank}", rank.about.host or "-", percent_text(stall_of(rank.total)),
            duration_text(float(columns_of(rank.total, "waited_s")[0])),
            f"{float(columns_of(rank.total, 'steps')[0]):,.0f}",
        )
        for rank in order[:_RANKS_SHOWN]
    ]  # fmt: skip
    behind = table(["rank", "host", "waited", "seconds", "steps"], table_rows)
    note = (
        "A row for each rank"
        if together == 1
        else f"A row for {together} ranks, that of the one that waited most"
    )
    hidden = len(order) - len(table_rows)
    note += ": the stronger the colour, the more of the time it waited."
    if hidden > 0:
        note += f" The table has the {len(table_rows)} that waited most."
    return figure("Which ranks waited, and when", drawn, behind, note)


_STALL_SHARES: Final = np.array([0.01, 0.05, 0.15, 0.3, 0.6])
_RANKS_SHOWN: Final = 256


def epochs(run: TraceFigures) -> str:
    """Epoch over epoch."""
    if run.main is None:
        return ""
    epochs = run.main.epochs()
    if len(epochs) < 2:
        return ""
    chosen = np.linspace(0, len(epochs) - 1, min(len(epochs), EPOCHS_MOST)).round().astype(int)
    shown = [epochs[at] for at in chosen]
    parts = [Part(str(one.epoch), 100 * one.stall, percent_text(one.stall), "h4") for one in shown]
    drawn = columns(
        "Share of each epoch that was waited", parts, lambda value: f"{value:.1f} %", below="epoch"
    )
    rows = [
        (
            one.epoch, duration_text(one.seconds), percent_text(one.stall),
            f"{one.of('samples') / one.seconds:,.0f}" if one.seconds > 0 else "-",
            ", ".join(f"{TIER_WORDS[t]} {bytes_text(n)}" for t, n in tiers_of(one.sums).items()) or "-",
        )
        for one in shown
    ]  # fmt: skip
    behind = table(["epoch", "took", "waited", "samples/s", "bytes from"], rows)
    caption = "Share of all ranks' time that went to waiting for data."
    if len(shown) < len(epochs):
        caption += f" {len(shown)} of {len(epochs):,} epochs, evenly chosen."
    return figure("Epoch over epoch", drawn, behind, caption)


def slowest(run: TraceFigures) -> str:
    """The longest waits, as a table."""
    if run.main is None:
        return ""
    waits = [(curve, row) for curve in run.main.curves for row in curve.slowest]
    waits.sort(key=lambda one: float(one[1]["asked_s"] - one[1]["delivered_s"]))
    rows = []
    for curve, row in waits[:12]:
        waited_s = float(row["delivered_s"] - row["asked_s"])
        if waited_s <= 0:
            break
        phase = PHASES[int(np.argmax(row["waited_s"]))]
        rows.append((
            int(row["epoch"]), f"{int(row['step']):,}", curve.rank, seconds_text(waited_s),
            PHASE_WORDS[phase], bytes_text(float(row["bytes"].sum())),
        ))  # fmt: skip
    if not rows:
        return ""
    return "<h2>The longest waits</h2>" + table(
        ["epoch", "step", "rank", "waited", "its batch was mostly", "bytes"], rows
    )
