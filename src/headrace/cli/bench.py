"""`headrace bench`: measures storage the way training uses it, and says what finished runs show."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headrace.base.text import aligned, bytes_of, counted
from headrace.cli import exit_codes
from headrace.cli.options import CommandGroup, FullOutput, JsonOutput, QuietOutput
from headrace.cli.printing import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.bench.compare import Condition, ConditionResult
    from headrace.bench.run import SessionOptions
    from headrace.bench.session import Probe, SessionReport, Sweep

_Folder = Annotated[
    str, typer.Argument(help="A run's folder, or one with repeats of a run in it.", metavar="DIR")
]

_SIMULATED = "Simulate a slow storage: lustre, nfs, ..."
_Simulate = Annotated[str | None, Option("--simulate", metavar="NAME", help=_SIMULATED)]
_Words = Annotated[list[str] | None, Argument(help="workload=NAME and overrides.", metavar="WORDS")]


def report(
    folder: _Folder,
    *,
    html: str | None = Option(
        None, "--html", metavar="FILE", help="Write one HTML file that works offline."
    ),
    output: QuietOutput,
) -> int:
    """Show a run: as a page that works offline (--html), as text, or as JSON."""
    from headrace.bench.compare import MEASURES, measured
    from headrace.bench.metrics import bounds_of
    from headrace.bench.report import report_page, with_confidence
    from headrace.bench.results import load_runs, rank_blocks
    from headrace.bench.summary import NOT_MLPERF

    runs = load_runs(folder)
    measures = {m: value for m in MEASURES if (value := measured(runs, m)) is not None}
    output.write(html, lambda: report_page(runs, rank_blocks(runs[-1])))
    bounds = bounds_of([run.own for run in runs])
    lines = [f"{m.title:<34} {with_confidence(v, m.unit)}" for m, v in measures.items()]
    lines += [bound.line for bound in bounds]
    output.result({
        "folder": folder, "runs": [run.folder for run in runs], "html": html,
        "measures": {m.name: {**value.document(), "unit": m.unit} for m, value in measures.items()},
        "bounds": [bound._asdict() for bound in bounds], "not_mlperf": NOT_MLPERF,
    }, *([] if html else [*lines, NOT_MLPERF]))  # fmt: skip
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
    from headrace.bench.results import load_run, rank_blocks
    from headrace.bench.timeline import trace_events, trace_text
    from headrace.errors import BenchError

    events = trace_events(rank_blocks(load_run(folder)), steps)
    if not events:
        raise BenchError(
            f"{folder} has no steps: its files {{rank}}_output.json are missing or empty.",
            path=folder,
        )
    output.write(out, lambda: trace_text(events, lines=out.endswith(".pfw")))
    output.result({"out": out, "events": len(events)})
    return exit_codes.OK


def compare(
    a: str = Argument(
        ..., help="The folder of a run, or of repeats; or a recorded job.", metavar="A"
    ),
    b: str = Argument(..., help="The other one's; or the job's emulation, recorded.", metavar="B"),
    *,
    fail_if: list[str] | None = Option(
        None,
        metavar="CONDITION",
        help="Exit with 1 if it holds: 'au < -2%' of the change, 'au < 90' of B.",
    ),
    html: str | None = Option(None, metavar="FILE", help="A page: both side by side."),
    svg: str | None = Option(None, metavar="FILE", help="Of recorded jobs: a picture."),
    output: QuietOutput,
) -> int:
    """Compare two results: each figure's change, with its confidence where there are repeats.

    Of a recorded job and its emulation (two files that `headrace record` wrote): how far they are alike.
    """
    from headrace.bench.compare import compare as compare_runs
    from headrace.bench.compare import condition_of
    from headrace.bench.report import comparison_lines, comparison_page
    from headrace.bench.results import load_runs
    from headrace.bench.summary import NOT_MLPERF

    recorded = [name.endswith((".yaml", ".yml")) for name in (a, b)]
    if all(recorded):
        return _compare_recorded(output, (a, b), fail_if or [], html, svg)
    if any(recorded) or svg is not None:
        raise typer.BadParameter(
            "give two recorded jobs (job.yaml emulated.yaml), or two folders without --svg"
        )
    conditions = [condition_of(text, changes=True) for text in fail_if or []]
    runs = load_runs(a), load_runs(b)
    comparison = compare_runs(*runs)
    verdicts = comparison.judge(conditions)
    failed = any(verdict.holds for verdict in verdicts)
    for what, left, right in () if output.as_json else comparison.differences:
        output.remark(f"note: {what} differs: {left}, {right}")
    names = [
        f"{name}: {folder}" + (f", {repeats} runs" if repeats > 1 else "")
        for name, folder, repeats in zip("AB", (a, b), map(len, runs), strict=True)
    ]
    output.write(html, lambda: comparison_page(comparison, names))
    output.result({
        "a": a, "b": b, "rows": [row.document() for row in comparison.rows],
        "differences": [
            {"what": what, "a": left, "b": right} for what, left, right in comparison.differences
        ],
        "bounds": {
            name: [bound._asdict() for bound in bounds]
            for name, bounds in zip("ab", comparison.bounds, strict=True)
        },
        "conditions": [v.document() for v in verdicts],
        "failed": failed, "not_mlperf": NOT_MLPERF,
    }, *names, *comparison_lines(comparison), *_verdict_lines(verdicts), NOT_MLPERF)  # fmt: skip
    return exit_codes.FINDING if failed else exit_codes.OK


def _compare_recorded(
    output: Output,
    names: tuple[str, str],
    fail_if: Sequence[str],
    html: str | None,
    svg: str | None,
) -> int:
    from headrace.bench.compare import RunMeasure, condition_of, judge
    from headrace.bench.config import load_workload, parse_command_line
    from headrace.insight.record import similarity as like
    from headrace.trace.recorded import read_recorded

    figures = [RunMeasure(n, title, "", "more", "") for n, title in like.FIGURES.items()]
    figures.append(RunMeasure("similarity", "all of them", "", "more", ""))
    conditions = [condition_of(text, changes=False, of=figures) for text in fail_if]
    sides = []
    for name in names:
        requests = load_workload(parse_command_line([f"workload={name}"])).workload.dataset.requests
        if requests is None:
            raise typer.BadParameter(f"{name} is no recorded job: it has no dataset.requests")
        sides.append(like.behaviour_of(read_recorded(Path(requests))))
    similarity = like.similarity_of(sides[0], sides[1])
    output.write(html, lambda: like.similarity_page(similarity, names))
    output.write(svg, lambda: like.similarity_image(similarity, Path(names[0]).stem))
    verdicts = judge({name: (value, None) for name, value in similarity.values.items()}, conditions)
    failed = any(verdict.holds for verdict in verdicts)
    output.result({
        "a": names[0], "b": names[1], **similarity.document(),
        "conditions": [v.document() for v in verdicts], "failed": failed,
    }, *like.lines_of(similarity), *_verdict_lines(verdicts))  # fmt: skip
    return exit_codes.FINDING if failed else exit_codes.OK


def _verdict_lines(verdicts: Sequence[ConditionResult]) -> Iterator[str]:
    for verdict in verdicts:
        held = "holds" if verdict.holds else "does not hold"
        condition, unit = verdict.condition, verdict.condition.measure.unit
        value = (
            f"{verdict.value:+z.2%}" if condition.change else f"{verdict.value:g} {unit}".rstrip()
        )
        but = f"; {verdict.doubt}" if verdict.doubt else ""
        yield f"{condition.written}{condition.reading}: {held} ({condition.measure.name} {value}){but}"


def storage(
    path: str = Argument(..., help="A folder of the mount.", metavar="PATH"),
    *,
    size: str = Option(
        "256M", metavar="SIZE", help="Of the large file; twice as much must be free."
    ),
    seconds: float = Option(
        0.3, min=0.001, help="Of each measurement of reading, at most about.", metavar="SECONDS"
    ),
    files: int = Option(500, min=1, help="Small files to make and read."),
    output: QuietOutput,
) -> int:
    """Measure a mount in seconds: bandwidth, metadata, small samples, latency; with advice.

    Everything is written into a folder of its own in PATH, which is removed at the end.
    """
    from headrace.bench.storage import StorageOptions, characterise, storage_lines

    options = StorageOptions(size_bytes=bytes_of(size), seconds=seconds, files=files)
    document = characterise(path, options)
    output.result(document, *storage_lines(document))
    for note in () if output.as_json else document["notes"]:
        output.remark(f"note: {note}")
    return 0


def sweep(
    context: typer.Context,
    workload: str = Argument(..., help="Its name, as in workload=NAME."),
    words: list[str] | None = Argument(None, help="Overrides, as of `run`.", metavar="WORDS"),
    *,
    accelerators: str = Option("1..64", metavar="LEAST..MOST", help="Emulated in this process."),
    until: str = Option("au<0.9", metavar="CONDITION", help="What holds when they are too many."),
    engine: str | None = Option(None, help="What reads, as of `run`.", metavar="NAME"),
    cold: bool = Option(
        False, "--cold", help="Put the data out of the page cache before each run's first epoch."
    ),
    ceiling: bool = Option(True, help="Run without storage, too, to tell storage from harness."),
    repeats: int = Option(1, min=1, help="Of each run."),
    simulate: _Simulate = None,
    output: QuietOutput,
) -> int:
    """Find how many accelerators the storage feeds: double their number, then bisect."""
    from headrace.bench.compare import condition_of
    from headrace.bench.run import SessionOptions
    from headrace.bench.session import sweep as sweep_runs
    from headrace.pages.html import measure_text

    numbers, condition = _numbers(accelerators), condition_of(until, changes=False)
    name = workload if "=" in workload else f"workload={workload}"
    given = [name, *(words or []), *context.args, *_overrides({"reader.engine": engine})]
    options = SessionOptions(simulate=simulate, cold=cold, ceiling=ceiling, repeats=repeats)

    def report_probe(probe: Probe) -> None:
        value = measure_text(probe.value, condition.measure.unit)
        fed = "not fed" if probe.over else "fed"
        number = counted(probe.accelerators, "accelerator")
        output.remark(f"{number}: {condition.measure.name} {value}: {fed}")

    before = last = 0

    with _progress(output, running="sweeping") as tell:

        def report_step(phase: str, done: int, total: int | None) -> None:
            """Steps of one run after the other as one work: each run counts from 0."""
            nonlocal before, last
            if phase == "running":
                before, last = before + (last if done < last else 0), done
            tell(phase, before + done, None if total is None else before + total)

        options = replace(options, progress=report_step)
        result = sweep_runs(given, numbers, condition, options, report_probe)
    _print_sweep(output, result, condition, options)
    return exit_codes.FINDING if result.most is None else exit_codes.OK


def _numbers(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.|-)\s*(\d+)\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"--accelerators is {text!r}, expected LEAST..MOST, as 1..64")
    return int(match[1]), int(match[2])


_WARM_LEAST = 0.1
"""Of what a run after `--cold` reads: with more from the page cache it is told."""
_WARM_LATER = (
    "--cold empties it before the first epoch only, later ones find what that left: "
    "++workload.train.epochs=1 measures the storage alone"
)


def _print_sweep(
    output: Output, result: Sweep, condition: Condition, options: SessionOptions
) -> None:
    from headrace.bench.summary import NOT_MLPERF
    from headrace.pages.html import measure_text

    cells: list[tuple[str, ...]] = [
        ("accelerators", "AU", "samples/s", "MB/s", "page cache", "bound by", "fed")
    ]
    for probe in result.probes:
        values = [
            measure_text(probe.measures[name], unit) if name in probe.measures else "-"
            for name, unit in (("au", "%"), ("throughput", ""), ("io", ""))
        ]
        share = probe.page_cache_share
        cells.append((
            str(probe.accelerators), *values, "-" if share is None else f"{share:.0%}", probe.bound,
            "no" if probe.over else "yes",
        ))  # fmt: skip
    lines = aligned(cells)
    late = any(probe.bound == "harness" for probe in result.probes)
    lines.append(
        f"fed: no where {condition.written} holds; bound by: what took the rest of the time"
        f"{' (harness: this host was late with emulating them)' * late}"
    )
    if (over := result.first_over) is not None:
        lines.append(f"with {over.accelerators}: {over.bound_reason}")
    if options.cold and any(
        (probe.page_cache_share or 0) >= _WARM_LEAST for probe in result.probes
    ):
        lines.append(f"page cache: the share of what was read that came from there; {_WARM_LATER}")
    if options.simulate is not None:
        lines.append(f"simulated {options.simulate}: the delays are not real")
    lines += [f"until {condition.written}: {result.answer}", NOT_MLPERF]
    output.result({
        "answer": result.answer, "most": result.most, "limit": result.limit,
        "until": condition.written, "least_asked": result.range[0],
        "greatest_asked": result.range[1], "simulated": options.simulate,
        "probes": list(result.probes), "not_mlperf": NOT_MLPERF,
    }, *lines)  # fmt: skip


bench_app = CommandGroup("Measure storage the way training uses it: DLIO's workloads, unchanged.")

bench_app.command()(storage)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

bench_app.command()(report)
bench_app.command()(compare)
bench_app.command()(trace)
bench_app.command(context_settings=_PASS_ON)(sweep)

_RUN_HELP = """Run a DLIO workload: generate its data if it says so, train, evaluate, and report.

