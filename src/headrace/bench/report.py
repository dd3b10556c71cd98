"""Report: a run as one HTML file. No script, no address: it works offline, prints, and nothing in it acts.

Each chart is drawn where the run's files have what it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import bytes_text, number_text, seconds_text
from headrace.bench.compare import MEASURES, measure_named, measured, value_of
from headrace.bench.results import number_of
from headrace.bench.trace import phases_of, slowest_steps
from headrace.pages.charts import Part, bars, columns, figure, stacked, table
from headrace.pages.html import axis_text, document, measure_text, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.bench.compare import RunMeasure
    from headrace.bench.metrics import Confidence
    from headrace.bench.results import RankBlock, RunResult
    from headrace.bench.trace import StepPhase


_RANKS_MOST: Final = 64
_BINS_MOST: Final = 120
_SLOWEST: Final = 15


def sections_of(runs: Sequence[RunResult], blocks: Sequence[RankBlock]) -> Iterator[str]:
    """The charts of a run, or of the last of its repeats, as HTML."""
    run = runs[-1]
    phases = phases_of(blocks, barrier=str(run.provenance.get("barrier", "step")))
    yield from _titled("Training", (
        _time(run), _solution(run), _repeats(runs), _epochs(run), _throughput(run),
        _accelerators(blocks),
    ))  # fmt: skip
    yield from _titled("Waiting for data", (_waits(run), _over_time(phases)))
    yield _slowest(phases)
    yield _bytes(run)
    yield from _titled("Checkpoints", (_checkpoints(run, "save"), _checkpoints(run, "load")))


def _titled(title: str, parts: Sequence[str]) -> Iterator[str]:
    """A heading and what there is below it; nothing without."""
    if any(parts):
        yield f"<h2>{title}</h2>"
        yield from parts


def _percent(value: float) -> str:
    return f"{number_text(value)} %"


def _time(run: RunResult) -> str:
    kinds = (
        ("compute", "compute", "c1"), ("wait", "waiting for data", "c2"),
        ("barrier", "at the barrier", "c3"), ("harness", "harness", "c4"),
    )  # fmt: skip
    parts, rows = _split(run.own.get("time"), kinds)
    svg = stacked("Where the time of all accelerators went", parts)
    if not svg:
        return ""
    return figure(
        "Where the accelerators' time went", svg, table(["part", "share", "seconds"], rows)
    )


def _solution(run: RunResult) -> str:
    kinds = (
        ("training", "training", "c1"), ("staging", "staging", "c2"),
        ("evaluation", "evaluation", "c3"), ("checkpointing", "checkpointing", "c5"),
        ("other", "other", "c4"),
    )  # fmt: skip
    split = run.own.get("time_to_solution")
    parts, rows = _split(split, kinds)
    svg = stacked("What the time to solution went to", parts)
    if not svg or not isinstance(split, dict):
        return ""
    total = seconds_text(number_of(split.get("total_s")) or 0.0)
    note = "From the first byte that was staged to the end of the last epoch and its checkpoint."
    behind = table(["part", "share", "seconds"], rows)
    return figure(f"Time to solution: {total}", svg, behind, note)


def _split(
    split: object, kinds: Sequence[tuple[str, str, str]]
) -> tuple[list[Part], list[tuple[str, str, str]]]:
    """Parts of a time that has a total, and the rows of their table."""
    parts: list[Part] = []
    rows: list[tuple[str, str, str]] = []
    total = (number_of(split.get("total_s")) if isinstance(split, dict) else None) or 0.0
    for name, title, colour in kinds:
        seconds = number_of(split.get(f"{name}_s")) if isinstance(split, dict) else None
        if seconds is None or total <= 0:
            continue
        share = f"{100 * seconds / total:.1f} %"
        parts.append(Part(title, max(0.0, seconds), share, colour))
        rows.append((title, share, f"{seconds:.3f}"))
    return parts, rows


def _columns(  # noqa: PLR0917 - a chart has an axis, a table and a name
    title: str,
    parts: Sequence[Part],
    text_of: Callable[[float], str],
    below: str,
    head: str,
    note: str = "",
    *,
    top: float | None = None,
    line: tuple[float, str] | None = None,
) -> str:
    """A column for each part, and their table; nothing without parts."""
    if not parts:
        return ""
    svg = columns(title, parts, text_of, below=below, top=top, line=line)
    rows = [(part.name, part.text) for part in parts]
    return figure(title, svg, table([below, head], rows), note)


def _repeats(runs: Sequence[RunResult]) -> str:
    measure = measure_named("au")
    values = [(n, value_of(run.summary, measure), run) for n, run in enumerate(runs, 1)]
    known = [(n, value, run) for n, value, run in values if value is not None]
    if len(runs) < 2 or not known:
        return ""
    parts = [Part(str(n), value, f"{value:.2f} %") for n, value, _ in known]
    rows = [(n, f"{value:.2f} %", run.folder) for n, value, run in known]
    svg = columns("AU of each run", parts, _percent, below="run", top=100, line=_target(runs[-1]))
    return figure("AU of each run", svg, table(["run", "AU", "results"], rows))


def _target(run: RunResult) -> tuple[float, str] | None:
    target = run.au_target_percent
    return None if target is None else (target, f"asked for: {number_text(target)} %")


def _parts(values: object, text_of: Callable[[float], str], colour: str = "c1") -> list[Part]:
    """Parts of a list of a run's file, numbered from 1."""
    numbers = [number_of(value) for value in values] if isinstance(values, list) else []
    return [
        Part(str(n), max(0.0, value), text_of(value), colour)
        for n, value in enumerate(numbers, 1)
        if value is not None
    ]


