"""Page: a diagnosis as one HTML file: it works offline, prints, and nothing in it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.text import bytes_text, count_text, duration_text, rough_text
from headrace.insight.doctor.diagnose import unit_of
from headrace.insight.doctor.predict import AHEAD, LATER, TORCH, UNCACHED
from headrace.insight.doctor.text import facts_of
from headrace.pages.charts import Part, bars, columns, figure, table
from headrace.pages.html import document, marked, safe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.doctor.findings import Advice, Diagnosis, Expected, Findings, Storage

__all__ = ["doctor_page"]

_LOADERS: Final = {TORCH: ("torch", "c4"), AHEAD: ("headrace", "c1")}

_WHEN: Final = {
    "": ("What loaders would deliver now", "As things are, with what lies in memory."),
    LATER: ("What loaders would deliver in later epochs", "From memory, where the data fit."),
    UNCACHED: ("What loaders would deliver uncached", "With nothing in memory, as after a restart."),
}  # fmt: skip

_PICTURED: Final = frozenset({"storage"})
"""Facts that have a picture, and a table behind it."""


def doctor_page(diagnosis: Diagnosis) -> str:
    """The page."""
    found = diagnosis.findings
    name = found.data.path if found.data is not None else "the data"
    over = "interrupted after" if found.interrupted else "looked at for"
    parts = [
        f"<h1>{safe(name)}</h1>",
        f'<p class="soft">{over} {found.seconds:.0f} s; nothing was written there</p>',
        f"<p><strong>{safe(diagnosis.verdict)}</strong></p>",
        _cards(diagnosis),
        *_advice(diagnosis.advice),
        *_expected(diagnosis),
        *_storage(found),
        *_facts(diagnosis),
    ]
    return document(f"Doctor: {name}", parts)


def _cards(diagnosis: Diagnosis) -> str:
    found = diagnosis.findings
    unit = unit_of(found)
    told: list[tuple[str, str]] = []
    if found.data is not None:
        many = f"{'' if found.data.exact else '~'}{count_text(found.data.samples)}"
        told += [(many, "samples"), (bytes_text(found.data.nbytes), "in all")]
    for each in diagnosis.expected:
        if not each.when:
            told.append(
                (
                    f"{rough_text(each.per_s)}/s",
                    f"{unit} expected now, with {_LOADERS[each.loader][0]}",
                )
            )
    if diagnosis.wanted_per_s is not None:
        told.append((f"{rough_text(diagnosis.wanted_per_s)}/s", f"{unit} that your model asks for"))
    drawn = "".join(
        f"<li><b>{safe(value)}</b><span>{safe(what)}</span></li>" for value, what in told
    )
    return f'<ul class="cards">{drawn}</ul>' if drawn else ""


def _advice(advice: tuple[Advice, ...]) -> Iterator[str]:
    """The first thing to do, large; the others below it."""
    for number, one in enumerate(advice):
        if number < 2:
            yield "<h2>Do first</h2>" if number == 0 else "<h2>Then</h2>"
        do = marked(one.do)
        yield f"<p><strong>{do}</strong></p>" if number == 0 else f"<p>{do}</p>"
        yield f'<p class="soft">Because {marked(one.because)}. Gain: {marked(one.gain)}.</p>'
        yield f"<pre>{safe(one.command)}</pre>"
        if one.proof:
            yield f'<p class="soft">Proof on your own script:</p><pre>{safe(one.proof)}</pre>'


def _expected(diagnosis: Diagnosis) -> Iterator[str]:
    """Both loaders, and what the model asks for, in each state of the page cache."""
    unit = unit_of(diagnosis.findings)
    for when in dict.fromkeys(each.when for each in diagnosis.expected):
        row = [each for each in diagnosis.expected if each.when == when]
        parts = [Part(_LOADERS[e.loader][0], e.per_s, _rate(e), _LOADERS[e.loader][1]) for e in row]
        if (wanted := diagnosis.wanted_per_s) is not None:
            parts.append(Part("your model", wanted, f"{rough_text(wanted)}/s", "c2"))
        behind = table(
            ["loader", f"{unit}/s", "at least", "at most", "your model would wait", "held back by"],
            [
                (
                    e.loader, rough_text(e.per_s), rough_text(e.low_per_s), rough_text(e.high_per_s),
                    "-" if e.stall is None else f"{e.stall:.0%}", e.cause.replace("_", " "),
                )
                for e in row
            ],
        )  # fmt: skip
        title, scene = _WHEN.get(when, (f"What loaders would deliver: {when}", ""))
        workers = f"{diagnosis.workers} worker{'s' * (diagnosis.workers != 1)}"
        said = f"{unit.capitalize()} a second with {workers}; computed, not tried. {scene}"
        yield figure(title, bars(f"{title}, {unit} a second", parts, words=210), behind, said)


def _rate(expected: Expected) -> str:
    rate = f"{rough_text(expected.per_s)}/s"
    return f"{rate}, waits {expected.stall:.0%}" if expected.stall else rate


def _storage(found: Findings) -> Iterator[str]:
    """The curves: by how many reads at a time, and by how much each reads."""
    storage, data = found.storage, found.data
    if storage is None or data is None or not storage.points:
        return
    what = "whole samples" if data.in_place else "blocks"
    parts = [Part(str(p.depth), p.per_s, f"{rough_text(p.per_s)}/s", "c1") for p in storage.points]
    behind = table(
        ["asked for at a time", "reads/s", "bytes/s", "half within", "99 % within"],
        [
            (
                p.depth, rough_text(p.per_s), f"{bytes_text(p.bytes_per_s)}/s", duration_text(p.p50_s),
                duration_text(p.p99_s),
            )
            for p in storage.points
        ],
    )  # fmt: skip
    title = "How fast the storage answers, by how many reads at a time"
    drawn = columns(title, parts, lambda value: f"{rough_text(value)}/s", below="reads at a time")
    place = "." if storage.cold else ", from memory: the disk was not asked."
    yield figure(title, drawn, behind, f"Random reads of {what}{place}")
    yield _sizes(found, storage)


def _sizes(found: Findings, storage: Storage) -> str:
    """What bytes cost, and what opening does."""
    if storage.opened is None or storage.small is None:
        return ""
    deepest = storage.points[-1]
    rows = [
        ("4 kB of each", storage.small.per_s, storage.small.bytes_per_s),
        ("whole, open", storage.opened.per_s, storage.opened.bytes_per_s),
        ("opened, whole", deepest.per_s, deepest.bytes_per_s),
    ]
    if found.opens is not None:
        rows.append(("only opened", found.opens.many_per_s, 0.0))
    parts = [Part(name, per_s, f"{rough_text(per_s)}/s", "c1") for name, per_s, _ in rows]
    behind = table(
        ["what is read", "reads/s", "bytes/s"],
        [
            (name, rough_text(per_s), f"{bytes_text(nbytes)}/s" if nbytes else "-")
            for name, per_s, nbytes in rows
        ],
    )
    title = "What bytes cost, and what opening costs"
    said = (
        f"{deepest.depth} reads at a time: of files that are open already, 4 kB or whole; and of files that "
        "are opened for it."
    )
    return figure(title, bars(f"{title}, reads a second", parts), behind, said)


def _facts(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.findings.data is None:
        return
    told = [(name, text) for name, text in facts_of(diagnosis) if name not in _PICTURED]
    yield "<h2>What was found</h2>"
    yield table(["what", "found"], told).replace("<table>", '<table class="words">', 1)
