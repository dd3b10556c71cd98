"""Report: a run, or two side by side, as one HTML file.

The page has no script and no address: it works offline, prints, and nothing in it acts. Each chart is drawn
where the run's files have what it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import aligned, bytes_text, counted, number_text, seconds_text
from headrace.bench.compare import MEASURES, measure_named, measured, value_of
from headrace.bench.metrics import bounds_of
from headrace.bench.results import flat, number_at, number_of
from headrace.bench.summary import NOT_MLPERF
from headrace.bench.timeline import phases_of, slowest_steps
from headrace.pages.charts import Part, bars, columns, figure, stacked, table
from headrace.pages.html import axis_text, card_list, document, measure_text, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.bench.compare import RunComparison
    from headrace.bench.metrics import Confidence
    from headrace.bench.results import RankBlock, RunResult
    from headrace.bench.timeline import StepPhase


_RANKS_MOST: Final = 64
_BINS_MOST: Final = 120
_SLOWEST: Final = 15

_TIMES: Final = {
    "compute": ("compute", "c1"), "wait": ("waiting for data", "c2"),
    "barrier": ("at the barrier", "c3"), "harness": ("harness", "c4"),
}  # fmt: skip
_SOLUTION: Final = {
    "training": ("training", "c1"), "staging": ("staging", "c2"), "evaluation": ("evaluation", "c3"),
    "checkpointing": ("checkpointing", "c5"), "other": ("other", "c4"),
}  # fmt: skip
_WAITS: Final = {
    "p50": "median", "p90": "90 %", "p99": "99 %", "p99.9": "99.9 %", "max": "longest",
}  # fmt: skip


def report_page(runs: Sequence[RunResult], blocks: Sequence[RankBlock]) -> str:
    """The page of a run, or of its repeats, of which charts show the last."""
    run = runs[-1]
    model = run.workload.get("model")
    name = str(model.get("name", "")) if isinstance(model, dict) else ""
    title = f"Storage benchmark: {name or run.folder}"
    simulated = run.provenance.get("simulated")
    note = f"The storage was simulated ({simulated}): its delays are not real." if simulated else ""
    figures = [
        (measure.title, with_confidence(value, measure.unit), measure.name)
        for measure in MEASURES
        if (value := measured(runs, measure)) is not None
    ]
    return document(title, [
        f"<h1>{safe(title)}</h1>",
        f'<p class="soft">{safe(_subtitle(runs))}</p>',
        f'<p class="not-mlperf">{NOT_MLPERF} {safe(note)}</p>',
        _cards(runs),
        *(
            f"<p><strong>{safe(bound.line)}</strong></p>"
            for bound in bounds_of([each.own for each in runs])
        ),
        *_charts(runs, blocks),
        "<h2>All figures</h2>",
        table(["figure", "value", "its name in conditions"], figures),
        *_provenance(run),
    ])  # fmt: skip


def _charts(runs: Sequence[RunResult], blocks: Sequence[RankBlock]) -> Iterator[str]:
    run = runs[-1]
    phases = phases_of(blocks)
    target = run.au_target_percent
    line = None if target is None else (target, f"asked for: {number_text(target)} %")
    total = seconds_text(number_at(run.own, "time_to_solution.total_s") or 0.0)
    checkpoint = run.own.get("checkpoint")
    checkpoint = checkpoint if isinstance(checkpoint, dict) else {}
    yield from _titled("Training", (
        _split(run, "time", "Where the accelerators' time went", _TIMES),
        _split(
            run, "time_to_solution", f"Time to solution: {total}", _SOLUTION,
            "From the first byte that was staged to the end of the last epoch and its checkpoint.",
        ),
        _repeats(runs, line),
        _columns(
            "AU of each epoch", _parts(run.metric.get("train_au_percentage"), "{:.2f} %".format),
            _percent, ("epoch", "AU"), top=100, line=line,
        ),
        _columns(
            "Throughput of each epoch, samples/s",
            _parts(run.metric.get("train_throughput_samples_per_second"), number_text),
            axis_text, ("epoch", "samples/s"),
        ),
        _accelerators(blocks),
    ))  # fmt: skip
    yield from _titled("Waiting for data", (_waits(run), _over_time(phases)))
    yield _slowest(phases)
    yield _bytes(run)
    yield from _titled("Checkpoints", (
        _columns(
            "Time to save each checkpoint", _parts(checkpoint.get("saves_s"), seconds_text),
            seconds_text, ("checkpoint", "time"),
            "Of the slowest accelerator, until its bytes are where the writer promises them.",
        ),
        _columns(
            "Time to read each back", _parts(checkpoint.get("loads_s"), seconds_text, "c2"),
            seconds_text, ("checkpoint", "time"), "Of the slowest accelerator.",
        ),
    ))  # fmt: skip


def _titled(title: str, parts: Sequence[str]) -> Iterator[str]:
    """A heading and what there is below it; nothing without."""
    if any(parts):
        yield f"<h2>{title}</h2>"
        yield from parts


def _percent(value: float) -> str:
    return f"{number_text(value)} %"


def _with_table(
    title: str, svg: str, parts: Sequence[Part], head: Sequence[str], note: str = ""
) -> str:
    return figure(title, svg, table(head, [(part.name, part.text) for part in parts]), note)


def _columns(
    title: str, parts: Sequence[Part], text_of: Callable[[float], str], head: tuple[str, str],
    note: str = "", *, top: float | None = None, line: tuple[float, str] | None = None,
) -> str:  # fmt: skip
    """A column for each part, and their table; nothing without parts."""
    if not parts:
        return ""
    svg = columns(title, parts, text_of, below=head[0], top=top, line=line)
    return _with_table(title, svg, parts, head, note)


def _split(
    run: RunResult, path: str, title: str, kinds: Mapping[str, tuple[str, str]], note: str = ""
) -> str:
    """The parts of a time that has a total."""
    total = number_at(run.own, f"{path}.total_s") or 0.0
    parts = [
        Part(name, max(0.0, seconds), f"{100 * seconds / total:.1f} %", colour)
        for key, (name, colour) in kinds.items()
        if total > 0 and (seconds := number_at(run.own, f"{path}.{key}_s")) is not None
    ]
    svg = stacked(title, parts)
    rows = [(part.name, part.text, f"{part.value:.3f}") for part in parts]
    return figure(title, svg, table(["part", "share", "seconds"], rows), note) if svg else ""


def _repeats(runs: Sequence[RunResult], line: tuple[float, str] | None) -> str:
    measure = measure_named("au")
    values = [(n, value_of(run.summary, measure), run) for n, run in enumerate(runs, 1)]
    known = [(n, value, run) for n, value, run in values if value is not None]
    if len(runs) < 2 or not known:
        return ""
    parts = [Part(str(n), value, f"{value:.2f} %") for n, value, _ in known]
    rows = [(n, f"{value:.2f} %", run.folder) for n, value, run in known]
    svg = columns("AU of each run", parts, _percent, below="run", top=100, line=line)
    return figure("AU of each run", svg, table(["run", "AU", "results"], rows))


def _parts(values: object, text_of: Callable[[float], str], colour: str = "c1") -> list[Part]:
    """Parts of a list of a run's file, numbered from 1."""
    numbers = [number_of(value) for value in values] if isinstance(values, list) else []
    return [
        Part(str(n), max(0.0, value), text_of(value), colour)
        for n, value in enumerate(numbers, 1)
        if value is not None
    ]


