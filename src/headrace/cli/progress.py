"""Progress of long work: a bar on a terminal, else a plain line every few seconds, on stderr.

The library calls back with (samples done, samples, bytes done, bytes); totals may be unknown. Rates
count from the first call, so that what an interrupted run had done already does not flatter them.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.base.text import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.cli.output import Output

    Report = Callable[[int, int | None, int, int | None], None]

__all__ = ["progress"]

LINE_EVERY_S = 5.0
"""Often enough to see life in a batch job's log, rarely enough not to fill it."""

_REFRESH_S = 0.1


@contextmanager
def progress(output: Output, what: str, noun: str = "samples") -> Iterator[Report | None]:
    """Shows progress while the block runs.

    Args:
        output: the command's output; quiet shows nothing.
        what: the verb: "packing".
        noun: what is counted.

    Yields:
        The function to call, from any thread, as often as one likes; None when quiet.
    """
    if output.quiet:
        yield None
        return
    shown = _Bar(what, noun) if sys.stderr.isatty() else _Lines(what, noun)
    with shown:
        yield shown.report


class _Meter:
    """Rates and the time left."""

    def __init__(self) -> None:
        self.started: float | None = None
        self._first = (0, 0)

    def rates(self, samples: int, size: int) -> tuple[float, float]:
        """Samples/s and bytes/s so far."""
        now = time.monotonic()
        if self.started is None:
            self.started, self._first = now, (samples, size)
        elapsed = max(now - self.started, 1e-9)
        if elapsed < _REFRESH_S:
            return 0.0, 0.0
        return (samples - self._first[0]) / elapsed, (size - self._first[1]) / elapsed

    @staticmethod
    def left_s(
        samples: tuple[int, int | None, float], size: tuple[int, int | None, float]
    ) -> float | None:
        """Seconds left, by bytes where their total is known, else by samples.

        Args:
            samples: done, total, per second.
            size: the same of bytes.
        """
        for done, total, rate in (size, samples):
            if total and rate > 0:
                return max(0.0, (total - done) / rate)
        return None


class _Lines:
    """Plain lines, for logs."""

    def __init__(self, what: str, noun: str) -> None:
        self._what, self._noun = what, noun
        self._meter = _Meter()
        self._next = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def report(self, samples: int, total: int | None, size: int, total_bytes: int | None) -> None:
        samples_rate, bytes_rate = self._meter.rates(samples, size)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LINE_EVERY_S
        of = f" of {count_text(total)}" if total else ""
        text = f"{self._what}: {count_text(samples)}{of} {self._noun}"
        text += f", {bytes_text(size)}" if size else ""
        text += f", {samples_rate:,.0f} {self._noun}/s"
        text += f", {bytes_text(bytes_rate)}/s" if size else ""
        left = self._meter.left_s((samples, total, samples_rate), (size, total_bytes, bytes_rate))
        if left is not None:
            text += f", {duration_text(left)} left"
        print(text, file=sys.stderr, flush=True)


class _Bar:
    """A bar on a terminal; it leaves nothing behind, the result says it all."""

    def __init__(self, what: str, noun: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

        self._noun = noun
        self._meter = _Meter()
        self._shown = 0.0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[rates]}"),
            console=Console(stderr=True, highlight=False),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task(what, total=None, rates="")

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, samples: int, total: int | None, size: int, total_bytes: int | None) -> None:
        samples_rate, bytes_rate = self._meter.rates(samples, size)
        now = time.monotonic()
        if now - self._shown < _REFRESH_S and samples != total:
            return
        self._shown = now
        text = f"{count_text(samples)} {self._noun}"
        if bytes_rate:
            text = f"{samples_rate:,.0f} {self._noun}/s {bytes_text(bytes_rate)}/s"
        left = self._meter.left_s((samples, total, samples_rate), (size, total_bytes, bytes_rate))
        if left is not None:
            text += f" {duration_text(left)} left"
        # Bytes tell the time better than samples, whose sizes differ.
        done: dict[str, Any] = {"completed": samples, "total": total}
        if total_bytes:
            done = {"completed": size, "total": total_bytes}
        self._bar.update(self._task, rates=text, **done)