WORDS are DLIO's (hydra's): workload=unet3d_h100 ++workload.reader.batch_size=8 ++hydra.run.dir=DIR
--config-dir=DIR. The results are not MLPerf results.
"""


@bench_app.command("run", context_settings=_PASS_ON, help=_RUN_HELP)
def run(
    context: typer.Context,
    words: _Words = None,
    *,
    workload: str | None = Option(
        None,
        metavar="NAME|FILE.yaml",
        help="The same as workload=...; a file as `headrace record` writes it.",
    ),
    data_folder: str | None = Option(
        None, "--data-folder", metavar="DIR", help="Where the data lies."
    ),
    generate_first: bool = Option(
        False, "--generate", help="Generate the data before, where it is not there."
    ),
    accelerators: int = Option(1, "--accelerators", "-n", min=1, help="Emulated in this process."),
    engine: str | None = Option(
        None,
        help="What reads: headrace, torch, tensorflow, null or custom:MODULE:CLASS.",
        metavar="NAME",
    ),
    writer: str | None = Option(
        None,
        "--checkpoint-writer",
        help="plain, fsync (as checkpoint.fsync), direct or headrace.",
        metavar="NAME",
    ),
    cold: bool = Option(
        False,
        "--cold",
        help="Put the data out of the page cache before the first epoch; verified.",
    ),
    ceiling: bool = Option(
        False, "--ceiling", help="Run the steps without storage, too, and compare."
    ),
    repeats: int = Option(1, min=1, help="Repeat the run, for a confidence interval."),
    stage: str | None = Option(
        None, metavar="DIR", help="Copy the data to DIR, read them there, remove them at the end."
    ),
    formula: str = Option(
        "mlcommons",
        help="Throughput in summary.json: mlcommons, or upstream's (steps - 2).",
        metavar="NAME",
    ),
    simulate: _Simulate = None,
    output: FullOutput,
) -> int:
    """Runs a workload."""
    given = [*(words or []), *context.args]
    if workload is not None:
        given.insert(0, f"workload={workload}")
    given += _overrides({
        # Quoted: a path need not be what YAML takes for text.
        "dataset.data_folder": None if data_folder is None else json.dumps(data_folder),
        "workflow.generate_data": "True" if generate_first else None,
        "reader.engine": engine,
        "checkpoint.writer": writer,
    })  # fmt: skip
    options: dict[str, Any] = {
        "accelerators": accelerators, "simulate": simulate, "cold": cold, "ceiling": ceiling,
        "repeats": repeats, "stage": stage, "formula": formula,
    }  # fmt: skip
    _print(output, _session(output, given, **options), simulate)
    return 0


def _overrides(values: dict[str, str | None]) -> list[str]:
    return [f"++workload.{key}={value}" for key, value in values.items() if value is not None]


_COUNTED = {"generating": "samples", "running": "steps", "checkpointing": "checkpoints"}
"""What each phase of a run counts."""


@contextmanager
def _progress(output: Output, **verbs: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show each phase of a run by itself, by its name or that in `verbs`: they count different things."""
    from headrace.cli.progress import progress

    shown, tell, lock = "", None, Lock()
    with ExitStack() as stack:

        def report(phase: str, done: int, total: int | None) -> None:
            nonlocal shown, tell
            with lock:  # generating is many threads'
                if phase != shown:
                    stack.close()
                    verb, shown = verbs.get(phase, phase), phase
                    tell = stack.enter_context(progress(output, verb, _COUNTED[phase]))
            if tell is not None:
                tell(done, total, 0, None)

        yield report


