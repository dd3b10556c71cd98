"""`headrace ab`: the same command with and without headrace, and whether the difference is real."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet
from headrace.cli.simulate import SimulateOption

if TYPE_CHECKING:
    from types import FrameType

    from headrace.insight.ab.options import AbOptions
    from headrace.insight.ab.running import Run

__all__ = ["ab"]


def ab(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND [ARGUMENT]...", help="What to run.")
    ],
    *,
    repeat: Annotated[
        int | None, typer.Option("--repeat", "-n", metavar="N", help="Pairs of runs. Default: 6.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="As many pairs as fit into so long.")
    ] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold/--warm", help="What it reads is out of memory before each run, or in it."
        ),
    ] = True,
    until_confident: Annotated[
        bool, typer.Option("--until-confident", help="Stop when the interval is narrow enough.")
    ] = False,
    width: Annotated[
        float, typer.Option(metavar="PERCENT", help="What is narrow: so much to either side.")
    ] = 5.0,
    drop_in: Annotated[
        bool,
        typer.Option(
            "--drop-in", help="Exchange torch's DataLoader for headrace's, instead of `run`."
        ),
    ] = False,
    with_order: Annotated[
        bool,
        typer.Option("--with-order", help="Tell headrace the order that the first run had."),
    ] = False,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Folder whose files are served. Default: found."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Lines of its output that must be the same."),
    ] = None,
    compare_file: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A file that it writes, which must be the same."),
    ] = None,
    limit: Annotated[
        float, typer.Option(metavar="S", help="A run that takes longer is ended.")
    ] = 3600.0,
    stdin: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its standard input. Default: empty.")
    ] = None,
    simulate: SimulateOption = None,
    seed: Annotated[int, typer.Option(help="Of the order in which the sides take turns.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a command with and without headrace in turn; say how much faster it is, and how sure that is."""
    from headrace.errors import ProgramError
    from headrace.insight.ab.comparison import Comparison, Ended
    from headrace.insight.ab.experiment import compare as run_both
    from headrace.insight.ab.options import AbOptions
    from headrace.insight.ab.words import report

    output = Output(as_json=as_json, quiet=quiet)
    if compare is not None:
        try:
            re.compile(compare)
        except re.error as e:
            raise typer.BadParameter(f"--compare {compare!r} is no regular expression: {e}") from e
    if stdin is not None and not Path(stdin).is_file():
        raise typer.BadParameter(f"--stdin {stdin}: no such file")
    try:
        options = AbOptions(
            pairs=repeat,
            seconds=seconds,
            cold=cold,
            until_confident=until_confident,
            width=width / 100,
            drop_in=drop_in,
            with_order=with_order,
            roots=tuple(root or ()),
            limit_s=limit,
            compare=compare,
            compare_files=tuple(compare_file or ()),
            simulate=simulate,
            stdin=stdin,
            seed=seed,
        )
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    # Whoever ends us wants what we started ended, as with Ctrl-C.
    handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        found = run_both(command, options, lambda run: _tell(output, run, options))
    except ProgramError as e:
        known = getattr(e, "comparison", None)
        if isinstance(known, Comparison) and known.pairs and not as_json:
            output.line(report(known))
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
    if as_json:
        output.document(found.document())
    else:
        for line in report(found).splitlines():
            output.line(line)
    if found.ended is Ended.INTERRUPTED:
        return exit_codes.INTERRUPTED
    return exit_codes.OK if found.same_work else exit_codes.FINDING


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(output: Output, run: Run, options: AbOptions) -> None:
    """A line about a run, on stderr."""
    from headrace.base.text import duration_text
    from headrace.insight.ab.words import progress

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
    line = progress(run.side.value, run.ran.wall_s, len(run.reading.opens))
    output.remark(f"pair {run.number}{of}, {line}")
    sys.stderr.flush()
