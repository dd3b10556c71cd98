"""Progress of long work: how far it is, at which rates, and the time left; lines of it on stderr.

Whoever works calls back with (samples done, samples, bytes done, bytes); totals may be unknown. Rates
count from the first call, so that what an interrupted run had done already does not flatter them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from headrace.base.text import bytes_text, count_text, duration_text

Progress = Callable[[int, int | None, int, int | None], None]

LINE_EVERY_S = 5.0
"""Often enough to see life in a batch job's log, rarely enough not to fill it."""

REFRESH_S = 0.1


def reporter(
    progress: Progress | bool | None, what: str, noun: str = "samples", bytes_are: str = ""
) -> Progress | None:
    """What is to be called: `progress` itself; where it is True, what writes a line every few seconds.

    `what` is the verb, `packing`, `noun` what is counted, and `bytes_are` what was done with bytes: `read`.
    """
    if not isinstance(progress, bool):
        return progress
    return lines(what, noun, bytes_are) if progress else None


def lines(what: str, noun: str = "samples", bytes_are: str = "") -> Progress:
    """What writes a plain line every few seconds."""

    def write(meter: Meter) -> None:
        sys.stderr.write(f"{what}: {meter.line_text()}\n")
        sys.stderr.flush()

    meter = Meter(noun, LINE_EVERY_S, write, bytes_are)
    meter.next_s = time.monotonic() + LINE_EVERY_S
    return meter.report


def rate_of(per_s: float) -> str:
    """Whole, or with two digits where that would say little."""
    return f"{per_s:,.0f}" if per_s >= 10.0 or not per_s else f"{per_s:.2g}"


class Meter:
    """What was done so far, its rates and the time left; shown every so often."""

    def __init__(
        self, noun: str, every_s: float, show: Callable[[Meter], None], bytes_are: str = ""
    ) -> None:
        self._noun = noun
        self._per_s = f"/s {bytes_are}".rstrip()
        self._every_s = every_s
        self._show = show
        self._first: tuple[float, int, int] | None = None
        self.next_s = 0.0
        self.count = self.size = 0
        self.total: int | None = None
        self.bytes: int | None = None
        self._rate = self._bytes_rate = 0.0

    def report(self, count: int, total: int | None, size: int, total_bytes: int | None) -> None:
        """Take what was done so far: a `Progress`."""
        now = time.monotonic()
        if self._first is None or count < self.count:  # a second pass counts anew
            self._first = (now, count, size)
        self.count, self.total, self.size, self.bytes = count, total, size, total_bytes
        # A bar is drawn whole at the end; lines come at their pace.
        if now < self.next_s and (self._every_s == LINE_EVERY_S or count != total):
            return
        self.next_s = now + self._every_s
        began_s, first, first_bytes = self._first
        if now - began_s >= REFRESH_S:
            self._rate = (count - first) / (now - began_s)
            self._bytes_rate = (size - first_bytes) / (now - began_s)
        self._show(self)

    def bar_text(self) -> str:
        """What stands beside a bar."""
        if not self._bytes_rate:
            return f"{count_text(self.count)} {self._noun}{self._left(' ')}"
        rate = f"{rate_of(self._rate)} {self._noun}/s {bytes_text(self._bytes_rate)}{self._per_s}"
        return f"{rate}{self._left(' ')}"

    def line_text(self) -> str:
        """What a line says."""
        of = f" of {count_text(self.total)}" if self.total else ""
        size = f", {bytes_text(self.size)}" if self.size else ""
        # None, where what was done came at once: the first report, or the only one.
        rate = f", {rate_of(self._rate)} {self._noun}/s" if self._rate else ""
        bytes_rate = f", {bytes_text(self._bytes_rate)}{self._per_s}" if self._bytes_rate else ""
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