def _epochs(run: RunResult) -> str:
    parts = _parts(run.metric.get("train_au_percentage"), "{:.2f} %".format)
    return _columns("AU of each epoch", parts, _percent, "epoch", "AU", top=100, line=_target(run))


def _throughput(run: RunResult) -> str:
    parts = _parts(run.metric.get("train_throughput_samples_per_second"), number_text)
    title = "Throughput of each epoch, samples/s"
    return _columns(title, parts, axis_text, "epoch", "samples/s")


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
    return _columns(title, parts, _percent, "accelerator", "AU", note, top=100)


def _waits(run: RunResult) -> str:
    waits = run.own.get("wait_s")
    titles = {"p50": "median", "p90": "90 %", "p99": "99 %", "p99.9": "99.9 %", "max": "longest"}
    parts = []
    for key, title in titles.items():
        value = number_of(waits.get(key)) if isinstance(waits, dict) else None
        if value is not None:
            parts.append(Part(title, max(0.0, value), seconds_text(value), "c2"))
    if not parts:
        return ""
    svg = bars("Percentiles of steps' waits for data", parts)
    rows = [(part.name, part.text) for part in parts]
    note = "Of the steps of training that count: the first of an epoch does not, unless the workload says so."
    return figure("How long steps waited", svg, table(["of the steps", "wait"], rows), note)


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
    rows = [
        (
            f"epoch {slow.phase.blocks[0].epoch}, {slow.phase.blocks[0].kind} step {slow.step + 1}",
            slow.rank,
            seconds_text(slow.wait_s),
            seconds_text(slow.compute_s),
        )
        for slow in steps
    ]
    head = ["step", "slowest accelerator", "wait", "compute"]
    return title + table(head, rows)


def _bytes(run: RunResult) -> str:
    device = number_of(run.own.get("device_bytes"))
    cached = number_of(run.own.get("page_cache_bytes"))
    if device is None or cached is None or device + cached <= 0:
        return ""
    parts = [
        Part("from the device", max(0.0, device), bytes_text(device), "c1"),
        Part(
            "not from the device (page cache, memory)", max(0.0, cached), bytes_text(cached), "c3"
        ),
    ]
    svg = stacked("Where the bytes came from", parts)
    rows = [(part.name, part.text) for part in parts]
    return figure("Where the bytes came from", svg, table(["source", "bytes"], rows))


def _checkpoints(run: RunResult, kind: str) -> str:
    own = run.own.get("checkpoint")
    times = own.get(f"{kind}s_s") if isinstance(own, dict) else None
    parts = _parts(times, seconds_text, "c1" if kind == "save" else "c2")
    if kind == "load":
        title, note = "Time to read each back", "Of the slowest accelerator."
    else:
        title = "Time to save each checkpoint"
        note = "Of the slowest accelerator, until its bytes are where the writer promises them."
    return _columns(title, parts, seconds_text, "checkpoint", "time", note)


NOT_MLPERF: Final = "This is not an MLPerf result."

_LISTED_MOST: Final = 12
"""Values of a list that are shown, at most: what has more is a histogram."""


def report_page(runs: Sequence[RunResult], blocks: Sequence[RankBlock]) -> str:
    """The page.

    Args:
        runs: a run, or repeats of one: figures are of all, charts of the last.
        blocks: the last run's steps.
    """
    run = runs[-1]
    model = run.workload.get("model")
    name = str(model.get("name", "")) if isinstance(model, dict) else ""
    title = f"Storage benchmark: {name or run.folder}"
    parts = [
        f"<h1>{safe(title)}</h1>",
        f'<p class="soft">{safe(_subtitle(runs))}</p>',
        f'<p class="not-mlperf">{NOT_MLPERF} {safe(_simulated(run))}</p>',
        _cards(runs),
        _verdict(run),
        *sections_of(runs, blocks),
        "<h2>All figures</h2>",
        _figures(runs),
        *_provenance(run),
    ]
    return document(title, parts)