def _session(output: Output, words: list[str], **options: Any) -> SessionReport:
    from headrace.bench.run import SessionOptions
    from headrace.bench.session import run_session

    with _progress(output) as report_step:
        return run_session(words, SessionOptions(**options, progress=report_step))


def _print(output: Output, report: SessionReport, simulate: str | None) -> None:
    if report.rank and not output.as_json:
        return  # all of them would say the same
    for note in report.notes:
        output.remark(f"note: {note}")
    lines = [*report.lines, *(_explained(report.summary) if report.summary is not None else ())]
    if simulate is not None:
        lines.append(f"simulated {simulate}: the delays are not real")
    output.result({
        "folder": report.folder, "rank": report.rank, "simulated": simulate,
        "generated_bytes": report.generated_bytes, "summary": report.summary,
    }, *lines)  # fmt: skip
    if not output.as_json:
        output.remark(f"results in {report.folder}")


def _page_cache_lines(own: dict[str, Any]) -> Iterator[str]:
    before, cached = own["residency_before"], own["page_cache_share"] or 0
    if (share := before.get("share")) is not None:
        yield f"in the page cache before the run: {share:.0%} of the data"
    if before.get("cold") and cached >= _WARM_LEAST:
        yield f"from the page cache: {cached:.0%} of what was read; {_WARM_LATER}"


