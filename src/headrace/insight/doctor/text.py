"""Text: a diagnosis as lines of at most 80 characters, and as one HTML page that works offline and prints.

Names come from anywhere: whatever they hold, it cannot move a terminal's cursor.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from headrace.base.text import (
    aligned,
    bytes_text,
    count_text,
    counted,
    duration_text,
    labelled,
    printable,
    rate_text,
    rough_text,
)
from headrace.insight.doctor.advice import unit_of
from headrace.insight.doctor.findings import AHEAD, LATER, NATIVE, TORCH, UNCACHED
from headrace.pages.charts import Part, bars, columns, figure, table
from headrace.pages.html import card_list, document, marked, safe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.doctor.findings import (
        Advice,
        DataPlace,
        DataSet,
        Diagnosis,
        Environment,
        Findings,
        StorageRates,
    )

WIDTH: Final = 80
_MARGIN: Final = 10
_FORMATS_SHOWN: Final = 3
_PATH_MAX: Final = 60
_MORE_SHOWN: Final = 4
_OTHERS_SHOWN: Final = 0.2
_PRESSED: Final = 0.25
_LABEL: Final = 30
_COLUMN: Final = 13


_WHEN: Final = {
    LATER: "Later epochs come from memory, where the data fit.",
    UNCACHED: "Uncached: with nothing in memory, as after a restart.",
}


def lines_of(diagnosis: Diagnosis, width: int = WIDTH) -> list[tuple[str, str]]:
    """The lines, each with what it is: `head`, `fact`, `verdict`, `do`, `command` or `more`."""
    findings = diagnosis.findings
    data = findings.data
    if data is None:
        return [("verdict", diagnosis.verdict)]
    over = "interrupted after" if findings.interrupted else "in"
    took = f"{over} {findings.seconds:.0f} s; nothing was written"
    lines = [("head", f"{_short(data.path)}   ({took})"), ("fact", "")]
    for name, text in facts_of(diagnosis):
        lines += [("fact", line) for line in labelled(name, text, width=width)]
    lines.append(("fact", ""))
    lines += [("fact", line) for line in _expected(diagnosis, width)]
    lines += [("verdict", line) for line in labelled("verdict", diagnosis.verdict, width=width)]
    for number, advice in enumerate(diagnosis.advice[: 1 + _MORE_SHOWN]):
        lines.append(("fact", ""))
        lines += _advice(("do first", "then", "")[min(number, 2)], advice, width)
    hidden = len(diagnosis.advice) - 1 - _MORE_SHOWN
    if hidden > 0:
        lines += [("more", f"{'':<{_MARGIN}}{hidden} more with --json")]
    return lines


def _short(path: str) -> str:
    text = printable(path)
    return text if len(text) <= _PATH_MAX else "..." + text[3 - _PATH_MAX :]


# -- what was found ------------------------------------------------------------------------------------


def facts_of(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What was found: (word for the margin, text)."""
    findings = diagnosis.findings
    assert findings.data is not None
    yield "data", _data(findings.data) + _huge(findings)
    if findings.place is not None:
        yield "place", _place(findings.place, findings.resident)
    if findings.storage is not None:
        yield "storage", "\n".join(_storage(findings, findings.storage, findings.data))
    if findings.environment is not None:
        yield "cpu", _cpu(findings, findings.environment)
        yield "machine", _machine(findings.environment)
        pressure = findings.environment.pressure
        kind, share = max(pressure.items(), key=lambda each: each[1], default=("", 0.0))
        if share > _PRESSED:
            busy = {"io": "the disks", "cpu": "the CPUs"}.get(kind, kind)
            waited = f"somebody waited for them {share:.0%} of the time"
            yield "note", f"other programs keep {busy} busy ({waited}): here is what they leave"
    if (decode := findings.decode) is not None and decode.failed:
        tried = f"{decode.failed:,} of {counted(decode.samples, 'sample')} that were tried"
        yield "note", f"{tried} were not decoded, the first: {printable(decode.first_failed)}"
    for note in dict.fromkeys(findings.notes):
        yield "note", printable(note)


