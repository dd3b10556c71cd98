"""Page: a run as one HTML file. No script, no address: it works offline, prints, and nothing in it acts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from headrace.base.text import bytes_text, duration_text, percent_text, seconds_text
from headrace.insight.report.figures import (
    PHASE_WORDS,
    cause_colours,
    cause_word,
    phases_of,
    stall_of,
)
from headrace.insight.report.pictures import pictures, slowest
from headrace.pages.charts import Part, stacked, table
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
        _verdict(run),
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
    of = (
        f": as if {lost:.1f} of {len(run.ranks)} ranks had stood still"
        if len(run.ranks) > 1
        else ""
    )
    return f"{percent_text(stall)} of the time went to waiting for data{of}."


def _subtitle(run: TraceFigures) -> str:
    main = run.main
    if main is None:
        return run.path
    about = main.about
    when = datetime.fromtimestamp(run.span_s[0], UTC).strftime("%Y-%m-%d %H:%M UTC")
    ranks, hosts = len(run.ranks), run.hosts
    return (
        f"{about.source}, {about.samples:,} samples, {ranks} rank{'s' * (ranks != 1)} on {hosts} "
        f"host{'s' * (hosts != 1)}; {when}, {duration_text(run.seconds)}"
    )


def cards(run: TraceFigures) -> list[tuple[str, str, str]]:
    """The figures that matter most: (value, unit, what it is)."""
    if run.main is None:
        return []
    seconds = run.seconds or 1e-9
    samples, nbytes = run.of("samples"), sum(run.of(tier) for tier in _TIERS)
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


def _value(told: str) -> tuple[str, str]:
    number, _, unit = told.partition(" ")
    return number, unit


def _cards(run: TraceFigures) -> str:
    drawn = "".join(
        f"<li><b>{safe(value)} <small>{safe(unit)}</small></b><span>{safe(what)}</span></li>"
        for value, unit, what in cards(run)
    )
    return f'<ul class="cards">{drawn}</ul>' if drawn else ""


def _verdict(run: TraceFigures) -> str:
    """Why it waited, and what to do."""
    verdict, waited_s = run.verdict, run.of("waited_s")
    if verdict is None or not run.causes or waited_s <= 0:
        return ""
    colours = cause_colours(run.causes)
    named = [
        (cause, seconds) for cause, seconds in run.causes.items() if seconds >= 0.0005 * waited_s
    ]
    parts = [
        Part(cause_word(cause), seconds, percent_text(seconds / waited_s), colours[cause])
        for cause, seconds in named
    ]
    sections = ["<h2>Why it waited</h2>", stacked("What was waited for, by cause", parts)]
    main = next(iter(run.causes))
    sections.append(f"<p>{safe(main.sentence)}</p>")
    if verdict.evidence:
        sections.append(
            "<ul>" + "".join(f"<li>{safe(one)}</li>" for one in verdict.evidence) + "</ul>"
        )
    if verdict.action:
        action = verdict.action[:1].upper() + verdict.action[1:].rstrip(".")
        gain = ""
        if verdict.gain_s > 0:
            how = f" ({verdict.gain_from})" if verdict.gain_from else ""
            gain = (
                f" Expected to save {seconds_text(verdict.gain_s)} of the {seconds_text(verdict.stall_s)} that "
                f"this rank waited{how}."
            )
        sections.append(f"<p><strong>What to do:</strong> {marked(f'{action}.{gain}')}</p>")
    sure = f"{100 * verdict.confidence:.0f} %"
    sections.append(
        f'<p class="soft">Confidence {sure}; evidence and advice are those of the rank that waited most, over '
        "its last steps.</p>"
    )
    rows = [
        (
            cause_word(cause),
            duration_text(seconds),
            percent_text(seconds / waited_s),
            cause.sentence,
        )
        for cause, seconds in named
    ]
    behind = table(["cause", "waited", "of the wait", "what that means"], rows)
    sections.append(
        "<details><summary>As a table</summary>"
        + behind.replace("<table>", '<table class="words">', 1)
        + "</details>"
    )
    return "".join(sections)


def _about(run: TraceFigures) -> Iterator[str]:
    """What ran, and what is not as it should be with the traces."""
    if run.notes:
        yield "<h2>What the traces lack</h2><ul>"
        yield "".join(f"<li>{safe(note)}</li>" for note in run.notes) + "</ul>"
    yield "<h2>What ran</h2>"
    rows: list[tuple[str, object]] = [
        ("folder", run.path),
        ("headrace", run.facts.get("headrace", "-")),
    ]
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
        phases = [
            f"{PHASE_WORDS[p]} {duration_text(s)}"
            for p, s in phases_of(loader.total).items()
            if s > 0
        ]
        rows.append((f"loader {number} waited", ", ".join(phases) or "not at all"))
    rows.append(("data", f"fingerprint {run.main.about.fingerprint or '-'}" if run.main else "-"))
    rows.append(("traces", f"{run.traces} files"))
    yield table(["what", "value"], rows).replace("<table>", '<table class="words">', 1)


def _order(order: Any) -> str:
    if not order:
        return "an order of its own"
    return f"{order.get('mode')} order, seed {order.get('seed')}"


def _time(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "-"


_TIERS: Final = ("ram", "page_cache", "disk", "peer", "source")