def _accelerators(blocks: Sequence[RankBlock]) -> str:
    of_rank: dict[int, list[float]] = {}
    for block in blocks:
        if block.kind == "train" and block.au_percent is not None:
            of_rank.setdefault(block.rank, []).append(block.au_percent)
    if len(of_rank) < 2:
        return ""
    means = sorted((float(np.mean(aus)), rank) for rank, aus in of_rank.items())[:_RANKS_MOST]
    parts = [Part(str(rank), max(0.0, au), f"{au:.2f} %") for au, rank in means]
    note = f"The {len(parts)} lowest of {len(of_rank)}." if len(of_rank) > len(parts) else ""
    title = "AU of each accelerator, lowest first"
    return _columns(title, parts, _percent, ("accelerator", "AU"), note, top=100)


def _waits(run: RunResult) -> str:
    waits = run.own.get("wait_s")
    values = {key: number_of(waits.get(key)) for key in _WAITS} if isinstance(waits, dict) else {}
    parts = [
        Part(_WAITS[key], max(0.0, value), seconds_text(value), "c2")
        for key, value in values.items()
        if value is not None
    ]
    if not parts:
        return ""
    svg = bars("Percentiles of steps' waits for data", parts)
    note = "Of the steps of training that count: the first of an epoch does not, unless the workload says so."
    return _with_table("How long steps waited", svg, parts, ["of the steps", "wait"], note)


