"""`headrace record`: an unmodified program's reads, as a DLIO workload."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.base.text import bytes_of, printable
from headrace.cli import exit_codes
from headrace.cli.printing import plain
from headrace.cli.programs import QuietEnd, ReportFile, not_started

if TYPE_CHECKING:
    from headrace.insight.record import Recording

__all__ = ["record"]


def record(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND [ARGUMENT]...", help="What to run.")
    ] = None,
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.yaml", help="The workload to write.")
    ] = "job.yaml",
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Folder of the data set. Default: it is found."),
    ] = None,
    finish: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Finish a recording that was cut off (FILE.yaml.part)."
        ),
    ] = None,
    limit: Annotated[
        str, typer.Option(metavar="BYTES", help="What each process may log, at most.")
    ] = "1G",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the logs in FILE.yaml.part.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a workload that is there.")
    ] = False,
    report: ReportFile = None,
    quiet: QuietEnd = False,
) -> int:
    """Run a program as it is, and write its reads as a workload: files, sizes, order, step times.

    Nothing about the program changes. `headrace bench run --workload FILE.yaml` does the same reads on
    other storage, `headrace whatif FILE.yaml` predicts other machines.
    """
    from headrace.insight.record import RecordOptions
    from headrace.insight.record import finish as finish_part
    from headrace.insight.record import record as record_command
    from headrace.posix.launch import end_like

    if bool(command) == bool(finish):
        raise typer.BadParameter("give a command to record: headrace record -o job.yaml -- COMMAND")
    options = RecordOptions(
        output=Path(output), roots=root or (), log_bytes=bytes_of(limit), keep=keep,
        overwrite=overwrite,
    )  # fmt: skip
    try:
        if finish is not None:
            done = finish_part(Path(finish), options)
        else:
            done = record_command(command or [], options)
    except (FileNotFoundError, PermissionError) as e:
        return not_started(e)
    _tell(done, report, quiet=quiet)
    ended = done.run.ended
    if ended is not None:
        end_like(ended)
    status = ended.status if ended is not None else exit_codes.OK
    return status or (exit_codes.OK if done.job is not None else exit_codes.STORE_ERROR)


def _tell(done: Recording, report: str | None, *, quiet: bool) -> None:
    """What came of it, on stderr: stdout is the program's."""
    from headrace.insight.record.text import document_of, lines_of

    if report is not None:
        text = json.dumps(document_of(done), indent=2, default=plain)
        Path(report).write_text(text + "\n", encoding="utf-8")
    if done.why is not None and not done.run.unseen:
        print(f"headrace record: {printable(str(done.why))}", file=sys.stderr)
    lines = [] if quiet else list(lines_of(done))
    if lines:
        print("headrace record:", file=sys.stderr)
        for line in lines:
            print(f"  {printable(line)}", file=sys.stderr)