def _data(data: DataSet) -> str:
    about = "" if data.exact else "more than " if data.at_least else "about "
    kind = "" if data.format in ("bytes", "mixed") else f"{printable(data.format)} "
    nearly = "about " if data.files_estimated else ""
    files = f"{nearly}{counted(data.files, 'file')}"
    if not data.in_place:
        rows = "" if data.blocks else f"{about}{count_text(data.samples)} rows in "
        text = f"{rows}{nearly}{counted(data.files, f'{kind}file')}, looked at in blocks"
    elif data.kind == "folder":
        text = f"{about}{count_text(data.samples)} {'' if data.formats else kind}files"
        if data.formats:
            shares = [
                f"{share:.0%} {printable(name)}" for name, share in data.formats[:_FORMATS_SHOWN]
            ]
            text += f" ({', '.join(shares)}{', ...' if len(data.formats) > _FORMATS_SHOWN else ''})"
    else:
        inside = "" if data.kind in ("store", "object") else f" in {files}"
        what = "documents of tokens" if data.format == "tokens" else f"{kind}samples"
        text = f"{about}{count_text(data.samples)} {what}{inside}"
    if data.classes > 1:
        text += f" in {count_text(data.classes)} classes"
    size = f"{bytes_text(data.size_p50)}"
    if data.size_p90 > 1.2 * data.size_p10:
        size += f" (from {bytes_text(data.size_p10)} to {bytes_text(data.size_p90)})"
    return f"{text}, {bytes_text(data.nbytes)} in all, typically {size}"


def _huge(findings: Findings) -> str:
    if findings.huge is None:
        return ""
    huge, unit = findings.huge
    most = bytes_text(huge.most) if unit == "bytes" else f"{huge.most / 1e6:,.3g} million pixels"
    few = f"{huge.count:,} of {huge.of:,} looked at are far larger"
    return f"; {few}, up to {most}, with {huge.share:.0%} of all {unit}"


def _place(place: DataPlace, resident: float | None) -> str:
    if place.simulated:
        return f"{place.simulated} (no real storage: --simulate)"
    text = printable(place.file_system or "a file system that does not say what it is")
    if place.mount:
        text += f" on {printable(place.mount)}"
    if place.network:
        text += ", over the network"
    elif place.rotational is not None:
        text += ", a disk that turns" if place.rotational else ", a disk without moving parts"
    if resident is not None:
        share = "nothing" if resident < 0.005 else f"{resident:.0%}"
        text += f"; {share} of it lies in memory already"
    return text


def _storage(findings: Findings, storage: StorageRates, data: DataSet) -> Iterator[str]:
    memory = "" if storage.cold else ", from memory (the disk was not asked)"
    yield f"random reads of {'whole samples' if data.in_place else 'blocks'}{memory}:"
    yield from (f"  {line}" for line in aligned([_STORAGE_HEADS, *_storage_rows(storage)], "<>>>>"))
    if (opens := findings.opens) is not None:
        one, many = rough_text(opens.one_per_s), rough_text(opens.many_per_s)
        yield f"opening files: {one}/s one at a time, {many}/s by {opens.threads} threads"
    if storage.opened is not None and storage.small is not None:
        whole, small = rough_text(storage.opened.per_s), rough_text(storage.small.per_s)
        yield f"files already open: {whole}/s whole, {small}/s if only 4 kB are read"


_STORAGE_HEADS: Final = ("asked for", "reads/s", "bytes/s", "half within", "99 % within")


def _storage_rows(storage: StorageRates) -> list[tuple[str, ...]]:
    return [
        (
            "one at a time" if point.depth == 1 else f"{point.depth} at a time",
            f"{rough_text(point.per_s)}/s", rate_text(point.bytes_per_s),
            duration_text(point.p50_s), duration_text(point.p99_s),
        )
        for point in storage.points
    ]  # fmt: skip


def _cpu(findings: Findings, environment: Environment) -> str:
    decode, cpu, data = findings.decode, findings.cpu, findings.data
    cpus = f"{environment.cpus:g} CPU{'s' * (environment.cpus != 1)}"
    if cpu and cpu.others > _OTHERS_SHOWN:
        cpus += " (other programs want them, too)"
    if data is not None and data.format == "tokens":
        return f"{cpus}; tokens need no decoding"
    if decode is None or not decode.decoder or decode.sample_s <= 0:
        return f"{cpus}; {decode.why}" if decode is not None and decode.why else cpus
    scaled = f" (scaled to {decode.side} x {decode.side})" if decode.side else ""
    return (
        f"decoding alone{scaled}, by {decode.decoder}: {rough_text(1 / decode.sample_s)} {decode.format}/s "
        f"on one core, so {rough_text(environment.cpus / decode.sample_s)}/s at most on {cpus}"
    )


def _machine(environment: Environment) -> str:
    engine = "io_uring works"
    if environment.engine != "uring":
        why = printable(environment.engine_why.rstrip("."))
        known = (
            "no, threads instead"
            if environment.engine or why
            else "not known, nothing was read in time"
        )
        engine = f"io_uring: {known}" + (f" ({why})" if why else "")
    memory = bytes_text(environment.memory_free_bytes)
    if environment.memory_limit_bytes is not None:
        memory += f" (limit {bytes_text(environment.memory_limit_bytes)})"
    parts = [f"Linux {printable(environment.kernel)}", engine, f"{memory} memory free"]
    if environment.shm_free_bytes is not None:
        parts.append(f"{bytes_text(environment.shm_free_bytes)} free in /dev/shm")
    if environment.nofile_soft < 1 << 60:
        parts.append(f"{environment.nofile_soft:,} open files allowed")
    if environment.swap_used_bytes:
        parts.append(f"{bytes_text(environment.swap_used_bytes)} swapped out")
    gpus = Counter(environment.gpus).items()
    names = [f"{count} x {name}" if count > 1 else name for name, count in gpus]
    return ", ".join([*parts, ", ".join(names) or "no GPU seen"])


