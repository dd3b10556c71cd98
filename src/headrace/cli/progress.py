"""Progress of long work: a bar on a terminal, else a plain line every few seconds, on stderr.

The library calls back with (samples done, samples, bytes done, bytes); totals may be unknown. Rates
count from the first call, so that what an interrupted run had done already does not flatter them.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.base.text import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.cli.printing import Output

    Report = Callable[[int, int | None, int, int | None], None]


LINE_EVERY_S = 5.0
"""Often enough to see life in a batch job's log, rarely enough not to fill it."""

_REFRESH_S = 0.1


@contextmanager
def progress(output: Output, what: str, noun: str = "samples") -> Iterator[Report | None]:
    """Show progress while the block runs.

    Args:
        output: the command's output; quiet shows nothing.
        what: the verb: "packing".
        noun: what is counted.

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

        def draw(meter: _Meter) -> None:
            # Bytes tell the time better than samples, whose sizes differ.
            done = (meter.size, meter.bytes) if meter.bytes else (meter.count, meter.total)
            bar.update(task, rates=meter.bar_text(), completed=done[0], total=done[1])

        with bar:
            yield _Meter(noun, _REFRESH_S, draw).report
    else:

        def write(meter: _Meter) -> None:
            print(f"{what}: {meter.line_text()}", file=sys.stderr, flush=True)

        meter = _Meter(noun, LINE_EVERY_S, write)
        meter.next_s = time.monotonic() + LINE_EVERY_S
        yield meter.report


def rate_of(per_s: float) -> str:
    """Whole, or with two digits where that would say little."""
    return f"{per_s:,.0f}" if per_s >= 10.0 or not per_s else f"{per_s:.2g}"


class _Meter:
    """What was done so far, its rates and the time left; shown every so often."""

    def __init__(self, noun: str, every_s: float, show: Callable[[_Meter], None]) -> None:
        self._noun = noun
        self._every_s = every_s
        self._show = show
        self._first: tuple[float, int, int] | None = None
        self.next_s = 0.0
        self.count = self.size = 0
        self.total: int | None = None
        self.bytes: int | None = None
        self._rate = self._bytes_rate = 0.0

    def report(self, count: int, total: int | None, size: int, total_bytes: int | None) -> None:
        now = time.monotonic()
        if self._first is None or count < self.count:  # a second pass counts anew
            self._first = (now, count, size)
        self.count, self.total, self.size, self.bytes = count, total, size, total_bytes
        # A bar is drawn whole at the end; lines come at their pace.
        if now < self.next_s and (self._every_s == LINE_EVERY_S or count != total):
            return
        self.next_s = now + self._every_s
        began_s, first, first_bytes = self._first
        if now - began_s >= _REFRESH_S:
            self._rate = (count - first) / (now - began_s)
            self._bytes_rate = (size - first_bytes) / (now - began_s)
        self._show(self)

    def bar_text(self) -> str:
        if not self._bytes_rate:
            return f"{count_text(self.count)} {self._noun}{self._left(' ')}"
        rate = f"{rate_of(self._rate)} {self._noun}/s {bytes_text(self._bytes_rate)}/s"
        return f"{rate}{self._left(' ')}"

    def line_text(self) -> str:
        of = f" of {count_text(self.total)}" if self.total else ""
        size = f", {bytes_text(self.size)}" if self.size else ""
        # None, where what was done came at once: the first report, or the only one.
        rate = f", {rate_of(self._rate)} {self._noun}/s" if self._rate else ""
        bytes_rate = f", {bytes_text(self._bytes_rate)}/s" if self._bytes_rate else ""
        return (
            f"{count_text(self.count)}{of} {self._noun}{size}{rate}{bytes_rate}{self._left(', ')}"
        )

    def _left(self, before: str) -> str:
        """The time left, by bytes where their total is known, else by samples."""
        for done, total, rate in (
            (self.size, self.bytes, self._bytes_rate),
            (self.count, self.total, self._rate),
        ):
            if total and rate > 0:
                return f"{before}{duration_text(max(0.0, (total - done) / rate))} left"
        return ""
