"""What commands that run a program as it is have in common: options, and what a shell says of a missing one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.base.text import printable

__all__ = ["QuietEnd", "ReportFile", "not_started"]

ReportFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write a report as JSON.")
]
"""A file, since stdout is the program's."""

QuietEnd = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing at the end.")]


def not_started(error: FileNotFoundError | PermissionError) -> int:
    """Say why a program did not start, and return the status that a shell has for it."""
    from headrace.posix.launch import NOT_EXECUTABLE, NOT_FOUND

    print(f"error: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
