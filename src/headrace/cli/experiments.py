"""`headrace doctor` and `headrace ab`: what holds a training back, and whether headrace makes it faster."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from headrace.cli import exit_codes
from headrace.cli.options import QuietOutput, StorageOptions
from headrace.cli.printing import Output
from headrace.cli.simulate import SimulateOption

if TYPE_CHECKING:
    from types import FrameType

    from headrace.insight.ab.running import AbOptions, MeasuredRun
    from headrace.insight.doctor import Diagnosis

_STYLES = {"head": "bold", "verdict": "bold yellow", "do": "bold green", "command": "cyan"}


def doctor(
    data: str = Argument(
        ".", metavar="DATA", help="A folder, a file, a pattern, a store, or a URL."
    ),
    *,
    batch: int = Option(256, "--batch", "-b", min=1, help="Samples of a training step."),
    step_ms: float | None = Option(
        None, min=0.001, help="What a training step takes, if there are always data."
    ),
    workers: int | None = Option(
        None, min=0, max=1024, help="num_workers; default: as many as CPUs, up to 8."
    ),
    seconds: float = Option(15.0, min=0.2, max=3600, help="About how long it may take."),
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
    from headrace.insight.doctor import ExamineOptions, diagnose, doctor_page, examine
    from headrace.insight.doctor.examine import THREAD

    if html is not None and not Path(html).parent.is_dir():  # known before it takes 15 seconds
        raise typer.BadParameter(f"--html {html}: there is no folder {Path(html).parent}")
    options = ExamineOptions(seconds=seconds, simulate=simulate, storage_options=storage)
    with _examining(output) as tell:
        examination = examine(data, options, tell)
    diagnosis = diagnose(
        examination, batch=batch, step_s=None if step_ms is None else step_ms / 1e3, workers=workers,
        target=data,
    )  # fmt: skip
    if html is not None:
        Path(html).write_text(doctor_page(diagnosis), encoding="utf-8")
        output.remark(f"wrote {html}")
    if output.as_json:
        output.document(dataclasses.asdict(diagnosis))
    elif html is None:
        _print_diagnosis(output, diagnosis)
    code = exit_codes.INTERRUPTED if examination.interrupted else exit_codes.OK
    if any(thread.name == THREAD for thread in threading.enumerate()):
        # A read that the storage never answers must not hold up the end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _print_diagnosis(output: Output, diagnosis: Diagnosis) -> None:
    from headrace.insight.doctor import lines_of

    lines = lines_of(diagnosis)
    if not sys.stdout.isatty():
        for _, line in lines:
            output.line(line)
        return
    from rich.text import Text

    console = output.console()
    for kind, line in lines:
        console.print(Text(line, style=_STYLES.get(kind, "")), soft_wrap=True)


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
        None, "--repeat", "-n", metavar="N", help="Pairs of runs. Default: 6."
    ),
    seconds: float | None = Option(None, metavar="S", help="As many pairs as fit into so long."),
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
        None, metavar="DIR", help="Folder whose files are served. Default: found."
    ),
    compare: str | None = Option(
        None, metavar="REGEX", help="Lines of its output that must be the same."
    ),
    compare_file: list[str] | None = Option(
        None, metavar="FILE", help="A file that it writes, which must be the same."
    ),
    limit: float = Option(3600.0, metavar="S", help="A run that takes longer is ended."),
    stdin: str | None = Option(None, metavar="FILE", help="Its standard input. Default: empty."),
    simulate: SimulateOption = None,
    seed: int = Option(0, help="Of the order in which the sides take turns."),
    output: QuietOutput,
) -> int:
    """Run a command with and without headrace in turn; say how much faster it is, and how sure that is."""
    from headrace.errors import ProgramError
    from headrace.insight.ab.comparison import Comparison, EndReason
    from headrace.insight.ab.experiment import compare as run_both
    from headrace.insight.ab.running import AbOptions
    from headrace.insight.ab.text import report

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
    handler = signal.signal(signal.SIGTERM, _interrupt)
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


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell_run(output: Output, run: MeasuredRun, options: AbOptions) -> None:
    """A line about a run, on stderr."""
    from headrace.base.text import duration_text, seconds_text

    if run.number == 0:
        files = len(run.reading.files)
        output.remark(f"first run, to learn what it reads: {run.ran.wall_s:.2f} s, {files:,} files")
        if options.seconds is None and not options.until_confident:
            runs = 2 * options.pairs_most
            output.remark(
                f"{runs} more follow, about {duration_text(runs * run.ran.wall_s)}; Ctrl-C reports the "
                "pairs that have ended"
            )
        return
    most = options.pairs_most
    of = f" of {most}" if options.pairs is not None or not options.seconds else ""
    took, opens = seconds_text(run.ran.wall_s), len(run.reading.opens)
    output.remark(f"pair {run.number}{of}, {run.side.value}: {took}, {opens:,} files opened")
    sys.stderr.flush()
