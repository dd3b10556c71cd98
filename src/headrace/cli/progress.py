"""Progress of long work: a bar on a terminal, else a plain line every few seconds, on stderr."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.base.progress import REFRESH_S, Meter, lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.base.progress import Progress
    from headrace.cli.printing import Output


@contextmanager
def progress(
    output: Output, what: str, noun: str = "samples", bytes_are: str = ""
) -> Iterator[Progress | None]:
    """Show progress while the block runs.

    Args:
        output: the command's output; quiet shows nothing.
        what: the verb: "packing".
        noun: what is counted.
        bytes_are: what was done with bytes: "read"; "" where that goes without saying.

    Yields:
        The function to call, from any thread, as often as one likes; None when quiet.
    """
    if output.quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

        bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None),
            TaskProgressColumn(), TextColumn("{task.fields[rates]}"),
            console=Console(stderr=True, highlight=False), transient=True, expand=True,
        )  # fmt: skip
        task = bar.add_task(what, total=None, rates="")

        def draw(meter: Meter) -> None:
            # Bytes tell the time better than samples, whose sizes differ.
            done = (meter.size, meter.bytes) if meter.bytes else (meter.count, meter.total)
            bar.update(task, rates=meter.bar_text(), completed=done[0], total=done[1])

        with bar:
            yield Meter(noun, REFRESH_S, draw, bytes_are).report
    else:
        yield lines(what, noun, bytes_are)
