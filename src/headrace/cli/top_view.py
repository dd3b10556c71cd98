"""How `headrace top` looks: the answer first, then jobs, then data sets; more columns on wider terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from headrace.base.text import bytes_text, count_text, duration_text, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from headrace.insight.top import Board, DataRow, JobRow

__all__ = ["gone", "many_text", "name_text", "plain_table", "sparkline", "view"]

WIDE: Final = 110
"""Columns from which on more is shown."""

_SPARKS: Final = " ▁▂▃▄▅▆▇█"
_SPARK_NARROW, _SPARK_WIDE = 9, 24
_NAME_MIN, _NAME_MAX = 12, 40
_NUMBERS_WIDTH: Final = 55
"""What the other columns of a narrow table take."""

_STALL_WARN, _STALL_BAD = 0.05, 0.25
_TIER_STYLES: Final = {
    "ram": "green", "page_cache": "cyan", "disk": "blue", "peer": "magenta", "source": "yellow",
}  # fmt: skip


def view(board: Board, width: int) -> RenderableType:
    """The whole screen.

    Args:
        board: what to show.
        width: columns.
    """
    parts: list[RenderableType] = [_title(board), _answer(board)]
    if board.jobs:
        parts += [Text(), _jobs(board.jobs, width)]
    if board.datasets:
        parts += [Text(), _datasets(board.datasets, width)]
    if sum(board.tiers.values()) > 0:
        parts += [Text(), _tiers(board.tiers, width)]
    return Group(*parts)


def gone(folder: Path) -> RenderableType:
    """The screen while no daemon answers."""
    text = f"no node daemon answers in {folder}; still looking. Start one: headrace node start"
    return Text(text, "red")


def _title(board: Board) -> Text:
    jobs = len(board.jobs)
    held = f"{bytes_text(board.held_bytes)} of {bytes_text(board.ram_bytes)} held"
    text = Text("headrace top", "bold")
    text.append(
        f"   up {duration_text(board.uptime_s)}   "
        f"{many_text(board.clients, 'client')}, {many_text(jobs, 'job')}   {held}",
        "not bold",
    )
    if board.refused or board.protocol_errors:
        text.append(
            f"   {board.refused} refused, {board.protocol_errors} broke the protocol", "red"
        )
    return text


def many_text(count: int, what: str) -> str:
    """1 job, 2 jobs."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def name_text(name: str, width: int) -> str:
    """Cut, so that numbers need not be."""
    room = max(_NAME_MIN, min(_NAME_MAX, width - _NUMBERS_WIDTH))
    text = printable(name)
    return text if len(text) <= room else text[: room - 1] + "…"


def _answer(board: Board) -> Text:
    worst = max((job.stall or 0.0 for job in board.jobs), default=0.0)
    return Text(printable(board.answer), _stall_style(worst) or "green")


def _stall_style(stall: float) -> str:
    return "red" if stall > _STALL_BAD else "yellow" if stall > _STALL_WARN else ""


def plain_table(*columns: str) -> Table:
    """A plain table; columns whose names end in `>` are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        right = name.endswith(">")
        table.add_column(
            name.rstrip(">"),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _jobs(jobs: Sequence[JobRow], width: int) -> Table:
    wide = width >= WIDE
    more = ("CLIENTS>", "LEASES>", "WAITING>", "DIRECT/S>", "WINDOW>") if wide else ()
    table = plain_table("JOB", "SAMPLES/S>", "BYTES/S>", "STALL>", "CAUSE", "RAM>", *more, "RATE")
    for job in jobs:
        stall = job.stall
        shown = Text("-", "dim") if stall is None else Text(f"{stall:.0%}", _stall_style(stall))
        extra = (
            str(job.clients),
            str(job.leases),
            str(job.waiting),
            f"{job.direct + job.busy:.1f}",
            f"{job.held_bytes / max(1, job.window_bytes):.0%}",
        )
        table.add_row(
            name_text(job.name, width),
            count_text(round(job.samples_per_s)),
            bytes_text(job.bytes_per_s) + "/s",
            shown,
            Text(job.cause or "-", _stall_style(stall or 0.0) or "dim"),
            "-" if job.ram is None else f"{job.ram:.0%}",
            *(extra if wide else ()),
            Text(sparkline(job.rates, _SPARK_WIDE if wide else _SPARK_NARROW), "green"),
        )
    return table


def _datasets(datasets: Sequence[DataRow], width: int) -> Table:
    wide = width >= WIDE
    more = ("QUOTA>", "CACHED>", "CLIENTS>") if wide else ()
    table = plain_table(
        "DATA SET", "BYTES/S>", "HELD>", "", *more, "READ IN>", "99 %>", "IN FLIGHT>"
    )
    for data in datasets:
        share = data.held_samples / max(1, data.samples)
        cached = data.cached_samples
        extra = (
            bytes_text(data.quota_bytes),
            "-" if cached is None else f"{cached / max(1, data.samples):.0%}",
            str(data.clients),
        )
        table.add_row(
            name_text(data.name, width),
            bytes_text(data.bytes_per_s) + "/s",
            f"{share:.0%}",
            bytes_text(data.held_bytes),
            *(extra if wide else ()),
            _milliseconds(data.latency_s_p50),
            _milliseconds(data.latency_s_p99),
            f"{data.reads_in_flight}/{data.reads_in_flight_max}",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds else "-"


def _tiers(tiers: dict[str, float], width: int) -> Text:
    """One bar of where bytes came from, and its legend."""
    total = sum(tiers.values())
    shown = {tier: rate for tier, rate in tiers.items() if rate / total >= 0.005}
    room = min(width, 2 * WIDE) - 1
    text = Text()
    for tier, rate in shown.items():
        text.append("█" * max(1, round(room * rate / total)), _TIER_STYLES.get(tier, "white"))
    text.truncate(room)
    text.append("\n")
    for tier, rate in shown.items():
        text.append("■ ", _TIER_STYLES.get(tier, "white"))
        text.append(f"{tier} {rate / total:.0%} {bytes_text(rate)}/s   ")
    text.rstrip()
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as little bars, the tallest at the largest of them."""
    last = values[-width:]
    top = max(last, default=0.0)
    if top <= 0.0:
        return ""
    return "".join(_SPARKS[max(1, round(8 * value / top)) if value > 0 else 0] for value in last)
