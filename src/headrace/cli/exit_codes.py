"""What the command's exit code says. Documented in docs/reference/cli.md; scripts rely on it."""

from __future__ import annotations

from typing import Final

__all__ = ["BUG", "FINDING", "INTERRUPTED", "OK", "STORE_ERROR", "USAGE"]

OK: Final = 0
FINDING: Final = 1
"""The command worked and found what it looks for: bad samples, samples left out, beyond repair,
a condition of a comparison."""
USAGE: Final = 2
"""The command line makes no sense."""
STORE_ERROR: Final = 3
"""An error of `headrace.errors`: a store, a source, a volume, the disk."""
BUG: Final = 4
"""headrace's own mistake; the traceback is printed."""
INTERRUPTED: Final = 130
"""Ctrl-C."""
