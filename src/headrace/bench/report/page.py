"""Page: a run as one HTML file. No script, no address: it works offline, prints, and nothing in it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace.base.text import number_text
from headrace.bench.report.measures import MEASURES, measured
from headrace.bench.report.result import number_of
from headrace.bench.report.sections import sections_of
from headrace.pages.charts import table
from headrace.pages.document import document
from headrace.pages.text import measure_text, safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.metrics.own import Confidence
    from headrace.bench.report.measures import Measure
    from headrace.bench.report.result import RankBlock, RunResult

__all__ = ["NOT_MLPERF", "report_page", "with_confidence"]

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
    told = (
        f"{_counted(accelerators, 'emulated accelerator')} on {_counted(hosts, 'host')}, "
        f"{_what_ran(run)}; {_times(summary.get('start'), summary.get('end'))}"
    )
    return f"{told}; {len(runs)} runs, charts show the last" if len(runs) > 1 else told


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
    told = measure_text(value.mean, unit)
    if value.half_width is None:
        return told
    told += f" ± {measure_text(value.half_width, unit)}"
    return told if brief else f"{told} (95 %, {value.runs} runs)"


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


def _card(measure: Measure, value: Confidence, run: RunResult) -> str:
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
