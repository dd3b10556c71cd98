"""`headrace usage`: hours and efficiency by user and account."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.job_report import HistoryOption, history_of
from headrace.cli.output import Json, Output, printable
from headrace.cli.starving import LastOption, seconds_of

if TYPE_CHECKING:
    from headrace.insight.usage import Accounted, Usage, UsageRow

__all__ = ["usage"]


def usage(
    *,
    last: LastOption = "7d",
    user: Annotated[str, typer.Option(help="Only this user's.")] = "",
    account: Annotated[str, typer.Option(help="Only this account's.")] = "",
    source: Annotated[
        str,
        typer.Option("--from", help="Hours from slurm or from history; auto: Slurm where it is."),
    ] = "auto",
    history: HistoryOption = None,
    as_json: Json = False,
) -> None:
    """Print hours and efficiency by user and account."""
    from headrace.errors import TelemetryError
    from headrace.insight.usage import usage_of
    from headrace.telemetry.history import JobRecord, open_history

    if source not in ("auto", "slurm", "history"):
        raise ValueError(f"--from is {source!r}, expected auto, slurm or history")
    until_s = time.time()
    since_s = until_s - seconds_of(last)
    output = Output(as_json=as_json)
    books = None if source == "history" else _books(since_s, until_s, must=source == "slurm")
    records: list[JobRecord] = []
    skipped: list[str] = []
    try:
        opened = open_history(history_of(history))
        try:
            records, skipped = opened.records(since_s, until_s), opened.skipped
        finally:
            opened.close()
    except TelemetryError as e:
        if books is None:
            raise
        skipped = [str(e)]
    if books is not None:
        books = [j for j in books if user in ("", j.user) and account in ("", j.account)]
    else:
        records = [r for r in records if user in ("", r.user) and account in ("", r.account)]
    found = usage_of(records, books, since_s, until_s)
    if as_json:
        output.document({**found.as_dict(), "skipped": skipped})
        return
    for name in skipped:
        output.remark(f"left out: {name}")
    _print(output, found)


def _books(since_s: float, until_s: float, *, must: bool) -> list[Accounted] | None:
    """Slurm's jobs; None: there are no books, and they need not be there."""
    from headrace.cluster.slurm.accounting import read_accounting
    from headrace.cluster.slurm.commands import Commands
    from headrace.errors import ClusterError

    if not must and shutil.which("sacct") is None:
        return None
    try:
        return list(read_accounting(Commands(), since_s, until_s))
    except ClusterError:
        if must:
            raise
        return None


def _print(output: Output, found: Usage) -> None:
    from headrace.cli.top_view import plain_table

    if not found.rows:
        output.line("no job is known in this time")
        return
    table = plain_table()
    for name in ("USER", "ACCOUNT"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=16)
    for name in ("JOBS", "GPU-H", "CPU-H", "GPU USE", "LOST GPU-H", "STALL", "EFF"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*_cells(row))
    if len(found.rows) > 1:
        table.add_row(*_cells(found.total, "all"))
    output.console().print(table)
    total = found.total
    if found.source == "slurm" and total.gpu_hours:
        covered = total.seen_gpu_hours / total.gpu_hours
        output.line(f"hours from Slurm; agents saw {covered:.0%} of the GPU-hours")


def _cells(row: UsageRow, user: str = "") -> tuple[str, ...]:
    from headrace.telemetry.report import hours_text

    return (
        user or printable(row.user) or "?", printable(row.account) or "-", str(row.jobs),
        hours_text(row.gpu_hours), hours_text(row.cpu_hours), _share(row.gpu_use),
        hours_text(row.lost_gpu_hours), _share(row.stall), _share(row.efficiency),
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
