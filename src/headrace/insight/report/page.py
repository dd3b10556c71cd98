"""Page: a run as one HTML file with its pictures, as lines for a terminal, and as plain values for JSON.

The page has no script and no address: it works offline, prints, and nothing in it acts. Each picture says what
to see in it, and has its table behind it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import (
    bytes_text,
    counted,
    duration_text,
    number_text,
    percent_text,
    seconds_text,
)
from headrace.insight.report.figures import (
    CAUSES,
    PHASE_WORDS,
    TIER_COLOURS,
    cause_colours,
    cause_word,
    causes_of,
    columns_of,
    phases_of,
    stall_of,
    tiers_of,
)
from headrace.insight.report.starts import begins_text, start_of
from headrace.order.order import unit_of
from headrace.pages import charts
from headrace.pages.html import axis_text, card_list, document, marked, safe
from headrace.plane.batch_trace import PHASES
from headrace.plane.stage import LATENCY_BUCKETS, TIER_WORDS
from headrace.trace.format import finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from headrace.base.causes import Cause
    from headrace.insight.report.figures import Decision, EpochSum, TraceFigures

STEP_BINS: Final = 180
TIME_BINS: Final = 150
ROWS_MOST: Final = 64
EPOCHS_MOST: Final = 60
TABLE_ROWS: Final = 30
_CAUSE_SEEN: Final = 0.0005  # causes of a smaller share of the wait are not drawn
_EPOCHS_MARKED: Final = 8
_READS_SHARES: Final = np.array([0.0, 0.02, 0.08, 0.2, 0.5, 1.0])
_STALL_SHARES: Final = np.array([0.01, 0.05, 0.15, 0.3, 0.6])
_MARKS_MOST: Final = 400
_DECISIONS_LISTED: Final = 100
_RANKS_LISTED: Final = 256


def pictures(run: TraceFigures) -> list[str]:
    """All that there is something to draw for, from the most telling on."""
    drawers = (stall_strip, rank_map, bytes_by_tier, latency_map, decisions, epochs)
    return [picture for draw in drawers if (picture := draw(run))]


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
    parts = [charts.Part(cause_word(c), s, "", colours[c]) for c, s in spent.items()]
    shares = _cause_shares(sums, spent)
    most = float(shares.sum(axis=1).max())
    top = next((top for top in (0.02, 0.05, 0.1, 0.2, 0.5) if most <= top), 1.0)
    titles = []
    for steps, row in zip(_stretches(edges), shares, strict=True):
        seen = [(n, share) for n, share in zip(names, row, strict=True) if share >= _CAUSE_SEEN]
        of = (f", {name} {percent_text(share)}" for name, share in seen[:4])
        titles.append(f"steps {steps}: {percent_text(row.sum())} waited{''.join(of)}")
    ranks = len({curve.rank for curve in run.main.curves})
    epochs = run.main.epochs()
    begins = np.cumsum([one.of("steps") for one in epochs])
    marks = [
        (float(before / begins[-1]), f"epoch {one.epoch}")
        for before, one in zip(begins[:-1], epochs[1:], strict=True)
    ]
    drawn = charts.areas(
        "Share of each step's time that went to waiting for data, by cause", parts, shares.T / top,
        charts.count_axis(float(edges[-1]), "step of the run"), charts.share_axis("of a step's time", top),
        titles, marks if len(epochs) <= _EPOCHS_MARKED else (),
    )  # fmt: skip
    # The tables: by cause over the steps, and what batches were doing meanwhile.
    begin = np.arange(0, len(sums), -(-len(sums) // TABLE_ROWS))
    by_step = _cause_shares(np.add.reduceat(sums, begin), spent)
    rows = [
        (at, percent_text(row.sum()), *map(percent_text, row))
        for at, row in zip(_stretches(np.append(edges[begin], edges[-1])), by_step, strict=True)
    ]
    waits = [(phase, seconds) for phase, seconds in phases_of(total).items() if seconds > 0]
    phases = [(PHASE_WORDS[p], seconds_text(s), percent_text(s / whole)) for p, s in waits]
    tables = charts.table(["steps", "waited", *names], rows)
    tables += charts.table(["what the batch was doing", "waited, all ranks", "of the wait"], phases)
    caption = (
        f"Of each step's time, over {counted(ranks, 'rank')}, by why it waited: the rest is the "
        "training's own work." + begins_text(run.main.curves, run.pauses)
    )
    if run.slower_s:
        caption += " Waiting for a slower rank is part of that work: it comes after the batch."
    return charts.figure("Stall by step", drawn, tables, caption)


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
    top = charts.round_up(float(rates.sum(axis=0).max()))
    whole = sum(total.values())
    rows = [(TIER_WORDS[t], bytes_text(n), percent_text(n / whole)) for t, n in total.items()]
    parts = [
        charts.Part(name, n, f"{size}, {share}", TIER_COLOURS[t])
        for (t, n), (name, size, share) in zip(total.items(), rows, strict=True)
    ]
    times = [duration_text(edge - edges[0]) for edge in edges[:-1]]
    drawn = charts.areas(
        "Bytes delivered per second, by where they came from", parts, rates / top,
        charts.time_axis(run.seconds),
        charts.Axis("", [(at, f"{bytes_text(at * top)}/s") for at in (0.0, 0.5, 1.0)]),
        [f"{at}: {bytes_text(n)}/s" for at, n in zip(times, rates.sum(axis=0), strict=True)],
    )  # fmt: skip
    every = TIME_BINS // TABLE_ROWS
    over_time = [
        (times[at], *(f"{bytes_text(n)}/s" for n in rates[:, at : at + every].mean(axis=1)))
        for at in range(0, TIME_BINS, every)
    ]
    tables = charts.table(["came from", "bytes", "of all"], rows)
    tables += charts.table(["from", *(TIER_WORDS[tier] for tier in total)], over_time)
    return charts.figure(
        "Bytes by where they came from", drawn, tables, "Delivered to all ranks, over time."
    )


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
    drawn = charts.heat(
        "Reads by how long they took, over time", np.flipud(shades.T).astype(np.int64),
        charts.time_axis(run.seconds), charts.Axis("", marks, crowded=True), legend,
        height=min(300.0, max(90.0, 12.0 * (high - low))),
    )  # fmt: skip
    total = counts.sum(axis=0)
    rows = [
        (f"{begin} to {end}", f"{count:,.0f}", percent_text(count / total.sum()))
        for (begin, end), count in zip(pairwise(begins), total, strict=True)
        if count
    ]
    tables = charts.table(["latency of a read", "reads", "of all"], rows)
    caption = "Each column is a stretch of time: the stronger the colour, the more of its reads took that long."
    return charts.figure("Latency of reads", drawn, tables, caption)


def decisions(run: TraceFigures) -> str:
    """Where knobs stood over time, and when the tuner decided something."""
    if not run.decisions and all(len({v for _, v in points}) < 2 for points in run.knobs.values()):
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
        knob_lines.append(charts.StepLine(f"{name.replace('_', ' ')} (top: {top})", shown, colour))
    marks = [
        (place(one.at_unix_s), f"rank {one.rank}: {one.action} {one.change}: {one.reason}")
        for one in run.decisions[:_MARKS_MOST]
    ]
    drawn = charts.lines(
        "Knobs over time, and decisions of the tuner", knob_lines, marks, charts.time_axis(seconds),
        charts.Axis("", [(0.0, "0"), (1.0, "top")]),
    )  # fmt: skip
    rows = [
        (duration_text(max(0.0, at_s - first)), *of)
        for at_s, *of in run.decisions[:_DECISIONS_LISTED]
    ]
    heads = ["after", "rank", "decision", "what it turned", "why", "evidence"]
    caption = (
        f"{counted(len(run.decisions), 'decision')}, upright bars; knobs are those of one rank."
    )
    if len(run.decisions) > len(rows):
        caption += f" The table has the first {len(rows)}."
    return charts.figure(
        "What the tuner did", drawn, charts.table(heads, rows, words=True), caption
    )


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
        -1, charts.SHADES - 1
    )
    names = [rank.about.rank for rank in run.ranks[::together]]
    every = max(1, -(-len(names) // 16))
    ticks = [((at + 0.5) / len(names), f"rank {names[at]}") for at in range(0, len(names), every)]
    legend = ["under 1 %", "to 5 %", "to 15 %", "to 30 %", "to 60 %", "more"]
    drawn = charts.heat(
        "Share of each rank's time that was waited, over time", shades.astype(np.int64),
        charts.time_axis(run.seconds), charts.Axis("rank", ticks, crowded=len(names) > charts.FEW_ROWS), legend,
    )  # fmt: skip
    order = sorted(run.ranks, key=lambda rank: -stall_of(rank.total))[:_RANKS_LISTED]
    rows = []
    for rank in order:
        waited_s, steps = columns_of(rank.total, "waited_s", "steps").tolist()
        share = percent_text(stall_of(rank.total))
        name, node = f"rank {rank.about.rank}", rank.about.where or "-"
        rows.append((name, node, share, duration_text(waited_s), f"{steps:,.0f}"))
    note = "A row for each rank"
    if together > 1:
        note = f"A row for {together} ranks, that of the one that waited most"
    note += ": the stronger the colour, the more of the time it waited."
    if len(run.ranks) > len(rows):
        note += f" The table has the {len(rows)} that waited most."
    tables = charts.table(["rank", "node", "waited", "seconds", "steps"], rows)
    return charts.figure("Which ranks waited, and when", drawn, tables, note)


def epochs(run: TraceFigures) -> str:
    """Epoch over epoch."""
    epochs = run.main.epochs() if run.main is not None else []
    if len(epochs) < 2:
        return ""
    chosen = np.linspace(0, len(epochs) - 1, min(len(epochs), EPOCHS_MOST)).round().astype(int)
    shown = [epochs[at] for at in chosen]
    parts = [
        charts.Part(str(one.epoch), 100 * one.stall, percent_text(one.stall), "h4") for one in shown
    ]
    drawn = charts.columns(
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
    tables = charts.table(["epoch", "took", "waited", f"{_unit(run)}/s", "bytes from"], rows)
    return charts.figure("Epoch over epoch", drawn, tables, caption)


def slowest(run: TraceFigures) -> str:
    """The longest waits, as a table."""
    waits = [
        (float(row["delivered_s"] - row["asked_s"]), curve, row)
        for curve in (run.main.curves if run.main is not None else ())
        for row in curve.slowest
    ]
    waits.sort(key=lambda one: -one[0])
    rows = [
        (
            *[start_of(curve, run.pauses)] * bool(run.pauses),
            int(row["epoch"]), f"{int(row['step']):,}", curve.rank, seconds_text(waited_s),
            PHASE_WORDS[PHASES[int(np.argmax(row["waited_s"]))]], bytes_text(float(row["bytes"].sum())),
        )
        for waited_s, curve, row in waits[:12] if waited_s > 0
    ]  # fmt: skip
    heads = ["epoch", "step", "rank", "waited", "its batch was mostly", "bytes"]
    table = charts.table(["start"] * bool(run.pauses) + heads, rows)
    return "<h2>The longest waits</h2>" + table if rows else ""


def report_page(run: TraceFigures) -> str:
    """The page."""
    name = run.path.rstrip("/").rpartition("/")[2] or run.path
    title = f"Run {name}"
    parts = [
        f"<h1>{safe(title)}</h1>",
        f'<p class="soft">{safe(_subtitle(run))}</p>',
        f"<p><strong>{safe(headline(run))}</strong></p>",
        f"<p>{safe(run.restart)}</p>" if run.restart else "",
        card_list(cards(run)),
        *_verdict(run),
        *pictures(run),
        slowest(run),
        *_about(run),
    ]
    return document(title, parts)


def headline(run: TraceFigures) -> str:
    """The run in a sentence."""
    if run.main is None:
        return "No step was written: there is nothing to tell."
    stall = stall_of(run.total)
    together = len(run.loaders) > 1
    all_of = f" This counts all {len(run.loaders)} loaders, those of validation too." * together
    share = percent_text(stall)
    if not run.names_causes:
        return f"Data was there in time: {share} of the ranks' time went to waiting for it.{all_of}"
    more = f", and about {percent_text(run.slower)} for slower ranks" if run.slower_s else ""
    lost = (stall + run.slower) * len(run.ranks)
    of = f": as if {lost:.1f} of {len(run.ranks)} ranks had stood still" * (len(run.ranks) > 1)
    return f"{share} of the time went to waiting for data{more}{of}.{all_of}"


def _subtitle(run: TraceFigures) -> str:
    main = run.main
    if main is None:
        return run.path
    about = main.about
    when = datetime.fromtimestamp(run.span_s[0], UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"{counted(len(run.ranks), 'rank')} on {counted(run.hosts, 'host')}"
    took = duration_text(run.seconds)
    more = f" and {counted(len(run.loaders) - 1, 'more loader')}" if len(run.loaders) > 1 else ""
    return f"{about.source}, {about.samples:,} {_unit(run)}{more}, {where}; {when}, {took}"


def _unit(run: TraceFigures) -> str:
    return unit_of(run.main.about.order if run.main else {})


def cards(run: TraceFigures) -> list[tuple[str, str]]:
    """The figures that matter most: (value with its unit, what it is)."""
    if run.main is None:
        return []
    seconds = run.seconds or 1e-9
    samples, nbytes = run.of("samples"), sum(tiers_of(run.total).values())
    parts = [
        (f"{100 * stall_of(run.total):.1f} %", "of the ranks' time waited for data"),
        (axis_text(samples / seconds), f"{_unit(run)}/s, all ranks"),
    ]
    if nbytes > 0:
        parts.append((f"{bytes_text(nbytes / seconds)}/s", "delivered, all ranks"))
    parts += [
        (duration_text(run.of("waited_s")), "waited, all ranks added up"),
        (f"{run.of('steps'):,.0f}", "steps of all ranks"),
        (str(len(run.main.epochs())), "epochs begun"),
    ]
    return parts


def _verdict(run: TraceFigures) -> Iterator[str]:
    verdict, waited_s = run.verdict, run.of("waited_s")
    if verdict is None or not run.causes or waited_s <= 0:
        return
    colours = cause_colours(run.causes)
    named = [
        (cause, seconds, percent_text(seconds / waited_s))
        for cause, seconds in run.causes.items()
        if seconds >= 0.0005 * waited_s
    ]
    rows = [
        (cause_word(cause), duration_text(s), share, cause.sentence) for cause, s, share in named
    ]
    heads = ["cause", "waited", "of the wait", "what that means"]
    table = charts.behind(charts.table(heads, rows, words=True))
    yield "<h2>Why it waited</h2>"
    if run.names_causes:
        parts = [charts.Part(cause_word(c), s, share, colours[c]) for c, s, share in named]
        yield charts.stacked("What was waited for, by cause", parts)
    yield f"<p>{safe(next(iter(run.causes)).sentence if run.names_causes else _no_stall(run))}</p>"
    if verdict.evidence and run.names_causes:
        yield "<ul>" + "".join(f"<li>{safe(one)}</li>" for one in verdict.evidence) + "</ul>"
    if verdict.action and run.names_causes:
        action = verdict.action[:1].upper() + verdict.action[1:].rstrip(".") + "."
        if verdict.gain_s > 0:
            how = f" ({verdict.gain_from})" if verdict.gain_from else ""
            saved = f"{seconds_text(verdict.gain_s)} of the {seconds_text(verdict.stall_s)}"
            action += f" Expected to save {saved} that this rank waited{how}."
        yield f"<p><strong>What to do:</strong> {marked(action)}</p>"
    sure = (
        f"Confidence {100 * verdict.confidence:.0f} %; evidence and advice are those of the rank that waited "
        "most, over its last steps. "
    ) * run.names_causes
    yield f'<p class="soft">{sure}{_counted(run)}</p>{table}'


def _no_stall(run: TraceFigures) -> str:
    waited, share = seconds_text(run.of("waited_s")), percent_text(stall_of(run.total))
    return f"No stall worth naming, and nothing to do: {waited} of all ranks together, {share} of their time."


def _counted(run: TraceFigures) -> str:
    waited, more = duration_text(run.of("waited_s")), duration_text(run.slower_s)
    slower = f" Waiting for slower ranks took about {more} more." if run.slower_s else ""
    return f"All ranks together waited {waited} for their own data; shares are of that.{slower}"


def _about(run: TraceFigures) -> Iterator[str]:
    """What ran, and what is not as it should be with the traces."""
    if run.notes:
        yield "<h2>What the traces lack</h2><ul>"
        yield "".join(f"<li>{safe(note)}</li>" for note in run.notes) + "</ul>"
    yield "<h2>What ran</h2>"
    rows = [("folder", run.path), ("headrace", run.facts.get("headrace", "-"))]
    command = run.facts.get("command")
    if isinstance(command, list):
        rows.append(("command", " ".join(map(str, command[:200]))))
    began = finite(run.facts.get("began_unix_s"))
    if began:
        rows.append(("began", _time(began)))
    for number, loader in enumerate(run.loaders[:20], 1):
        about = loader.about
        samples = f"{about.samples:,} {unit_of(about.order)}"
        what = f"{about.source}: {samples}, batch {about.batch_size}, {_order(about.order)}"
        rows.append((f"loader {number}", f"{what}, {about.framework or 'headrace'}"))
        spent = [(p, s) for p, s in phases_of(loader.total).items() if s > 0]
        phases = ", ".join(f"{PHASE_WORDS[p]} {duration_text(s)}" for p, s in spent)
        rows.append((f"loader {number} waited", phases or "not at all"))
    rows.append(("data", f"fingerprint {run.main.about.fingerprint or '-'}" if run.main else "-"))
    rows.append(("traces", f"{run.traces} files"))
    yield charts.table(["what", "value"], rows, words=True)


def _order(order: Any) -> str:
    if not order:
        return "an order of its own"
    return f"{order.get('mode')} order, seed {order.get('seed')}"


def _time(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "-"


# -- text --------------------------------------------------------------------------------------------

_RANKS_SHOWN = 8
_EPOCHS_SHOWN = 20
_DECISIONS_SHOWN = 5


def report_lines(run: TraceFigures) -> Iterator[str]:
    """The report in lines, of blocks with an empty line between."""
    yield " ".join(filter(None, (headline(run), run.restart)))
    for block in _blocks(run) if run.main is not None else ():
        yield from ("", *block)


def _blocks(run: TraceFigures) -> Iterator[Iterable[str]]:
    assert run.main is not None
    yield (f"  {value:<14} {what}" for value, what in cards(run))
    waited_s, verdict = run.of("waited_s"), run.verdict
    if waited_s > 0 and not run.names_causes:
        yield (_no_stall(run),)
    elif waited_s > 0:
        share = {
            cause: percent_text(s / waited_s)
            for cause, s in run.causes.items()
            if s >= 0.01 * waited_s
        }
        phases = [(PHASE_WORDS[p], s) for p, s in phases_of(run.total).items() if s > 0]
        doing = ", ".join(f"{phase} {percent_text(s / waited_s)}" for phase, s in phases)
        yield (
            "What was waited for:",
            *(f"  {s:>7}  {cause_word(cause):<10} {cause.sentence}" for cause, s in share.items()),
            _counted(run),
            f"What the awaited batches were doing: {doing}",
        )
    if waited_s > 0 and verdict is not None and verdict.action and run.names_causes:
        saved = f"{seconds_text(verdict.gain_s)} of {seconds_text(verdict.stall_s)}"
        gain = f"  expected to save {saved} ({verdict.gain_from})"
        yield f"What to do: {verdict.action}", *((gain,) if verdict.gain_s > 0 else ())
    if tiers := tiers_of(run.total):
        each = (f"{TIER_WORDS[tier]} {bytes_text(count)}" for tier, count in tiers.items())
        yield (f"Bytes delivered came from: {', '.join(each)}",)
    epochs = run.main.epochs()
    if len(epochs) > 1:
        yield (
            f"  epoch  took        waited   {_unit(run)}/s",
            *map(_epoch_line, epochs[-_EPOCHS_SHOWN:]),
        )
    if len(run.ranks) > 1:
        worst = sorted(((stall_of(r.total), r.about) for r in run.ranks), key=lambda one: -one[0])
        yield (
            "Ranks that waited most:",
            *(f"  rank {r.rank:<5} {percent_text(stall):>7}  {r.where}" for stall, r in worst[:_RANKS_SHOWN]),
        )  # fmt: skip
    if run.decisions:
        last = run.decisions[-_DECISIONS_SHOWN:]
        yield (
            f"The tuner made {counted(len(run.decisions), 'decision')}; the last:",
            *(_decision_line(one, run.span_s[0]) for one in last),
        )
    if run.notes:
        yield (f"! {note}" for note in run.notes)


def _decision_line(one: Decision, first_s: float) -> str:
    at = duration_text(max(0.0, one.at_unix_s - first_s))
    line = f"  after {at}, rank {one.rank}: {one.action} {one.change}: {one.reason}"
    return line.replace(" : ", ": ")


def _epoch_line(one: EpochSum) -> str:
    rate = f"{one.of('samples') / one.seconds:,.0f}" if one.seconds > 0 else "-"
    return f"  {one.epoch:>5}  {duration_text(one.seconds):<10} {percent_text(one.stall):>7} {rate:>11}"


def report_document(run: TraceFigures) -> dict[str, Any]:
    """The report as plain values."""
    main = run.main
    return {
        "run": run.path,
        "headline": headline(run),
        "stall": stall_of(run.total),
        "seconds": run.seconds,
        "waited_s": run.of("waited_s"),
        "worked_s": run.of("worked_s"),
        "steps": int(run.of("steps")),
        "steps_again": run.again,
        "without_ranks_s": sum(end_s - begin_s for begin_s, end_s in run.pauses),
        "samples": int(run.of("samples")),
        "phases_s": phases_of(run.total),
        "slower_rank_s": run.slower_s,
        "causes_s": {cause.value: seconds for cause, seconds in run.causes.items()},
        "verdict": None if run.verdict is None else run.verdict.as_dict(),
        "bytes_by_tier": tiers_of(run.total),
        "epochs": [
            {"epoch": one.epoch, "seconds": one.seconds, "stall": one.stall, "samples": int(one.of("samples"))}
            for one in (main.epochs() if main else ())
        ],
        "ranks": [
            {
                "rank": rank.about.rank, "host": rank.about.host, "node": rank.about.where,
                "stall": stall_of(rank.total),
            }
            for rank in run.ranks
        ],
        "decisions": [one._asdict() for one in run.decisions],
        "notes": run.notes,
    }  # fmt: skip
