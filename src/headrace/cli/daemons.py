"""What the commands over a daemon share: how one is started, missed, ended and listened to."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from headrace.cli import exit_codes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cli.output import Output
    from headrace.runtime import RuntimeFolder

__all__ = ["arguments_of", "has_ended", "log_to_stderr", "not_running", "print_log"]


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; those without a value are left out."""
    return [word for name, value in given.items() if value for word in (name, str(value))]


def has_ended(output: Output, pid: int) -> int:
    """Say that a daemon is gone; returns the exit code."""
    if output.as_json:
        output.document({"pid": pid, "running": False})
    else:
        output.line(f"process {pid} has ended")
    return exit_codes.OK


def not_running(output: Output, folder: RuntimeFolder) -> int:
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
