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
from headrace.insight.report.curves import CAUSES, columns_of, stall_of
from headrace.insight.report.figures import (
    PHASE_WORDS,
    TIER_COLOURS,
    TIER_WORDS,
    cause_colours,
    cause_word,
    causes_of,
    phases_of,
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
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from headrace.insight.report.figures import TraceFigures

STEP_BINS: Final = 180
TIME_BINS: Final = 150
ROWS_MOST: Final = 64
EPOCHS_MOST: Final = 60
TABLE_ROWS: Final = 30
_CAUSE_SEEN: Final = 0.0005
"""Causes of a smaller share of the wait are not drawn."""
_EPOCHS_MARKED: Final = 8
_READS_SHARES: Final = np.array([0.0, 0.02, 0.08, 0.2, 0.5, 1.0])
_STALL_SHARES: Final = np.array([0.01, 0.05, 0.15, 0.3, 0.6])
_MARKS_MOST: Final = 400
_DECISIONS_SHOWN: Final = 100
_RANKS_SHOWN: Final = 256


def pictures(run: TraceFigures) -> list[str]:
    """All that there is something to draw for, from the most telling on."""
    drawn = [
        draw(run) for draw in (stall_strip, rank_map, bytes_by_tier, latency_map, decisions, epochs)
    ]
    return [picture for picture in drawn if picture]


def stall_strip(run: TraceFigures) -> str:
    """Share of each step that was waited, by its cause."""
    if run.main is None:
        return ""
    edges, sums = run.main.by_step(STEP_BINS)
    total = run.main.total
    whole = float(columns_of(total, "waited_s")[0])
    spent = {c: seconds for c, seconds in causes_of(total).items() if seconds > _CAUSE_SEEN * whole}
    if not spent:
        return ""
    names, colours = [cause_word(cause) for cause in spent], cause_colours(run.causes)
    parts = [
        Part(cause_word(cause), seconds, "", colours[cause]) for cause, seconds in spent.items()
    ]
    shares = _cause_shares(sums, spent)
    most = float(shares.sum(axis=1).max())
    top = next((top for top in (0.02, 0.05, 0.1, 0.2, 0.5) if most <= top), 1.0)
    titles = []
    for steps, row in zip(_stretches(edges), shares, strict=True):
        of = [
            f", {name} {percent_text(share)}"
            for name, share in zip(names, row, strict=True)
            if share >= _CAUSE_SEEN
        ]
        titles.append(f"steps {steps}: {percent_text(row.sum())} waited" + "".join(of[:4]))
    ranks = len({curve.rank for curve in run.main.curves})
    epochs = run.main.epochs()
    begins = np.cumsum([one.of("steps") for one in epochs])
    marks = [
        (float(before / begins[-1]), f"epoch {one.epoch}")
        for before, one in zip(begins[:-1], epochs[1:], strict=True)
    ]
    drawn = areas(
        "Share of each step's time that went to waiting for data, by cause", parts, shares.T / top,
        count_axis(float(edges[-1]), "step of the run"), share_axis("of a step's time", top),
        titles, marks if len(epochs) <= _EPOCHS_MARKED else (),
    )  # fmt: skip
    # The tables: by cause over the steps, and what batches were doing meanwhile.
    begin = np.arange(0, len(sums), -(-len(sums) // TABLE_ROWS))
    by_step = _cause_shares(np.add.reduceat(sums, begin), spent)
    rows = [
        (at, percent_text(row.sum()), *map(percent_text, row))
        for at, row in zip(_stretches(np.append(edges[begin], edges[-1])), by_step, strict=True)
    ]
    phases = [
        (PHASE_WORDS[phase], seconds_text(seconds), percent_text(seconds / whole))
        for phase, seconds in phases_of(total).items()
        if seconds > 0
    ]
    tables = table(["steps", "waited", *names], rows)
    tables += table(["what the batch was doing", "waited, all ranks", "of the wait"], phases)
    caption = (
        f"Of each step's time, over {counted(ranks, 'rank')}, by why it waited: the rest is the "
        "training's own work."
    )
    if Cause.SLOW_RANK in run.causes:
        caption += " Waiting for a slower rank is part of that work here: it comes after the batch."
    return figure("Stall by step", drawn, tables, caption)


def _cause_shares(sums: NDArray[np.float64], causes: Iterable[Cause]) -> NDArray[np.float64]:
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


def bytes_by_tier(run: TraceFigures) -> str:
    """Rate at which bytes came, by where from, over time."""
    edges, sums = run.over_time(TIME_BINS)
    total = tiers_of(run.total)
    if not total or run.seconds <= 0:
        return ""
    rates = columns_of(sums, *total).sum(axis=0).T / np.diff(edges)
    top = round_up(float(rates.sum(axis=0).max()))
    whole = sum(total.values())
    rows = [(TIER_WORDS[t], bytes_text(n), percent_text(n / whole)) for t, n in total.items()]
    parts = [
        Part(name, n, f"{size}, {share}", TIER_COLOURS[t])
        for (t, n), (name, size, share) in zip(total.items(), rows, strict=True)
    ]
    times = [duration_text(edge - edges[0]) for edge in edges[:-1]]
    drawn = areas(
        "Bytes delivered per second, by where they came from", parts, rates / top,
        time_axis(run.seconds), Axis("", [(at, f"{bytes_text(at * top)}/s") for at in (0.0, 0.5, 1.0)]),
        [f"{at}: {bytes_text(n)}/s" for at, n in zip(times, rates.sum(axis=0), strict=True)],
    )  # fmt: skip
    every = TIME_BINS // TABLE_ROWS
    over_time = [
        (times[at], *(f"{bytes_text(n)}/s" for n in rates[:, at : at + every].mean(axis=1)))
        for at in range(0, TIME_BINS, every)
    ]
    tables = table(["came from", "bytes", "of all"], rows)
    tables += table(["from", *(TIER_WORDS[tier] for tier in total)], over_time)
    return figure("Bytes by where they came from", drawn, tables, "All ranks together, over time.")


def latency_map(run: TraceFigures) -> str:
    """How long reads took, over time."""
    counts = run.latency_map(TIME_BINS)
    seen = np.flatnonzero(counts.sum(axis=0))
    if not len(seen):
        return ""
    low, high = max(0, int(seen[0]) - 1), min(LATENCY_BUCKETS, int(seen[-1]) + 2)
    begins = [seconds_text(2.0 ** (bucket / 2) * 1e-6) for bucket in range(low, high + 1)]
    counts = counts[:, low:high]
    whole = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, whole, out=np.zeros_like(counts), where=whole > 0)
    shades = np.where(whole > 0, np.searchsorted(_READS_SHARES, shares, side="left"), -1)
    legend = ["none", *(f"up to {100 * to:g} %" for to in _READS_SHARES[1:-1]), "more"]
    marks = [
        ((high - bucket) / (high - low), begins[bucket - low])  # the first row is the highest
        for bucket in range(low, high + 1)
        if bucket % 4 == 0
    ]
    drawn = heat(
        "Reads by how long they took, over time", np.flipud(shades.T).astype(np.int64),
        time_axis(run.seconds), Axis("", marks, crowded=True), legend,
        height=min(300.0, max(90.0, 12.0 * (high - low))),
    )  # fmt: skip
    total = counts.sum(axis=0)
    rows = [
        (f"{begin} to {end}", f"{count:,.0f}", percent_text(count / total.sum()))
        for (begin, end), count in zip(pairwise(begins), total, strict=True)
        if count
    ]
    tables = table(["latency of a read", "reads", "of all"], rows)
    caption = "Each column is a stretch of time: the stronger the colour, the more of its reads took that long."
    return figure("Latency of reads", drawn, tables, caption)


def decisions(run: TraceFigures) -> str:
    """Where knobs stood over time, and when the tuner decided something."""
    if not run.decisions and not run.knobs:
        return ""
    first, last = run.span_s
    seconds = max(last - first, 1e-9)

    def place(at_s: float) -> float:
        return min(1.0, max(0.0, (at_s - first) / seconds))

    knob_lines = []
    for colour, (name, points) in zip(("l1", "l2", "l3"), sorted(run.knobs.items()), strict=False):
        most = max(value for _, value in points)
        top = bytes_text(most) if name.endswith("bytes") else number_text(most)
        before = [None, *(value for _, value in points)]
        shown = [  # only where a line goes up or down
            (place(at_s), value / most)
            for (at_s, value), last_value in zip(points, before, strict=False)
            if value != last_value
        ]
        knob_lines.append(StepLine(f"{name.replace('_', ' ')} (top: {top})", shown, colour))
    marks = [
        (place(one.at_unix_s), f"rank {one.rank}: {one.action} {one.change}: {one.reason}")
        for one in run.decisions[:_MARKS_MOST]
    ]
    drawn = lines(
        "Knobs over time, and decisions of the tuner", knob_lines, marks, time_axis(seconds),
        Axis("", [(0.0, "0"), (1.0, "top")]),
    )  # fmt: skip
    rows = [
        (duration_text(max(0.0, at_s - first)), *of)
        for at_s, *of in run.decisions[:_DECISIONS_SHOWN]
    ]
    heads = ["after", "rank", "decision", "what it turned", "why", "evidence"]
    caption = (
        f"{counted(len(run.decisions), 'decision')}, upright bars; knobs are those of one rank."
    )
    if len(run.decisions) > len(rows):
        caption += f" The table has the first {len(rows)}."
    return figure("What the tuner did", drawn, table(heads, rows, words=True), caption)


def rank_map(run: TraceFigures) -> str:
    """Share of each rank's time that was waited, over time."""
    if not run.ranks or run.seconds <= 0:
        return ""
    _, sums = run.over_time(TIME_BINS)
    waited = columns_of(sums, "waited_s")[..., 0]
    seconds = columns_of(sums, "worked_s", "waited_s").sum(axis=2)
    shares = np.divide(waited, seconds, out=np.full_like(waited, -1.0), where=seconds > 1e-9)
    together = -(-len(shares) // ROWS_MOST)
    grid = np.maximum.reduceat(shares, np.arange(0, len(shares), together))
    shades = np.where(grid < 0, -1, np.searchsorted(_STALL_SHARES, grid, side="left")).clip(
        -1, SHADES - 1
    )
    names = [rank.about.rank for rank in run.ranks[::together]]
    every = max(1, -(-len(names) // 16))
    ticks = [((at + 0.5) / len(names), f"rank {names[at]}") for at in range(0, len(names), every)]
    legend = ["under 1 %", "to 5 %", "to 15 %", "to 30 %", "to 60 %", "more"]
    drawn = heat(
        "Share of each rank's time that was waited, over time", shades.astype(np.int64),
        time_axis(run.seconds), Axis("rank", ticks, crowded=len(names) > FEW_ROWS), legend,
    )  # fmt: skip
    order = sorted(run.ranks, key=lambda rank: -stall_of(rank.total))[:_RANKS_SHOWN]
    rows = []
    for rank in order:
        waited_s, steps = columns_of(rank.total, "waited_s", "steps").tolist()
        share = percent_text(stall_of(rank.total))
        name, host = f"rank {rank.about.rank}", rank.about.host or "-"
        rows.append((name, host, share, duration_text(waited_s), f"{steps:,.0f}"))
    note = "A row for each rank"
    if together > 1:
        note = f"A row for {together} ranks, that of the one that waited most"
    note += ": the stronger the colour, the more of the time it waited."
    if len(run.ranks) > len(rows):
        note += f" The table has the {len(rows)} that waited most."
    tables = table(["rank", "host", "waited", "seconds", "steps"], rows)
    return figure("Which ranks waited, and when", drawn, tables, note)


def epochs(run: TraceFigures) -> str:
    """Epoch over epoch."""
    epochs = run.main.epochs() if run.main is not None else []
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
    caption = "Share of all ranks' time that went to waiting for data."
    if len(shown) < len(epochs):
        caption += f" {len(shown)} of {len(epochs):,} epochs, evenly chosen."
    tables = table(["epoch", "took", "waited", "samples/s", "bytes from"], rows)
    return figure("Epoch over epoch", drawn, tables, caption)


def slowest(run: TraceFigures) -> str:
    """The longest waits, as a table."""
    curves = run.main.curves if run.main is not None else []
    waits = [
        (float(row["delivered_s"] - row["asked_s"]), curve.rank, row)
        for curve in curves
        for row in curve.slowest
    ]
    waits.sort(key=lambda one: -one[0])
    rows = [
        (
            int(row["epoch"]), f"{int(row['step']):,}", rank, seconds_text(waited_s),
            PHASE_WORDS[PHASES[int(np.argmax(row["waited_s"]))]], bytes_text(float(row["bytes"].sum())),
        )
        for waited_s, rank, row in waits[:12] if waited_s > 0
    ]  # fmt: skip
    heads = ["epoch", "step", "rank", "waited", "its batch was mostly", "bytes"]
    return "<h2>The longest waits</h2>" + table(heads, rows) if rows else ""
