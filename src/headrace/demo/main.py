"""Main: runs the demo for a person, with progress on stderr and the result on stdout."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from headrace.demo.run import run
from headrace.demo.show import show

if TYPE_CHECKING:
    from headrace.demo.options import DemoOptions

__all__ = ["main"]

_TELL_EVERY_S = 0.2


class _Progress:
    """One line that is written over on a terminal; a line per kind of work in a log."""

    def __init__(self) -> None:
        self._what = ""
        self._told_at = 0.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        new = what != self._what
        if not new and (not self._terminal or now - self._told_at < _TELL_EVERY_S):
            return
        self._what, self._told_at = what, now
        text = f"{what}: {done:,} of {of:,}" if of else what
        sys.stderr.write(f"\r{text:<70}" if self._terminal else f"{what} ...\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave nothing behind on a terminal."""
        if self._terminal:
            sys.stderr.write(f"\r{'':<70}\r")


def main(options: DemoOptions, *, as_json: bool = False) -> int:
    """Run the demo and print its report.

    Args:
        options: on what.
        as_json: print one JSON document.

    Returns:
        0 if the model beats chance and the resumed order is the same, 1 otherwise.
    """
    progress = _Progress()
    try:
        report = run(options, progress)
    finally:
        progress.end()
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show(report)
    return 0 if report.passed else 1