# -- what follows --------------------------------------------------------------------------------------


_OWN: Final = "without your own transforms, and your model's share of processors"


def _expected(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """A table: a row for each loader, a column for each state of the page cache."""
    expected = diagnosis.expected
    if not expected:
        return
    unit = unit_of(diagnosis.findings)
    scenes = list(dict.fromkeys(each.when for each in expected))
    workers = counted(diagnosis.workers, "worker")
    error = expected[0].high_per_s / expected[0].per_s - 1
    heads = "".join(f"{scene or 'now':>{_COLUMN}}" for scene in scenes)
    yield f"{'expected':<{_MARGIN}}{f'{unit}/s with {workers}':<{_LABEL}}{heads}"
    yield f"{'':<{_MARGIN}}({_OWN})"
    for loader in dict.fromkeys(each.loader for each in expected):
        row = [e for e in expected if e.loader == loader]
        waits = ["" if e.stall is None else f" ({e.stall:.0%})" for e in row]
        cells = [f"{rough_text(e.per_s)}{wait}" for e, wait in zip(row, waits, strict=True)]
        yield f"{'':<{_MARGIN}}  {loader:<{_LABEL - 2}}{''.join(f'{c:>{_COLUMN}}' for c in cells)}"
    if diagnosis.wanted_per_s is not None and diagnosis.step_s is not None:
        label = f"your model, {diagnosis.batch} in {duration_text(diagnosis.step_s)}"
        yield f"{'':<{_MARGIN}}  {label:<{_LABEL - 2}}{rough_text(diagnosis.wanted_per_s):>{_COLUMN}}"
    brackets = "In brackets: the share of its time that your model would wait. "
    note = brackets if expected[0].stall is not None else ""
    note += f"Computed, not tried: most are within a factor of {1 + error:.1f} of what loaders really do. "
    note += " ".join(_WHEN[scene] for scene in scenes if scene in _WHEN)
    yield from labelled("", note, width=width)
    yield ""


def _advice(name: str, advice: Advice, width: int) -> list[tuple[str, str]]:
    kind, why = "more", f"{advice.because}. Gain: {advice.gain}."
    if name == "do first":
        kind, why = "do", f"because {advice.because}.\ngain: {advice.gain}"
    lines = [(kind, line) for line in labelled(name, advice.do, width=width)]
    lines += [("more", line) for line in labelled("", why, width=width)]
    prompt = "" if advice.python else "$ "
    # Not wrapped: it is there to be pasted.
    for part in advice.command.split("\n"):
        lines.append(("command", f"{'':<{_MARGIN + 2}}{prompt}{part}"))
    if advice.proof:
        lines.append(("more", f"{'':<{_MARGIN}}proof on your own script:"))
        lines.append(("command", f"{'':<{_MARGIN + 2}}$ {advice.proof}"))
    return lines


# -- page --------------------------------------------------------------------------------------------

_LOADERS: Final = {
    TORCH: ("torch", "c4"), AHEAD: ("headrace", "c1"), NATIVE: ("headrace, native", "c1"),
}  # fmt: skip

_TITLES: Final = {
    "": ("What loaders would deliver now", "As things are, with what lies in memory."),
    LATER: ("What loaders would deliver in later epochs", "From memory, where the data fit."),
    UNCACHED: ("What loaders would deliver uncached", "With nothing in memory, as after a restart."),
}  # fmt: skip


def doctor_page(diagnosis: Diagnosis) -> str:
    """The page."""
    findings, data = diagnosis.findings, diagnosis.findings.data
    name = data.path if data is not None else "the data"
    over = "interrupted after" if findings.interrupted else "looked at for"
    parts = [
        f"<h1>{safe(name)}</h1>",
        f'<p class="soft">{over} {findings.seconds:.0f} s; nothing was written there</p>',
        f"<p><strong>{safe(diagnosis.verdict)}</strong></p>",
        _cards(diagnosis, data),
    ]
    for number, one in enumerate(diagnosis.advice):  # the first one large
        if number < 2:
            parts.append("<h2>Then</h2>" if number else "<h2>Do first</h2>")
        do = marked(one.do)
        parts.append(f"<p>{do}</p>" if number else f"<p><strong>{do}</strong></p>")
        because = f"Because {marked(one.because)}. Gain: {marked(one.gain)}."
        parts += [f'<p class="soft">{because}</p>', f"<pre>{safe(one.command)}</pre>"]
        proof = f'<p class="soft">Proof on your own script:</p><pre>{safe(one.proof)}</pre>'
        parts += [proof] if one.proof else []
    parts += _page_expected(diagnosis)
    if data is not None:
        parts += _page_storage(findings, data)
        # Of the storage there is a picture, and a table behind it.
        facts = [(name, text) for name, text in facts_of(diagnosis) if name != "storage"]
        parts += ["<h2>What was found</h2>", table(["what", "found"], facts, words=True)]
    return document(f"Doctor: {name}", parts)


def _cards(diagnosis: Diagnosis, data: DataSet | None) -> str:
    unit = unit_of(diagnosis.findings)
    cards: list[tuple[str, str]] = []
    if data is not None:
        many = f"{'' if data.exact else '~'}{count_text(data.samples)}"
        counted_in = "blocks" if data.blocks else "samples" if data.in_place else "rows"
        cards += [(many, counted_in), (bytes_text(data.nbytes), "in all")]
    for each in diagnosis.expected:
        if not each.when:
            what = f"{unit} expected now, with {_LOADERS[each.loader][0]}"
            cards.append((f"{rough_text(each.per_s)}/s", what))
    if (wanted := diagnosis.wanted_per_s) is not None:
        cards.append((f"{rough_text(wanted)}/s", f"{unit} that your model asks for"))
    return card_list(cards)


def _page_expected(diagnosis: Diagnosis) -> Iterator[str]:
    """The loaders, and what the model asks for, in each state of the page cache."""
    unit, workers = unit_of(diagnosis.findings), counted(diagnosis.workers, "worker")
    for when in dict.fromkeys(each.when for each in diagnosis.expected):
        parts: list[Part] = []
        rows = []
        for e in (each for each in diagnosis.expected if each.when == when):
            rate, (name, color) = rough_text(e.per_s), _LOADERS[e.loader]
            waits = f", waits {e.stall:.0%}" if e.stall else ""
            parts.append(Part(name, e.per_s, f"{rate}/s{waits}", color))
            rows.append((
                e.loader, rate, rough_text(e.low_per_s), rough_text(e.high_per_s),
                "-" if e.stall is None else f"{e.stall:.0%}", e.cause.replace("_", " "),
            ))  # fmt: skip
        if (wanted := diagnosis.wanted_per_s) is not None:
            parts.append(Part("your model", wanted, f"{rough_text(wanted)}/s", "c2"))
        wait = "your model would wait"
        head = ["loader", f"{unit}/s", "at least", "at most", wait, "held back by"]
        title, scene = _TITLES[when]
        caption = f"{unit.capitalize()} a second with {workers}; computed, not tried. {scene}"
        drawn = bars(f"{title}, {unit} a second, {_OWN}", parts, words=210)
        yield figure(title, drawn, table(head, rows), caption)


def _page_storage(findings: Findings, data: DataSet) -> Iterator[str]:
    """The curves: by how many reads at a time, and by how much each reads."""
    storage = findings.storage
    if storage is None or not storage.points:
        return
    parts = [Part(str(p.depth), p.per_s, f"{rough_text(p.per_s)}/s", "c1") for p in storage.points]
    behind = table(_STORAGE_HEADS, _storage_rows(storage))
    title = "How fast the storage answers, by how many reads at a time"
    drawn = columns(title, parts, lambda value: f"{value:,.10g}/s", below="reads at a time")
    place = "." if storage.cold else ", from memory: the disk was not asked."
    what = "whole samples" if data.in_place else "blocks"
    yield figure(title, drawn, behind, f"Random reads of {what}{place}")
    if storage.opened is None or storage.small is None:
        return
    deepest = storage.points[-1]
    rows = [
        ("4 kB of each", storage.small.per_s, storage.small.bytes_per_s),
        ("whole, open", storage.opened.per_s, storage.opened.bytes_per_s),
        ("opened, whole", deepest.per_s, deepest.bytes_per_s),
    ]
    if findings.opens is not None:
        rows.append(("only opened", findings.opens.many_per_s, 0.0))
    parts = [Part(name, per_s, f"{rough_text(per_s)}/s", "c1") for name, per_s, _ in rows]
    behind = table(
        ["what is read", "reads/s", "bytes/s"],
        [(n, rough_text(r), rate_text(size) if size else "-") for n, r, size in rows],
    )
    title = "What bytes cost, and what opening costs"
    caption = f"{deepest.depth} reads at a time: of files that are open already, 4 kB or whole; "
    caption += "and of files that are opened for it."
    yield figure(title, bars(f"{title}, reads a second", parts), behind, caption)