def _reading_lines(summary: dict[str, Any]) -> Iterator[str]:
    from headrace.bench.compare import measure_named, value_of

    own = summary["headrace"]
    if (ceiling := value_of(summary, measure_named("ceiling_au"))) is not None:
        yield f"AU without storage: {ceiling:.2f} % (--ceiling: the same steps, nothing read)"
    if (rate := value_of(summary, measure_named("io"))) is not None:
        yield f"throughput: {rate:.1f} MB/s of the steps that count, each sample at its nominal size"
    if own["bytes"]:
        yield (
            f"read by all steps: {own['bytes'] / 1e9:.3f} GB, {own['device_bytes'] / 1e9:.3f} GB of it "
            f"from the device, at {own['cpu_s_per_gb']:.2f} CPU s/GB (MB: 10^6 bytes, GB: 10^9; in "
            "[METRIC], as in DLIO, 2^20 and 2^30)"
        )


def _explained(summary: dict[str, Any]) -> Iterator[str]:
    """Our own figures, for people."""
    own = summary["headrace"]
    if (repeats := own.get("repeats", 1)) > 1:
        yield f"each figure below is the mean of {repeats} runs, as in bench report and bench compare"
    saved = own.get("checkpoint")
    if saved and saved["save_s"]:
        yield (
            f"checkpoints by {saved['writer']}: {saved['save_s']['mean']:.3f} s each, training stood "
            f"still for {saved['blocking_s']['mean']:.3f} s"
        )
    if saved and (share := saved["page_cache_share_before_loads"]) is not None:
        yield f"in the page cache before checkpoints were read: {share:.0%} of their bytes"
    if "time" not in own:  # checkpoints alone
        yield own["not_mlperf"]
        return
    time, total = own["time"], own["time"]["total_s"]
    if total:
        parts = ("compute", "wait", "barrier", "harness")
        yield "time: " + ", ".join(f"{name} {time[f'{name}_s'] / total:.1%}" for name in parts)
    if split := own["time_to_solution"]:
        spent = [
            f"{name.removesuffix('_s')} {seconds:.2f} s"
            for name, seconds in split.items()
            if name != "total_s" and seconds > 0
        ]
        yield f"time to solution: {split['total_s']:.2f} s: {', '.join(spent)}"
    yield from _reading_lines(summary)
    yield from _page_cache_lines(own)
    if own["au_percent"].get("confidence_95") is not None:
        au = own["au_percent"]
        yield f"AU of {au['runs']} runs: {au['mean']:.2f} +- {au['confidence_95']:.2f} % (95 %)"
    yield own["not_mlperf"]


