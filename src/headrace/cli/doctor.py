"""`headrace doctor`: why a training would wait for its data, in 15 seconds, and what to do about it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output, Quiet
from headrace.cli.simulate import SimulateOption
from headrace.cli.storage import StorageOptions, storage_options

if TYPE_CHECKING:
    from headrace.insight.doctor import Diagnosis

__all__ = ["doctor"]

_STYLES = {"head": "bold", "verdict": "bold yellow", "do": "bold green", "command": "cyan"}


def doctor(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder, a file, a pattern, a store, or a URL.")
    ] = ".",
    *,
    batch: Annotated[
        int, typer.Option("--batch", "-b", min=1, help="Samples of a training step.")
    ] = 256,
    step_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="What a training step takes, if there are always data."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, max=1024, help="num_workers; default: as many as CPUs, up to 8."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.2, max=3600, help="About how long it may take.")
    ] = 15.0,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write one HTML file that works offline."),
    ] = None,
    simulate: SimulateOption = None,
    storage: StorageOptions = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say how fast your data can be loaded here, what holds it back, and what to do first.

    Reads some of the data and writes nothing there. Ctrl-C ends it with what is known by then.
    """
    from headrace.insight.doctor import ExamineOptions, diagnose, doctor_page, examine

    if html is not None and not Path(html).parent.is_dir():  # known before it takes 15 seconds
        raise typer.BadParameter(f"--html {html}: there is no folder {Path(html).parent}")
    output = Output(as_json=as_json, quiet=quiet)
    options = ExamineOptions(
        seconds=seconds, simulate=simulate, storage_options=storage_options(storage)
    )
    with _progress(output) as tell:
        found = examine(data, options, tell)
    diagnosis = diagnose(
        found, batch=batch, step_s=None if step_ms is None else step_ms / 1e3, workers=workers,
        target=data,
    )  # fmt: skip
    if html is not None:
        Path(html).write_text(doctor_page(diagnosis), encoding="utf-8")
        output.remark(f"wrote {html}")
    if as_json:
        output.document(_document(diagnosis))
    elif html is None:
        _print(output, diagnosis)
    code = exit_codes.INTERRUPTED if found.interrupted else exit_codes.OK
    _leave_if_something_hangs(code)
    return code


def _leave_if_something_hangs(code: int) -> None:
    """A read that the storage never answers must not hold up the end."""
    from headrace.insight.doctor.examine import THREAD

    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(diagnosis)


def _print(output: Output, diagnosis: Diagnosis) -> None:
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
def _progress(output: Output) -> Iterator[Callable[[str, float], None] | None]:
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