def _subtitle(runs: Sequence[RunResult]) -> str:
    run = runs[-1]
    summary = run.summary
    accelerators = number_of(summary.get("num_accelerators")) or 0
    hosts = number_of(summary.get("num_hosts")) or 0
    text = (
        f"{_counted(accelerators, 'emulated accelerator')} on {_counted(hosts, 'host')}, "
        f"{_what_ran(run)}; {_times(summary.get('start'), summary.get('end'))}"
    )
    return f"{text}; {len(runs)} runs, charts show the last" if len(runs) > 1 else text


def _what_ran(run: RunResult) -> str:
    engine, checkpoint = run.own.get("engine"), run.own.get("checkpoint")
    if engine is None and isinstance(checkpoint, dict):
        return f"checkpoints by {checkpoint.get('writer')}"
    return f"engine {'of DLIO' if engine is None else engine}"


def _counted(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}" + ("" if count == 1 else "s")


def _times(*times: object) -> str:
    """From and to, without what a second has of parts, and the day once."""
    start, end = (str(time).partition(".")[0].replace("T", " ", 1) for time in times)
    day, _, clock = end.partition(" ")
    return f"{start} to {clock if clock and start.startswith(day) else end}"


def _simulated(run: RunResult) -> str:
    name = run.provenance.get("simulated")
    return f"The storage was simulated ({name}): its delays are not real." if name else ""


def with_confidence(value: Confidence, unit: str, *, brief: bool = False) -> str:
    """A mean, and its interval where there are repeats; `brief`: what interval that is, stands elsewhere."""
    text = measure_text(value.mean, unit)
    if value.half_width is None:
        return text
    text += f" ± {measure_text(value.half_width, unit)}"
    return text if brief else f"{text} (95 %, {value.runs} runs)"


def _cards(runs: Sequence[RunResult]) -> str:
    named = {measure.name: measure for measure in MEASURES}
    cards = []
    for name in (
        "au",
        "throughput",
        "io",
        "wait_share",
        "wait_p99",
        "checkpoint_s",
        "load_s",
        "checkpoint_size",
        "time_to_solution",
    ):
        value = measured(runs, named[name])
        if value is not None:
            cards.append(_card(named[name], value, runs[-1]))
    return f'<ul class="cards">{"".join(cards)}</ul>' if cards else ""


def _card(measure: RunMeasure, value: Confidence, run: RunResult) -> str:
    below = "AU, accelerator utilisation" if measure.name == "au" else measure.title
    if value.half_width is not None:
        below += f", ± {measure_text(value.half_width, measure.unit)} of {value.runs} runs"
    target = run.au_target_percent
    if measure.name == "au" and target is not None:
        met = value.mean >= target
        below += f"; {'✓ meets' if met else '✗ below'} {number_text(target)} %"
    number, _, unit = measure_text(value.mean, measure.unit).partition(" ")
    return f"<li><b>{safe(number)} <small>{safe(unit)}</small></b><span>{safe(below)}</span></li>"


def _verdict(run: RunResult) -> str:
    bound = run.own.get("bound")
    if not bound:
        return ""
    return (
        f"<p><strong>Bound by: {safe(bound)}.</strong> {safe(run.own.get('bound_reason', ''))}</p>"
    )


def _figures(runs: Sequence[RunResult]) -> str:
    rows = [
        (measure.title, with_confidence(value, measure.unit), measure.name)
        for measure in MEASURES
        if (value := measured(runs, measure)) is not None
    ]
    return table(["figure", "value", "its name in conditions"], rows)


def _provenance(run: RunResult) -> Iterator[str]:
    rows = [
        *_rows({k: v for k, v in run.provenance.items() if k != "words"}, ""),
        *_rows(run.own.get("residency_before"), "page cache before: "),
    ]
    rows += [
        row
        for key in ("hostname", "host_processor_name", "host_cpu_count", "host_memory_GB")
        if key in run.summary
        for row in _rows({key: run.summary[key]}, "")
    ]
    rows.append(("results", run.folder))
    yield "<h2>Where and how it ran</h2>"
    yield table(["what", "value"], rows).replace("<table>", '<table class="words">', 1)
    if run.workload:
        yield "<h2>The workload</h2><details><summary>All keys</summary>"
        yield table(["key", "value"], list(_rows(run.workload, ""))).replace(
            "<table>", '<table class="words">', 1
        )
        yield "</details>"
    notes = run.own.get("notes")
    if isinstance(notes, list) and notes:
        yield "<h2>Notes</h2><ul>" + "".join(f"<li>{safe(note)}</li>" for note in notes) + "</ul>"


def _rows(document: Any, prefix: str) -> Iterator[tuple[str, object]]:
    if not isinstance(document, dict):
        return
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(value) > _LISTED_MOST and key != "command":
            yield f"{prefix}{key}", f"{len(value)} values: see summary.json"
        elif isinstance(value, list):
            yield f"{prefix}{key}", " ".join(_plain(each) for each in value)
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    number = number_of(value)
    return f"{number:.6g}" if isinstance(value, float) and number is not None else str(value)