def _over_time(phases: Sequence[StepPhase]) -> str:
    train = [phase for phase in phases if phase.blocks[0].kind == "train"]
    if not train:
        return ""
    longest = np.concatenate([phase.waits_s.max(axis=0) for phase in train])
    median = np.concatenate([np.median(phase.waits_s, axis=0) for phase in train])
    edges = np.linspace(0, len(longest), min(_BINS_MOST, len(longest)) + 1).astype(int)
    parts, rows = [], []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        most = float(longest[begin:end].max())
        steps = f"{begin + 1}" if end == begin + 1 else f"{begin + 1}-{end}"
        parts.append(Part(str(begin + 1), most, seconds_text(most), "c2"))
        rows.append((steps, seconds_text(most), seconds_text(float(np.median(median[begin:end])))))
    svg = columns("The longest wait of each step, in order", parts, seconds_text, below="step")
    note = (
        f"All {len(longest)} steps of training in order, those that do not count, too; of each the "
        "accelerator that waited longest."
    )
    behind = table(["steps", "longest wait", "median wait"], rows)
    return figure("Waits over the run", svg, behind, note)


def _slowest(phases: Sequence[StepPhase]) -> str:
    if not phases:
        return ""
    title = "<h2>The slowest steps that waited</h2>"
    steps = [slow for slow in slowest_steps(phases, _SLOWEST) if slow.wait_s > 0]
    if not steps:
        return title + "<p>None of the slowest steps waited for data.</p>"
    rows = []
    for slow in steps:
        block = slow.phase.blocks[0]
        name = f"epoch {block.epoch}, {block.kind} step {slow.step + 1}"
        rows.append((name, slow.rank, seconds_text(slow.wait_s), seconds_text(slow.compute_s)))
    return title + table(["step", "slowest accelerator", "wait", "compute"], rows)


def _bytes(run: RunResult) -> str:
    device = number_of(run.own.get("device_bytes"))
    cached = number_of(run.own.get("page_cache_bytes"))
    if device is None or cached is None or device + cached <= 0:
        return ""
    sources = (
        ("from the device", device, "c1"),
        ("not from the device (page cache, memory)", cached, "c3"),
    )
    parts = [Part(name, max(0.0, n), bytes_text(n), colour) for name, n, colour in sources]
    title = "Where the bytes came from"
    return _with_table(title, stacked(title, parts), parts, ["source", "bytes"])


def _subtitle(runs: Sequence[RunResult]) -> str:
    summary, own = runs[-1].summary, runs[-1].own
    accelerators = int(number_of(summary.get("num_accelerators")) or 0)
    hosts = int(number_of(summary.get("num_hosts")) or 0)
    engine, checkpoint = own.get("engine"), own.get("checkpoint")
    ran = f"engine {'of DLIO' if engine is None else engine}"
    if engine is None and isinstance(checkpoint, dict):
        ran = f"checkpoints by {checkpoint.get('writer')}"
    # Without what a second has of parts, and the day once.
    times = (str(summary.get(name)).partition(".")[0] for name in ("start", "end"))
    start, end = (text.replace("T", " ", 1) for text in times)
    day, _, clock = end.partition(" ")
    text = (
        f"{counted(accelerators, 'emulated accelerator')} on {counted(hosts, 'host')}, {ran}; "
        f"{start} to {clock if clock and start.startswith(day) else end}"
    )
    return f"{text}; {len(runs)} runs, charts show the last" if len(runs) > 1 else text


def with_confidence(value: Confidence, unit: str, *, brief: bool = False) -> str:
    """A mean, and its interval where there are repeats; `brief`: what interval that is, stands elsewhere."""
    text = measure_text(value.mean, unit)
    if value.half_width is None:
        return text
    if value.half_width > abs(value.mean):
        return f"{text} ± more" if brief else f"{text} ± more than that (95 %, {value.runs} runs)"
    text += f" ± {measure_text(value.half_width, unit)}"
    return text if brief else f"{text} (95 %, {value.runs} runs)"


