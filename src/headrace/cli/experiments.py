"""`headrace doctor`, `ab`, `whatif`: what holds a training back, and whether headrace makes it faster."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from typer import Argument, Option

from headrace.base.text import aligned, bytes_text, duration_text, printable, seconds_text
from headrace.cli import exit_codes
from headrace.cli.options import QuietOutput, StorageOptions, endings_of
from headrace.cli.printing import Output
from headrace.cli.simulate import SimulateOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.config import LoadedWorkload
    from headrace.insight.ab.running import AbOptions, MeasuredRun
    from headrace.insight.whatif import Check, JobFigures, Loader, Prediction, Storage
    from headrace.trace.recorded import Recorded

_STYLES = {"head": "bold", "verdict": "bold yellow", "do": "bold green", "command": "cyan"}


def doctor(
    data: str = Argument(
        ".", metavar="DATA", help="A folder, a file, a pattern, a store, or a URL."
    ),
    *,
    batch: int = Option(256, "--batch", "-b", min=1, help="Samples of a training step."),
    step_ms: float | None = Option(
        None, min=0.001, help="What a training step takes, if there are always data.", metavar="MS"
    ),
    workers: int | None = Option(
        None, min=0, max=1024, help="num_workers.", show_default="as many as CPUs, up to 8"
    ),
    seconds: float = Option(
        15.0, min=0.2, max=3600, help="About how long it may take.", metavar="SECONDS"
    ),
    ext: str | None = Option(
        None, help="Folders: only files that end so, as 'jpg,png'.", metavar="ENDINGS"
    ),
    html: str | None = Option(
        None, "--html", metavar="FILE", help="Write one HTML file that works offline."
    ),
    simulate: SimulateOption = None,
    storage: StorageOptions,
    output: QuietOutput,
) -> int:
    """Say how fast your data can be loaded here, what holds it back, and what to do first.

    Reads some of the data and writes nothing there. Ctrl-C ends it with what is known by then.
    """
    from headrace.insight.doctor import ExamineOptions, diagnose, doctor_page, examine, lines_of
    from headrace.insight.doctor.examine import THREAD

    if html is not None and not Path(html).parent.is_dir():  # known before it takes 15 seconds
        raise typer.BadParameter(f"--html {html}: there is no folder {Path(html).parent}")
    options = ExamineOptions(
        seconds=seconds, simulate=simulate, storage_options=storage,
        extensions=endings_of(ext) if ext else (),
    )  # fmt: skip
    with _examining(output) as tell:
        examination = examine(data, options, tell)
    diagnosis = diagnose(
        examination, batch=batch, step_s=None if step_ms is None else step_ms / 1e3, workers=workers,
        target=data,
    )  # fmt: skip
    output.write(html, lambda: doctor_page(diagnosis))
    if output.as_json:
        output.document(dataclasses.asdict(diagnosis))
    elif html is None:
        from rich.text import Text

        console = output.console()
        for kind, line in lines_of(diagnosis):
            console.print(Text(printable(line), style=_STYLES.get(kind, "")), soft_wrap=True)
    code = exit_codes.INTERRUPTED if examination.interrupted else exit_codes.OK
    if any(thread.name == THREAD for thread in threading.enumerate()):
        # A read that the storage never answers must not hold up the end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _examining(output: Output) -> Iterator[Callable[[str, float], None] | None]:
    """A line that changes on a terminal; elsewhere a plain one for each part. On stderr."""
    if output.quiet or output.as_json:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        bar = Progress(
            TextColumn("{task.description:<32}"), BarColumn(bar_width=30),
            console=Console(stderr=True, highlight=False), transient=True,
        )  # fmt: skip
        with bar:
            task = bar.add_task("headrace doctor", total=1.0)
            yield lambda what, share: bar.update(task, description=what, completed=share)
    else:
        yield lambda what, _share: output.remark(f"{what} ...")


def ab(
    command: list[str] = Argument(..., metavar="COMMAND [ARGUMENT]...", help="What to run."),
    *,
    repeat: int | None = Option(
        None, "--repeat", "-n", metavar="N", help="Pairs of runs.", show_default="6"
    ),
    seconds: float | None = Option(
        None, metavar="SECONDS", help="As many pairs as fit into so long."
    ),
    cold: bool = Option(
        True, "--cold/--warm", help="What it reads is out of memory before each run, or in it."
    ),
    until_confident: bool = Option(
        False, "--until-confident", help="Stop when the interval is narrow enough."
    ),
    width: float = Option(5.0, metavar="PERCENT", help="What is narrow: so much to either side."),
    drop_in: bool = Option(
        False, "--drop-in", help="Exchange torch's DataLoader for headrace's, instead of `run`."
    ),
    with_order: bool = Option(
        False, "--with-order", help="Tell headrace the order that the first run had."
    ),
    root: list[str] | None = Option(
        None, metavar="DIR", help="Folder whose files are served.", show_default="found"
    ),
    compare: str | None = Option(
        None, metavar="REGEX", help="Lines of its output that must be the same."
    ),
    compare_file: list[str] | None = Option(
        None, metavar="FILE", help="A file that it writes, which must be the same."
    ),
    limit: float = Option(3600.0, metavar="SECONDS", help="A run that takes longer is ended."),
    stdin: str | None = Option(
        None, metavar="FILE", help="Its standard input.", show_default="empty"
    ),
    simulate: SimulateOption = None,
    seed: int = Option(0, help="Of the order in which the sides take turns.", metavar="SEED"),
    output: QuietOutput,
) -> int:
    """Run a command with and without headrace in turn; say how much faster it is, and how sure that is."""
    from headrace.errors import ProgramError
    from headrace.insight.ab.comparison import Comparison, EndReason, report
    from headrace.insight.ab.experiment import compare as run_both
    from headrace.insight.ab.running import AbOptions

    if compare is not None:
        try:
            re.compile(compare)
        except re.error as e:
            raise typer.BadParameter(f"--compare {compare!r} is no regular expression: {e}") from e
    if stdin is not None and not Path(stdin).is_file():
        raise typer.BadParameter(f"--stdin {stdin}: no such file")
    try:
        options = AbOptions(
            pairs=repeat, seconds=seconds, cold=cold, until_confident=until_confident,
            width=width / 100, drop_in=drop_in, with_order=with_order, roots=tuple(root or ()),
            limit_s=limit, compare=compare, compare_files=tuple(compare_file or ()),
            simulate=simulate, stdin=stdin, seed=seed,
        )  # fmt: skip
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    # Whoever ends us wants what we started ended, as with Ctrl-C.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        comparison = run_both(command, options, lambda run: _tell_run(output, run, options))
    except ProgramError as e:
        known = getattr(e, "comparison", None)
        if isinstance(known, Comparison) and known.pairs and not output.as_json:
            output.line(report(known))
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
    output.result(comparison.document(), *report(comparison).splitlines())
    if comparison.ended is EndReason.INTERRUPTED:
        return exit_codes.INTERRUPTED
    return exit_codes.OK if comparison.same_work else exit_codes.FINDING


def _tell_run(output: Output, run: MeasuredRun, options: AbOptions) -> None:
    """A line about a run, on stderr."""
    if run.number == 0:
        files = len(run.reading.files)
        output.remark(f"first run, to learn what it reads: {run.ran.wall_s:.2f} s, {files:,} files")
        if options.seconds is None and not options.until_confident:
            runs = 2 * options.pairs_most
            more = f"{runs} more follow, about {duration_text(runs * run.ran.wall_s)}"
            output.remark(f"{more}; Ctrl-C reports the pairs that have ended")
        return
    most = options.pairs_most
    of = f" of {most}" if options.pairs is not None or not options.seconds else ""
    took, opens = seconds_text(run.ran.wall_s), len(run.reading.opens)
    output.remark(f"pair {run.number}{of}, {run.side.value}: {took}, {opens:,} files opened")
    sys.stderr.flush()


_AS_RECORDED = "recorded"

_BOUNDS = {
    "compute": "data is there in time; only faster computing helps",
    "link": "the network or disk link is full: fewer bytes, or a faster one",
    "servers": "the storage serves no more requests at a time: fewer, larger ones",
    "processors": "decoding needs more processors, or less work",
    "workers": "decoding keeps the workers busy: more of them, if there are processors, or less work",
    "latency": "too few reads in flight: more workers, or --loader headrace",
}
"""What a row's last word means, and what would help."""