@bench_app.command("generate", context_settings=_PASS_ON)
def generate(
    context: typer.Context,
    words: _Words = None,
    *,
    threads: int | None = Option(
        None, min=1, help="That write; else two a processor and two more."
    ),
    overwrite: bool = Option(
        False, "--overwrite", help="Remove another data set of ours that is there."
    ),
    output: QuietOutput,
) -> int:
    """Generate a DLIO workload's data set, and do nothing else. Goes on where it was interrupted."""
    only = ("generate_data=True", "train=False", "evaluation=False", "checkpoint=False")
    given = [*(words or []), *context.args, *(f"++workload.workflow.{key}" for key in only)]
    if threads is not None:
        given += _overrides({"reader.write_threads": str(threads)})
    try:
        report = _session(output, given, overwrite=overwrite)
    except KeyboardInterrupt as e:
        e.add_note("files that are whole are kept; the same command goes on from there")
        raise
    _print(output, report, None)
    return 0


@bench_app.command("workloads")
def workloads(*, output: JsonOutput) -> int:
    """List the workloads that come with headrace."""
    from headrace.bench.config import load_workload, parse_command_line, shipped_workloads

    rows, lines = [], []
    for name in shipped_workloads():
        workload = load_workload(parse_command_line([f"workload={name}"])).workload
        data = workload.dataset
        rows.append({
            "name": name, "framework": workload.framework, "format": data.format,
            "files": data.num_files_train, "samples_per_file": data.num_samples_per_file,
            "sample_bytes": data.nominal_bytes, "batch_size": workload.reader.batch_size,
            "step_s": workload.train.computation_time.mean_s, "epochs": workload.train.epochs,
            "train": workload.workflow.train, "au": workload.metric.au,
        })  # fmt: skip
        summary = "generates data" if "datagen" in name else "checkpoints"
        if workload.workflow.train:
            summary = (
                f"{data.format}, {data.num_files_train:,} x {data.num_samples_per_file:,} samples of "
                f"{data.nominal_bytes:,.0f} bytes, batch {workload.reader.batch_size}, computing "
                f"{workload.train.computation_time.mean_s} s a step"
            )
        lines.append(f"{name:<24} {summary}")
    output.result({"workloads": rows}, *lines)
    return 0