def _comparison_cells(comparison: RunComparison) -> list[tuple[str, ...]]:
    """A table of two results: the names of its columns, then a row for each figure."""
    cells: list[tuple[str, ...]] = [("", "A", "B", "change", "")]
    for row in comparison.rows:
        unit, width = row.measure.unit, row.change_half_width
        change = "from 0" if row.change is None else f"{row.change:+z.2%}"
        if row.change is not None and width is not None:
            known = width <= max(1.0, abs(row.change))
            change = f"{change} ± {width:.2%}" if known else "not known"
        judgement = {None: "", True: "worse", False: "better"}[row.worse]
        if row.worse is not None and row.clear is False:
            judgement = "within the noise"
        if row.clear is None and row.change is not None and abs(row.change) < 0.01:
            judgement = ""  # measured once, a hundredth says nothing
        sides = [with_confidence(side, unit, brief=True) for side in (row.a, row.b)]
        cells.append((row.measure.title, *sides, change, judgement))
    return cells


def _comparison_notes(comparison: RunComparison) -> Iterator[str]:
    """What one needs to know to read the table."""
    if any(row.a.half_width is not None or row.b.half_width is not None for row in comparison.rows):
        yield "± is the 95 % confidence interval over the repeats; more: wider than the value itself."
    if any(row.worse is not None and row.clear is None for row in comparison.rows):
        yield "Figures without ± on both sides were measured once: their changes may be noise."
    for name, bounds in zip("AB", comparison.bounds, strict=True):
        yield from (f"{name}: {bound.line}" for bound in bounds)


def comparison_lines(comparison: RunComparison) -> list[str]:
    """Two results side by side, as text."""
    return [*aligned(_comparison_cells(comparison), "<>>><"), *_comparison_notes(comparison)]


def comparison_page(comparison: RunComparison, names: Sequence[str]) -> str:
    """The page of two results side by side."""
    head, *cells = _comparison_cells(comparison)
    return document("Two storage benchmarks", [
        "<h1>Two storage benchmarks</h1>",
        *(f'<p class="soft">{safe(name)}</p>' for name in names),
        f'<p class="not-mlperf">{NOT_MLPERF}</p>',
        table(head, cells),
        *(f'<p class="soft">{safe(note)}</p>' for note in _comparison_notes(comparison)),
        *_titled("Run differently", [
            table(["what", "A", "B"], comparison.differences, words=True)
            if comparison.differences else ""
        ]),
    ])  # fmt: skip


_CARDS: Final = (
    "au", "throughput", "io", "wait_share", "wait_p99", "checkpoint_s", "load_s", "checkpoint_size",
    "time_to_solution",
)  # fmt: skip


def _cards(runs: Sequence[RunResult]) -> str:
    cards = []
    for measure in map(measure_named, _CARDS):
        value = measured(runs, measure)
        if value is None:
            continue
        below = "AU, accelerator utilisation" if measure.name == "au" else measure.title
        if value.half_width is not None:
            below += f", ± {measure_text(value.half_width, measure.unit)} of {value.runs} runs"
        target = runs[-1].au_target_percent
        if measure.name == "au" and target is not None:
            met = value.mean >= target
            below += f"; {'✓ meets' if met else '✗ below'} {number_text(target)} %"
        cards.append((measure_text(value.mean, measure.unit), below))
    return card_list(cards)


def _provenance(run: RunResult) -> Iterator[str]:
    hosts = ("hostname", "host_processor_name", "host_cpu_count", "host_memory_GB")
    rows = [
        *_rows({k: v for k, v in run.provenance.items() if k != "words"}),
        *_rows(run.own.get("residency_before"), "page cache before: "),
        *_rows({key: run.summary[key] for key in hosts if key in run.summary}),
        ("results", run.folder),
    ]
    yield "<h2>Where and how it ran</h2>"
    yield table(["what", "value"], rows, words=True)
    if run.workload:
        keys = table(["key", "value"], list(_rows(run.workload)), words=True)
        yield f"<h2>The workload</h2><details><summary>All keys</summary>{keys}</details>"
    notes = run.own.get("notes")
    if isinstance(notes, list) and notes:
        yield "<h2>Notes</h2><ul>" + "".join(f"<li>{safe(note)}</li>" for note in notes) + "</ul>"


_LISTED_MOST: Final = 12
"""Values of a list that are shown, at most: what has more is a histogram."""


def _rows(document: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in flat(document, prefix).items():
        if not isinstance(value, list):
            yield key, _plain(value)
        elif len(value) > _LISTED_MOST and key.rpartition(".")[2] != "command":
            yield key, f"{len(value)} values: see summary.json"
        else:
            yield key, " ".join(_plain(each) for each in value)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    number = number_of(value)
    return f"{number:.6g}" if isinstance(value, float) and number is not None else str(value)
