"""How `headrace top --controller` shows a controller: its nodes, and what jobs use and may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from headrace.base.text import bytes_text, count_text
from headrace.cli.output import printable
from headrace.cli.top_view import many_text, name_text, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from headrace.insight.planes import FlowRow, PlaneRow, PlanesBoard

__all__ = ["view_planes"]

PLANES_SHOWN = 20
FLOWS_SHOWN = 20


def view_planes(board: PlanesBoard, width: int) -> RenderableType:
    """The controller's part of the screen.

    Args:
        board: what to show.
        width: columns.
    """
    silent = sum(plane.silent for plane in board.planes)
    title = Text("controller", "bold")
    title.append(
        f"   epoch {board.epoch}   policy {board.policy_version}   {many_text(len(board.planes), 'plane')}   "
        f"decided in {board.decide_s * 1e3:.1f} ms",
        "not bold",
    )
    if silent:
        title.append(f"   {silent} silent", "red")
    parts: list[RenderableType] = [title]
    if board.degraded:
        parts.append(Text(f"degraded: {printable(board.degraded)}", "red"))
    if board.planes:
        parts += [Text(), _planes(board.planes, width)]
    if board.flows:
        parts += [Text(), _flows(board.flows, width)]
    return Group(*parts)


def _planes(planes: Sequence[PlaneRow], width: int) -> Table:
    table = plain_table("NODE", "USER", "CLIENTS>", "STALLED>", "CAUSE", "HELD>", "LEASE>")
    for plane in planes[:PLANES_SHOWN]:
        lease = Text(f"{plane.lease_left_s:.0f} s", "red" if plane.silent else "")
        table.add_row(
            name_text(plane.name, width),
            printable(plane.user),
            str(plane.clients),
            Text(f"{plane.stalled:.2f}", "yellow" if plane.stalled > 0.1 else ""),
            plane.cause or "-",
            bytes_text(plane.held_bytes),
            lease,
        )
    _rest(table, len(planes) - PLANES_SHOWN)
    return table


def _flows(flows: Sequence[FlowRow], width: int) -> Table:
    table = plain_table("JOB", "FILE SYSTEM", "BYTES/S>", "MAY>", "READS/S>", "MAY>")
    for flow in flows[:FLOWS_SHOWN]:
        style = "yellow" if flow.limited else ""
        may_bytes, may_reads = flow.granted_bytes_per_s, flow.granted_reads_per_s
        table.add_row(
            name_text(flow.job, width),
            printable(flow.file_system),
            Text(f"{bytes_text(flow.bytes_per_s)}/s", style),
            "-" if may_bytes is None else f"{bytes_text(may_bytes)}/s",
            Text(count_text(round(flow.reads_per_s)), style),
            "-" if may_reads is None else count_text(round(may_reads)),
        )
    _rest(table, len(flows) - FLOWS_SHOWN)
    return table


def _rest(table: Table, hidden: int) -> None:
    if hidden > 0:
        table.add_row(Text(f"and {hidden} more", "dim"))
