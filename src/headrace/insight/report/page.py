"""Page: a run as one HTML file, as lines for a terminal, and as plain values for JSON.

The page has no script and no address: it works offline, prints, and nothing in it acts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace.base.text import bytes_text, counted, duration_text, percent_text, seconds_text
from headrace.insight.report.curves import stall_of
from headrace.insight.report.figures import (
    PHASE_WORDS,
    TIER_WORDS,
    cause_colours,
    cause_word,
    phases_of,
    tiers_of,
)
from headrace.insight.report.pictures import pictures, slowest
from headrace.pages.charts import Part, behind, stacked, table
from headrace.pages.html import axis_text, document, marked, safe
from headrace.trace.format import finite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.report.figures import TraceFigures


def report_page(run: TraceFigures) -> str:
    """The page."""
    name = run.path.rstrip("/").rpartition("/")[2] or run.path
    title = f"Run {name}"
    parts = [
        f"<h1>{safe(title)}</h1>",
        f'<p class="soft">{safe(_subtitle(run))}</p>',
        f"<p><strong>{safe(headline(run))}</strong></p>",
        _cards(run),
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
    if stall < 0.01:
        return f"Data was there in time: {percent_text(stall)} of the ranks' time went to waiting for it."
    lost = stall * len(run.ranks)
    many = len(run.ranks) > 1
    of = f": as if {lost:.1f} of {len(run.ranks)} ranks had stood still" if many else ""
    return f"{percent_text(stall)} of the time went to waiting for data{of}."


def _subtitle(run: TraceFigures) -> str:
    main = run.main
    if main is None:
        return run.path
    about = main.about
    when = datetime.fromtimestamp(run.span_s[0], UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"{counted(len(run.ranks), 'rank')} on {counted(run.hosts, 'host')}"
    took = duration_text(run.seconds)
    return f"{about.source}, {about.samples:,} samples, {where}; {when}, {took}"


def cards(run: TraceFigures) -> list[tuple[str, str, str]]:
    """The figures that matter most: (value, unit, what it is)."""
    if run.main is None:
        return []
    seconds = run.seconds or 1e-9
    samples, nbytes = run.of("samples"), sum(tiers_of(run.total).values())
    parts = [
        (f"{100 * stall_of(run.total):.1f}", "%", "of the ranks' time waited for data"),
        (*_value(axis_text(samples / seconds)), "samples/s, all ranks"),
    ]
    if nbytes > 0:
        parts.append((*_value(f"{bytes_text(nbytes / seconds)}/s"), "delivered, all ranks"))
    parts += [
        (*_value(duration_text(run.of("waited_s"))), "waited, all ranks added up"),
        (f"{run.of('steps'):,.0f}", "", "steps, all ranks"),
        (str(len(run.main.epochs())), "", "epochs begun"),
    ]
    return parts


def _value(text: str) -> tuple[str, str]:
    number, _, unit = text.partition(" ")
    return number, unit


def _cards(run: TraceFigures) -> str:
    drawn = "".join(
        f"<li><b>{safe(value)} <small>{safe(unit)}</small></b><span>{safe(what)}</span></li>"
        for value, unit, what in cards(run)
    )
    return f'<ul class="cards">{drawn}</ul>' if drawn else ""


def _verdict(run: TraceFigures) -> Iterator[str]:
    """Why it waited, and what to do."""
    verdict, waited_s = run.verdict, run.of("waited_s")
    if verdict is None or not run.causes or waited_s <= 0:
        return
    colours = cause_colours(run.causes)
    named = [
        (cause, seconds, percent_text(seconds / waited_s))
        for cause, seconds in run.causes.items()
        if seconds >= 0.0005 * waited_s
    ]
    parts = [Part(cause_word(cause), s, share, colours[cause]) for cause, s, share in named]
    yield "<h2>Why it waited</h2>" + stacked("What was waited for, by cause", parts)
    yield f"<p>{safe(next(iter(run.causes)).sentence)}</p>"
    if verdict.evidence:
        yield "<ul>" + "".join(f"<li>{safe(one)}</li>" for one in verdict.evidence) + "</ul>"
    if verdict.action:
        action = verdict.action[:1].upper() + verdict.action[1:].rstrip(".") + "."
        if verdict.gain_s > 0:
            how = f" ({verdict.gain_from})" if verdict.gain_from else ""
            saved = f"{seconds_text(verdict.gain_s)} of the {seconds_text(verdict.stall_s)}"
            action += f" Expected to save {saved} that this rank waited{how}."
        yield f"<p><strong>What to do:</strong> {marked(action)}</p>"
    yield (
        f'<p class="soft">Confidence {100 * verdict.confidence:.0f} %; evidence and advice are those of the '
        "rank that waited most, over its last steps.</p>"
    )
    rows = [
        (cause_word(cause), duration_text(s), share, cause.sentence) for cause, s, share in named
    ]
    heads = ["cause", "waited", "of the wait", "what that means"]
    yield behind(table(heads, rows, words=True))


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
        what = f"{about.source}: {about.samples:,} samples, batch {about.batch_size}, {_order(about.order)}"
        rows.append((f"loader {number}", f"{what}, {about.framework or 'headrace'}"))
        spent = [(p, s) for p, s in phases_of(loader.total).items() if s > 0]
        phases = ", ".join(f"{PHASE_WORDS[p]} {duration_text(s)}" for p, s in spent)
        rows.append((f"loader {number} waited", phases or "not at all"))
    rows.append(("data", f"fingerprint {run.main.about.fingerprint or '-'}" if run.main else "-"))
    rows.append(("traces", f"{run.traces} files"))
    yield table(["what", "value"], rows, words=True)


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
    """The report in lines."""
    yield headline(run)
    if run.main is None:
        return
    yield ""
    for value, unit, what in cards(run):
        yield f"  {value + (' ' + unit if unit else ''):<14} {what}"
    waited_s = run.of("waited_s")
    if waited_s > 0:
        yield from _waits(run, waited_s)
    if tiers := tiers_of(run.total):
        yield ""
        yield "Bytes came from: " + ", ".join(
            f"{TIER_WORDS[t]} {bytes_text(n)}" for t, n in tiers.items()
        )
    yield from _epochs(run)
    yield from _ranks(run)
    if run.decisions:
        yield ""
        yield f"The tuner made {counted(len(run.decisions), 'decision')}; the last:"
        first, _ = run.span_s
        for one in run.decisions[-_DECISIONS_SHOWN:]:
            at = duration_text(max(0.0, one.at_unix_s - first))
            yield f"  after {at}, rank {one.rank}: {one.action} {one.change}: {one.reason}".replace(
                " : ", ": "
            )
    if run.notes:
        yield ""
        for note in run.notes:
            yield f"! {note}"


def _waits(run: TraceFigures, waited_s: float) -> Iterator[str]:
    yield ""
    yield "What was waited for:"
    for cause, seconds in run.causes.items():
        if seconds >= 0.01 * waited_s:
            yield f"  {percent_text(seconds / waited_s):>7}  {cause_word(cause):<10} {cause.sentence}"
    phases = [
        f"{PHASE_WORDS[p]} {percent_text(s / waited_s)}"
        for p, s in phases_of(run.total).items()
        if s > 0
    ]
    yield "What the awaited batches were doing: " + ", ".join(phases)
    verdict = run.verdict
    if verdict is not None and verdict.action:
        yield ""
        yield f"What to do: {verdict.action}"
        if verdict.gain_s > 0:
            saved = f"{seconds_text(verdict.gain_s)} of {seconds_text(verdict.stall_s)}"
            yield f"  expected to save {saved} ({verdict.gain_from})"


def _epochs(run: TraceFigures) -> Iterator[str]:
    assert run.main is not None
    epochs = run.main.epochs()
    if len(epochs) > 1:
        yield ""
        yield "  epoch  took        waited   samples/s"
        for one in epochs[-_EPOCHS_SHOWN:]:
            rate = f"{one.of('samples') / one.seconds:,.0f}" if one.seconds > 0 else "-"
            yield f"  {one.epoch:>5}  {duration_text(one.seconds):<10} {percent_text(one.stall):>7} {rate:>11}"


def _ranks(run: TraceFigures) -> Iterator[str]:
    if len(run.ranks) > 1:
        yield ""
        yield "Ranks that waited most:"
        for rank in sorted(run.ranks, key=lambda rank: -stall_of(rank.total))[:_RANKS_SHOWN]:
            yield f"  rank {rank.about.rank:<5} {percent_text(stall_of(rank.total)):>7}  {rank.about.host}"


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
        "samples": int(run.of("samples")),
        "phases_s": phases_of(run.total),
        "causes_s": {cause.value: seconds for cause, seconds in run.causes.items()},
        "verdict": None if run.verdict is None else run.verdict.as_dict(),
        "bytes_by_tier": tiers_of(run.total),
        "epochs": [
            {"epoch": one.epoch, "seconds": one.seconds, "stall": one.stall, "samples": int(one.of("samples"))}
            for one in (main.epochs() if main else ())
        ],
        "ranks": [
            {"rank": rank.about.rank, "host": rank.about.host, "stall": stall_of(rank.total)}
            for rank in run.ranks
        ],
        "decisions": [one._asdict() for one in run.decisions],
        "notes": run.notes,
    }  # fmt: skip
