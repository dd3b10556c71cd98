"""`headrace bench report`, `trace` and `compare`: what finished runs say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from headrace.base.files import replace_file
from headrace.base.text import aligned
from headrace.cli import exit_codes
from headrace.cli.options import QuietOutput
from headrace.cli.printing import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.compare import ConditionResult, RunComparison

_Folder = Annotated[
    str, typer.Argument(help="A run's folder, or one with repeats of a run in it.", metavar="DIR")
]


def report(
    folder: _Folder,
    *,
    html: bool = Option(False, "--html", help="One HTML file; without it, the figures as text."),
    out: str | None = Option(None, "-o", "--out", metavar="FILE", help="Else DIR/report.html."),
    output: QuietOutput,
) -> int:
    """Show a run: as a page that works offline (--html), as text, or as JSON."""
    from headrace.bench.compare import MEASURES, measured
    from headrace.bench.report import report_page, with_confidence
    from headrace.bench.results import load_runs, rank_blocks
    from headrace.bench.summary import NOT_MLPERF

    if not html and out is not None:
        raise typer.BadParameter("-o names the page: give --html, too")
    runs = load_runs(folder)
    measures = {m: value for m in MEASURES if (value := measured(runs, m)) is not None}
    path = None
    if html:
        path = out or str(Path(folder, "report.html"))
        _write(path, report_page(runs, rank_blocks(runs[-1])))
        output.remark(f"wrote {path}")
    if output.as_json:
        output.document({
            "folder": folder, "runs": [run.folder for run in runs], "html": path,
            "measures": {m.name: {**value.document(), "unit": m.unit} for m, value in measures.items()},
            "not_mlperf": NOT_MLPERF,
        })  # fmt: skip
    elif not html:
        for measure, value in measures.items():
            output.line(f"{measure.title:<34} {with_confidence(value, measure.unit)}")
        output.line(NOT_MLPERF)
    return exit_codes.OK


def trace(
    folder: _Folder,
    *,
    out: str = Option(
        ..., "-o", "--out", metavar="FILE", help="*.pfw: a line an event, as DFTracer."
    ),
    steps: int = Option(20, min=1, help="How many of the slowest steps."),
    output: QuietOutput,
) -> int:
    """Write the slowest steps for trace viewers (Perfetto, chrome://tracing)."""
    from headrace.bench.report import trace_events, trace_text
    from headrace.bench.results import load_run, rank_blocks
    from headrace.errors import BenchError

    result = load_run(folder)
    events = trace_events(result, rank_blocks(result), steps)
    if not events:
        raise BenchError(
            f"{folder} has no steps: its files {{rank}}_output.json are missing or empty.",
            path=folder,
        )
    _write(out, trace_text(events, lines=out.endswith(".pfw")))
    if output.as_json:
        output.document({"out": out, "events": len(events)})
    else:
        output.remark(f"wrote {len(events)} events to {out}")
    return exit_codes.OK


def compare(
    a: str = Argument(..., help="The folder of a run, or of repeats.", metavar="A"),
    b: str = Argument(..., help="The other one's.", metavar="B"),
    *,
    fail_if: list[str] | None = Option(
        None,
        metavar="CONDITION",
        help="Exit with 1 if it holds: 'au < -2%' of the change, 'au < 90' of B; repeat.",
    ),
    output: QuietOutput,
) -> int:
    """Compare two results: each figure's change, with its confidence where there are repeats."""
    from headrace.bench.compare import compare as compare_runs
    from headrace.bench.compare import condition_of, judge
    from headrace.bench.results import load_runs
    from headrace.bench.summary import NOT_MLPERF

    conditions = [condition_of(text, changes=True) for text in fail_if or []]
    runs = load_runs(a), load_runs(b)
    comparison = compare_runs(*runs)
    verdicts = judge(comparison, conditions)
    failed = any(verdict.holds for verdict in verdicts)
    if output.as_json:
        output.document({
            "a": a, "b": b, "rows": [row.document() for row in comparison.rows],
            "differences": [
                {"what": what, "a": left, "b": right} for what, left, right in comparison.differences
            ],
            "conditions": [
                {"condition": v.condition.written, "found": v.value, "holds": v.holds}
                for v in verdicts
            ],
            "failed": failed, "not_mlperf": NOT_MLPERF,
        })  # fmt: skip
    else:
        for name, folder, repeats in zip("AB", (a, b), map(len, runs), strict=True):
            output.line(f"{name}: {folder}" + (f", {repeats} runs" if repeats > 1 else ""))
        _print_comparison(output, comparison, verdicts)
        output.line(NOT_MLPERF)
    return exit_codes.FINDING if failed else exit_codes.OK


def _print_comparison(
    output: Output, comparison: RunComparison, verdicts: Sequence[ConditionResult]
) -> None:
    from headrace.bench.report import with_confidence

    cells = [("", "A", "B", "change", "")]
    for row in comparison.rows:
        unit, width = row.measure.unit, row.change_half_width
        change = "from 0" if row.change is None else f"{row.change:+.2%}"
        if row.change is not None and width is not None:
            change += f" ± {width:.2%}"
        judgement = {None: "", True: "worse", False: "better"}[row.worse]
        if row.worse is not None and row.clear is False:
            judgement = "within the noise"
        cells.append((
            row.measure.title, with_confidence(row.a, unit, brief=True),
            with_confidence(row.b, unit, brief=True), change, judgement,
        ))  # fmt: skip
    for line in aligned(cells, "<>>><"):
        output.line(line)
    if any(row.a.half_width is not None or row.b.half_width is not None for row in comparison.rows):
        output.line("± is the 95 % confidence interval over the repeats.")
    if any(row.worse is not None and row.clear is None for row in comparison.rows):
        output.line(
            "Figures without ± on both sides were measured once: their changes may be noise."
        )
    for what, left, right in comparison.differences:
        output.remark(f"note: {what} differs: {left}, {right}")
    for verdict in verdicts:
        held = "holds" if verdict.holds else "does not hold"
        value = f"{verdict.value:+.2%}" if verdict.condition.change else f"{verdict.value:g}"
        output.line(
            f"{verdict.condition.written}: {held} ({verdict.condition.measure.name} {value})"
        )


def _write(path: str, text: str) -> None:
    """Writes a whole file or none."""
    try:
        replace_file(path, text.encode(), sync=False)
    except OSError as e:
        raise OSError(e.errno, e.strerror, path) from e
