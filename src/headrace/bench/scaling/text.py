"""Text: the scaling table for a terminal or a log, columns as wide as they must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.scaling.table import Row, Table

__all__ = ["table_text"]

_HEAD = (
    "ranks", "nodes", "wall s", "samples/s", "training/s", "efficiency", "accuracy", "reads/s",
    "MB/s", "data", "compute", "save", "test", "other",
)  # fmt: skip
_FLAG = " !"


def table_text(table: Table) -> str:
    """The table, what its columns are, and the findings; ends with a line break."""
    body = [_cells(row) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(_HEAD, *body, strict=True)]
    lines = [_line(_HEAD, widths), *(_line(cells, widths) for cells in body)]
    lines += [
        "",
        f"samples/s: over the whole wall time. training/s: median of {table.epochs} epochs.",
        "efficiency: training/s for each rank, against the first row.",
        "data, compute, save, test, other: where the wall time went.",
    ]
    lines += [f"! {finding}" for finding in table.findings]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    if row.split is None or row.accuracy is None:
        return (str(row.ranks), str(row.nodes), f"{row.wall_s:.1f}", row.state, *["-"] * 10)
    split = row.split
    total = max(
        split.waiting_s + split.computing_s + split.saving_s + split.evaluating_s + split.other_s,
        1e-9,
    )
    parts = (split.waiting_s, split.computing_s, split.saving_s, split.evaluating_s, split.other_s)
    return (
        str(row.ranks),
        str(row.nodes),
        f"{row.wall_s:.1f}",
        _number(row.whole_per_s),
        _number(row.training_per_s),
        "-" if row.efficiency is None else f"{row.efficiency:.1%}",
        f"{row.accuracy:.2%}" + (_FLAG if row.accuracy_fell else " " * len(_FLAG)),
        _number(row.reads_per_s),
        "-" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e6:.1f}",
        *(f"{part / total:.0%}" for part in parts),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