def whatif(
    job: str = Argument(
        ...,
        metavar="JOB",
        help="A workload's YAML, a shipped workload's name, or a traced run's folder.",
    ),
    *,
    storage: list[str] | None = Option(
        None,
        metavar="NAME|FILE.json",
        help="ssd, hdd, lustre, nfs, s3, memory, recorded, or what `headrace doctor --json` or "
        "`headrace bench storage --json` measured.",
    ),
    nodes: int = Option(1, min=1, help="With as many training processes each."),
    batch: int | None = Option(None, min=1, help="Of a training process."),
    gpu_speed: str = Option("1x", metavar="FACTOR", help="How much faster a step computes."),
    latency: str = Option(
        "1x", metavar="FACTOR", help="How much longer the storage takes: a busy one."
    ),
    workers: int | None = Option(None, min=0, help="Of each training process."),
    processors: int | None = Option(None, min=1, help="Of a node."),
    loader: str | None = Option(
        None,
        help="torch: workers that read one by one; headrace: its reader. As recorded.",
        metavar="NAME",
    ),
    reads_in_flight: int = Option(
        16, min=1, help="Of headrace's reader, for each training process."
    ),
    ahead: int = Option(4, min=1, help="Batches that headrace's reader is ahead, at most."),
    decode: bool = Option(
        True, "--decode/--no-decode", help="Whether samples are decoded as recorded."
    ),
    shared: bool | None = Option(
        None, "--shared/--local", help="All nodes have one storage, or each its own."
    ),
    seed: int = Option(0, help="Of the draws.", metavar="SEED"),
    output: QuietOutput,
) -> int:
    """Predict how long a job's steps take, and how much of that is waiting for data, elsewhere.

    A formula of its bottlenecks, with the recorded sizes and times. What it is worth is said with it: how
    far it is off on the record itself.
    """
    from headrace.insight.whatif import (
        Scenario,
        check_of,
        predict,
        scenario_as_recorded,
        storage_of,
    )

    figures, home, reader = known = _known(job)
    if not decode:
        figures = replace(figures, decode_s=figures.decode_s[:0], collate_s=0.0)
    storages = []
    for name in storage or [_AS_RECORDED if home is not None else "ssd"]:
        one = home if name == _AS_RECORDED else storage_of(name)
        if one is None:
            raise typer.BadParameter("--storage recorded needs a job of `headrace record`")
        storages.append(one)
    if (factor := _factor("--latency", latency)) != 1:
        storages = [one.slower(factor) for one in storages]
    if shared is not None:
        storages = [replace(one, shared="all" if shared else "none") for one in storages]
    wanted = Scenario(
        storage=storages[0], nodes=nodes, batch=batch or figures.batch,
        workers=figures.workers if workers is None else workers,
        gpu_speed=_factor("--gpu-speed", gpu_speed), processors=processors or figures.processors,
        loader=loader or reader,  # type: ignore[arg-type]  # checked there
        reads_in_flight=reads_in_flight, ahead=ahead,
    )  # fmt: skip
    check = None
    rows: list[tuple[str, Prediction]] = []
    if home is not None:
        check = check_of(known.figures, home, reader)
        base = scenario_as_recorded(known.figures, home, reader)
        rows.append(("as it was", predict(known.figures, base, seed)))
    rows += [(one.name, predict(figures, replace(wanted, storage=one), seed)) for one in storages]
    of_job = known.figures
    names = ("batch", "workers", "step_s", "stall")
    recorded = {name: getattr(of_job, name) for name in names}
    document = {
        "job": job, "recorded": recorded | {"compute_s": float(of_job.compute_s.mean())},
        "check": None if check is None else asdict(check),
        "predictions": [{"name": name, **row.document()} for name, row in rows],
    }  # fmt: skip
    output.result(document, *_lines(job, of_job, rows, check))
    return 0


