"""What the commands over a daemon share: how one is started, missed, ended and listened to."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.cli.output import Output
    from headrace.runtime import RuntimeFolder

__all__ = ["Foreground", "Lines", "arguments_of", "end", "log_to_stderr", "print_log", "tell"]

Foreground = Annotated[bool, typer.Option("--foreground", help="Stay here, and log to stderr.")]
Lines = Annotated[int, typer.Option("--lines", "-n", help="How many.")]


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; those without a value are left out."""
    return [word for name, value in given.items() if value for word in (name, str(value))]


def end(output: Output, folder: RuntimeFolder, stop: Callable[[], int]) -> int:
    """End a daemon and say so; returns the exit code.

    Args:
        output: the command's.
        folder: the daemon's.
        stop: ends it and returns its process id; FileNotFoundError: there is none.
    """
    try:
        pid = stop()
    except FileNotFoundError:
        return _not_running(output, folder)
    if output.as_json:
        output.document({"pid": pid, "running": False})
    else:
        output.line(f"process {pid} has ended")
    return exit_codes.OK


def tell(
    output: Output,
    folder: RuntimeFolder,
    ask: Callable[[], dict[str, Any]],
    show: Callable[[Output, dict[str, Any]], None],
) -> int:
    """Say how a daemon fares; returns the exit code.

    Args:
        output: the command's.
        folder: the daemon's.
        ask: what it says of itself; FileNotFoundError: there is none.
        show: prints that as text.
    """
    try:
        state = ask()
    except FileNotFoundError:
        return _not_running(output, folder)
    if output.as_json:
        output.document({"running": True, **state})
    else:
        show(output, state)
    return exit_codes.OK


def _not_running(output: Output, folder: RuntimeFolder) -> int:
    """Say that no daemon is there; returns the exit code."""
    if output.as_json:
        output.document({"running": False, "folder": str(folder.path)})
    else:
        output.line(f"no {folder.title} runs in {folder.path}")
    return exit_codes.FINDING


def print_log(output: Output, folder: RuntimeFolder, lines: int) -> None:
    """Print the end of the log of a daemon in the background."""
    from headrace.runtime import tail

    text = tail(folder, lines)
    if output.as_json:
        output.document({"path": str(folder.log), "lines": text.splitlines()})
    else:
        for line in text.splitlines():
            output.line(line)


def log_to_stderr() -> None:
    """Log there what a daemon in the foreground has to say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("headrace")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
