"""`headrace run`: an unmodified program, served by the node daemon."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.programs import QuietEnd, ReportFile, not_started
from headrace.cli.simulate import SimulateOption

__all__ = ["run"]


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND [ARGUMENT]...", help="What to run.")
    ],
    *,
    root: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR", help="Folder whose files are served. Default: those in the arguments."
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Paths, one a line, as the program will open them."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="It opens all files in headrace's order of this seed.")
    ] = None,
    record_order: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the order of its opens.")
    ] = None,
    immutable: Annotated[
        bool,
        typer.Option(
            "--immutable", help="Nothing below the roots changes: do not look at originals."
        ),
    ] = False,
    simulate: SimulateOption = None,
    simulate_only: Annotated[
        bool, typer.Option("--simulate-only", help="With --simulate: nothing is served.")
    ] = False,
    report: ReportFile = None,
    quiet: QuietEnd = False,
) -> int:
    """Run a program as it is; files that it opens come from memory where they can."""
    from headrace.posix.launch import RunOptions, end_like, launch

    if simulate_only and simulate is None:
        raise typer.BadParameter("--simulate-only needs --simulate NAME")
    roots = root or _folders_of(command)
    if not roots:
        raise typer.BadParameter("name the folder whose files are served: --root DIR")
    options = RunOptions(
        roots=roots,
        order=order,
        seed=seed,
        record_order=record_order,
        immutable=immutable,
        simulate=simulate,
        plane=not simulate_only,
    )
    try:
        found = launch(command, options)
    except (FileNotFoundError, PermissionError) as e:
        return not_started(e)
    if report is not None:
        Path(report).write_text(json.dumps(found.document(), indent=2) + "\n", encoding="utf-8")
    if not quiet and found.opens:  # else it was said before that nothing is seen
        print(f"headrace run: {found.line()}", file=sys.stderr)
    end_like(found.ended)
    return found.ended.status


def _folders_of(command: list[str]) -> list[str]:
    """Folders that the arguments name: `DIR`, `--data=DIR`."""
    words = [word.rpartition("=")[2] for word in command[1:]]
    return [word for word in words if Path(word).is_dir() and Path(word).resolve() != Path("/")]