class _Known(NamedTuple):
    """What is known of a job.

    Attributes:
        home: the storage that it was recorded on; None: it was not.
        loader: what read it.
    """

    figures: JobFigures
    home: Storage | None
    loader: Loader


def _factor(option: str, text: str) -> float:
    try:
        return float(text.lower().removesuffix("x"))
    except ValueError as e:
        raise typer.BadParameter(f"{option} is {text!r}, expected a factor such as 2x") from e


def _known(job: str) -> _Known:
    """What is known of a workload, or of a traced run.

    Raises:
        WorkloadError: there is no such workload, or it is wrong.
        TraceError: a run's folder is damaged.
        ValueError: there is nothing to predict from.
    """
    from headrace.bench.config import load_workload, parse_command_line
    from headrace.insight.whatif import figures_of, figures_of_run, recorded_storage
    from headrace.trace import read_run
    from headrace.trace.recorded import read_recorded

    if Path(job).is_dir():
        figures, home = figures_of_run(read_run(job))
        return _Known(figures, home, "headrace")
    loaded = load_workload(parse_command_line([f"workload={job}"]))
    requests, reader = loaded.workload.dataset.requests, loaded.workload.reader
    if requests is None:
        return _Known(_of_workload(loaded, None), None, "torch")
    recorded = read_recorded(Path(requests))
    if not recorded.batch or not len(recorded.compute_s):
        return _Known(_of_workload(loaded, recorded), None, "torch")
    # The workload may have been corrected by hand where the record had guessed.
    figures = replace(figures_of(recorded), batch=reader.batch_size, workers=reader.read_threads)
    home = recorded_storage(recorded) if len(recorded.read_s) else None
    return _Known(figures, home, "headrace" if recorded.traced else "torch")


