"""`headrace starving`: which jobs lost most GPU-hours to waiting for data."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headrace.cli.job_report import HistoryOption, history_of
from headrace.cli.output import Json, Output, printable

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.insight.starving import Group, Starving

__all__ = ["LastOption", "seconds_of", "starving"]

LastOption = Annotated[
    str, typer.Option("--last", help="How far back: 30m, 24h, 7d.", metavar="TIME")
]

_SPAN: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "": 3600, "d": 86400, "w": 604800}
_SPAN_MAX_S: Final = 10 * 366 * 86400


def seconds_of(text: str) -> float:
    """`30m`, `24h`, `7d` in seconds; a number alone is hours.

    Raises:
        ValueError: the text is no stretch of time.
    """
    found = _SPAN.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _SPAN_MAX_S:
        raise ValueError(f"{text!r} is no stretch of time, expected as 30m, 24h, 7d")
    return seconds


def starving(
    *,
    last: LastOption = "24h",
    user: Annotated[str, typer.Option(help="Only this user's jobs.")] = "",
    top: Annotated[int, typer.Option(help="So many rows of a table.")] = 10,
    history: HistoryOption = None,
    as_json: Json = False,
) -> None:
    """Rank jobs by GPU-hours lost to waiting for data; then users, file systems and causes."""
    from headrace.insight.starving import starving_of
    from headrace.telemetry.history import open_history

    until_s = time.time()
    since_s = until_s - seconds_of(last)
    output = Output(as_json=as_json)
    opened = open_history(history_of(history))
    try:
        records = opened.records(since_s, until_s)
        skipped = opened.skipped
    finally:
        opened.close()
    found = starving_of([r for r in records if user in ("", r.user)], since_s, until_s)
    if as_json:
        output.document({**found.as_dict(), "skipped": skipped})
        return
    for name in skipped:
        output.remark(f"left out: {name}")
    _print(output, found, top)


def _print(output: Output, found: Starving, top: int) -> None:
    from headrace.cli.top_view import plain_table
    from headrace.telemetry.report import hours_text

    console = output.console()
    console.print(printable(found.answer), markup=False)
    if not found.jobs:
        return
    table = plain_table("JOB", "USER", "LOST GPU-H>", "GPU-H>", "STALL>", "CAUSE", "ON")
    for job in found.jobs[:top]:
        inferred = "" if job.quality == "measured" else "~"
        table.add_row(
            printable(f"{job.job_id} {job.name}".strip()),
            printable(job.user),
            hours_text(job.lost_gpu_hours),
            hours_text(job.gpu_hours),
            f"{inferred}{job.stall:.0%}",
            job.cause,
            printable(job.file_system) or "-",
        )
    output.line("")
    console.print(table)
    if any(job.quality != "measured" for job in found.jobs[:top]):
        output.line("~ inferred from pressure and use: the job does not read through headrace")
    if len(found.jobs) > top:
        output.line(f"and {len(found.jobs) - top} more jobs (--top {len(found.jobs)})")
    for title, groups in (
        ("USER", found.users),
        ("FILE SYSTEM", found.file_systems),
        ("CAUSE", found.causes),
    ):
        output.line("")
        console.print(_groups(title, groups[:top]))


def _groups(title: str, groups: tuple[Group, ...]) -> Table:
    from headrace.cli.top_view import plain_table
    from headrace.telemetry.report import hours_text

    table = plain_table()
    table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=20, max_width=40)
    for name in ("JOBS", "LOST GPU-H", "WAITED"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            printable(group.name) or "?", str(group.jobs), hours_text(group.lost_gpu_hours),
            _hours(group.waited_s),
        )  # fmt: skip
    return table


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 36 else f"{seconds:,.1f} s"