def _of_workload(loaded: LoadedWorkload, recorded: Recorded | None) -> JobFigures:
    """Figures of a plain DLIO workload: drawn from its distributions."""
    import numpy as np

    from headrace.insight.whatif import JobFigures

    data, reader, train = loaded.workload.dataset, loaded.workload.reader, loaded.workload.train
    random = np.random.default_rng(train.seed)
    mean, stdev = data.nominal_bytes, data.record_length_bytes_stdev
    sizes = np.maximum(random.normal(mean, stdev, 4096), 1).astype(np.int64)
    if recorded is not None:
        sizes = recorded.sample_bytes[recorded.order]
    compute = np.abs(train.computation_time.draw(random, 4096))
    if not compute.any():
        key = loaded.at("train.computation_time")
        raise ValueError(f"{key} is not given: how long a step computes is not known")
    decode = np.abs(reader.preprocess_time.draw(random, 4096))
    # Batches of each worker, as DLIO has it.
    prefetch = -(-reader.prefetch_size // max(1, reader.read_threads)) or 2
    return JobFigures(
        sample_bytes=sizes, opens=data.num_samples_per_file == 1, batch=reader.batch_size,
        workers=reader.read_threads, prefetch=prefetch,
        processors=len(os.sched_getaffinity(0)), compute_s=compute,
        decode_s=decode if decode.any() else np.zeros(0),
    )  # fmt: skip


def _lines(
    job: str, figures: JobFigures, rows: Sequence[tuple[str, Prediction]], check: Check | None
) -> Iterator[str]:
    size, compute_s = bytes_text(float(figures.sample_bytes.mean())), figures.compute_s.mean()
    job = f"{job}: batch {figures.batch}, {figures.workers} workers, samples of {size}"
    yield f"{job}, {compute_s * 1e3:.1f} ms computing a step"
    yield ""
    heads = (
        "storage", "nodes", "batch", "workers", "gpu", "step", "stall", "samples/s", "bound by",
    )  # fmt: skip
    cells = []
    for name, row in rows:
        s, times = row.scenario, (seconds_text(row.step_s), f"{row.stall:.1%}")
        shape = (str(s.nodes), str(s.batch), str(s.workers), f"{s.gpu_speed:g}x")
        cells.append((name[:12], *shape, *times, f"{row.samples_per_s:,.0f}", row.bound))
    yield from aligned([heads, *cells], "<>>>>>>><")
    yield ""
    for bound in dict.fromkeys(row.bound for _, row in rows):
        yield f"{bound}: {_BOUNDS[bound]}"
    last = rows[-1][1]
    yield f"other draws change the step time by +-{last.step_spread_s / last.step_s:.1%}"
    if check is None:
        yield "there are no recorded step times to hold the model against"
    else:
        predicted, was = seconds_text(check.predicted_s), seconds_text(check.recorded_s)
        step = f"{predicted} a step, it was {was} ({check.error:+.1%})"
        yield f"the model on the record itself: {step}"
    for note in dict.fromkeys(note for _, row in rows for note in row.notes):
        yield f"note: {note}"
