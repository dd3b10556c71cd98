"""How `headrace cluster queue` looks: the whole in one line, then nodes, who runs, who waits, and the users.

GPUs are drawn by their real numbers: `0·2·` has 0 and 2 in use, 1 and 3 free. Nodes that are all free, or all
away, share a line. What does not fit is counted, never dropped in silence; narrow terminals get fewer columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headrace.base.text import count_text, printable
from headrace.cli.top_view import many_text
from headrace.cluster.hostlist import compress_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from headrace.cluster.queue_view import JobRow, NodeRow, QueueBoard, Totals, UserRow

__all__ = ["queue_view", "span_text"]

WIDE: Final = 110
MIDDLE: Final = 70
TIGHT: Final = 50
"""Columns from which on more is shown."""

_GAP: Final = 2
_LAST_MIN: Final = 8

_COLOURS: Final = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "bright_red",
    "bright_cyan",
    "bright_magenta",
)
"""Of users, in the order of their GPUs, again and again."""

_BAR_CELLS: Final = 10
_GPU_CELLS_MAX: Final = 16
_STALL_WARN, _STALL_BAD = 0.05, 0.25
_SOON_S: Final = 600


def queue_view(board: QueueBoard, width: int, rows: int | None) -> RenderableType:
    """The whole screen.

    Args:
        board: what to show.
        width: columns.
        rows: at most so many of nodes, of running and of waiting jobs each; None: all.
    """
    colours = {row.user: _COLOURS[i % len(_COLOURS)] for i, row in enumerate(board.users)}
    shown = _Shown(width, rows, colours)
    parts: list[RenderableType] = [shown.title(board), shown.gpus(board.totals)]
    if board.nodes:
        parts += [Text(), *shown.nodes(board.nodes)]
    if board.running:
        parts += [Text(), *shown.running(board.running)]
    if board.waiting:
        parts += [Text(), *shown.waiting(board.waiting)]
    if len(board.users) > 1:
        parts += [Text(), *shown.users(board.users)]
    if not board.running and not board.waiting:
        parts += [Text(), Text("no jobs", "dim")]
    return Group(*parts)


def span_text(seconds: float | None) -> str:
    """Time in the two largest units: "2d 3h", "4h 05m", "12m"; "-" where it is not known."""
    if seconds is None:
        return "-"
    minutes = max(0, round(seconds / 60))
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def _cut(text: str, room: int) -> str:
    text = printable(text)
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def _bar(share: float, cells: int, style: str) -> Text:
    full = round(max(0.0, min(1.0, share)) * cells)
    text = Text("█" * full, style)
    text.append("░" * (cells - full), "dim")
    return text


class _Rows:
    """A plain table whose last column takes what the others leave: those hold numbers, which are not cut.

    Columns whose names end in `>` are numbers; "" leaves a column out, and its cells.
    """

    def __init__(self, width: int, *columns: str) -> None:
        self.width = width
        self.columns = columns
        self.rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        """One row, a cell for each column, those that are left out too."""
        kept = [cell for cell, name in zip(cells, self.columns, strict=True) if name]
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in kept])

    def table(self) -> Table:
        """To be printed."""
        names = [name for name in self.columns if name]
        widths = [
            max([cell_len(name.rstrip(">")), *(row[i].cell_len for row in self.rows)])
            for i, name in enumerate(names)
        ]
        taken = sum(widths[:-1]) + _GAP * (len(names) - 1)
        widths[-1] = min(widths[-1], max(_LAST_MIN, self.width - taken))
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for name, width in zip(names, widths, strict=True):
            right = name.endswith(">")
            table.add_column(
                name.rstrip(">"),
                justify="right" if right else "left",
                no_wrap=True,
                overflow="ellipsis",
                width=width,
            )
        for row in self.rows:
            row[-1].truncate(widths[-1], overflow="ellipsis")
            table.add_row(*row)
        return table


class _Shown:
    """Draws for one width."""

    def __init__(self, width: int, rows: int | None, colours: dict[str, str]) -> None:
        self.width = width
        self.rows = rows
        self.colours = colours
        self.wide = width >= WIDE
        self.middle = width >= MIDDLE
        self.tight = width < TIGHT

    def only(self, *names: str, when: bool) -> tuple[str, ...]:
        """Columns that are there at some widths."""
        return tuple(name if when else "" for name in names)

    def user(self, name: str, room: int = 12) -> Text:
        """A name in its user's colour."""
        return Text(_cut(name, room), self.colours.get(name, ""))

    def title(self, board: QueueBoard) -> Text:
        totals = board.totals
        text = Text(printable(board.cluster) or "cluster", "bold")
        nodes = f"   {many_text(totals.nodes, 'node')}, {count_text(totals.nodes_free)} free"
        text.append(nodes, "not bold")
        if totals.nodes_away:
            text.append(f", {count_text(totals.nodes_away)} away", "not bold red")
        text.append(
            f"   {count_text(totals.running)} running, {count_text(totals.waiting)} waiting",
            "not bold",
        )
        return text

    def gpus(self, totals: Totals) -> Text:
        if not totals.gpus:
            text = Text("CPUs ").append_text(
                _bar(totals.cpus_used / max(1, totals.cpus), _BAR_CELLS, "blue")
            )
            return text.append(f" {count_text(totals.cpus_used)} of {count_text(totals.cpus)} used")
        cells = max(_BAR_CELLS, min(40, self.width - 60))
        text = Text("GPUs ").append_text(_bar(totals.gpus_used / totals.gpus, cells, "blue"))
        text.append(f" {count_text(totals.gpus_used)} of {count_text(totals.gpus)} used, ")
        text.append(f"{count_text(totals.gpus_free)} free", "green" if totals.gpus_free else "red")
        if totals.gpus_away:
            text.append(f", {count_text(totals.gpus_away)} away", "red")
        if totals.gpus_wanted:
            text.append(f", {count_text(totals.gpus_wanted)} waited for", "yellow")
        return text

    # -- nodes -------------------------------------------------------------------------------------

    def nodes(self, nodes: Sequence[NodeRow]) -> list[RenderableType]:
        busy = [row for row in nodes if row.jobs]
        alike: dict[tuple[object, ...], list[NodeRow]] = {}
        for row in nodes:
            if not row.jobs:
                node = row.node
                key = (node.states, node.gpu_type, node.gpus, node.cpus, row.holders, node.reason)
                alike.setdefault(key, []).append(row)
        bars = self.only("CPUS", "LOAD>", "MEMORY>", when=self.wide)
        table = _Rows(
            self.width,
            "NODE",
            "STATE",
            "GPUS",
            *bars,
            *self.only("CPUS>", when=self.middle and not self.wide),
            "JOBS",
        )
        listed = busy if self.rows is None else busy[: self.rows]
        for row in listed:
            self._node(table, row, [row.node.name])
        groups = sorted(alike.values(), key=lambda rows: (rows[0].away, -len(rows)))
        for rows in groups if self.rows is None else groups[: self.rows]:
            self._node(table, rows[0], [row.node.name for row in rows])
        parts: list[RenderableType] = [table.table()]
        left = busy[len(listed) :]
        if left:
            held = sum(len(row.holders) - row.holders.count("") for row in left)
            total = sum(row.node.gpus for row in left)
            parts.append(
                _more(
                    len(left), "node", f"{count_text(held)} of their {count_text(total)} GPUs used"
                )
            )
        if self.rows is not None and len(groups) > self.rows:
            rest = sum(len(rows) for rows in groups[self.rows :])
            parts.append(_more(rest, "node", "without jobs"))
        return parts

    def _node(self, table: _Rows, row: NodeRow, names: list[str]) -> None:
        node = row.node
        room = max(8, min(30, self.width // 5))
        state = "+".join(dict.fromkeys(node.states)) or "unknown"
        style = "red" if row.away else "green" if state == "idle" else ""
        table.add(
            _cut(compress_hosts(names), room),
            Text(_cut(state, 14 if self.middle else 9), style),
            self._gpus(row),
            _bar(node.cpus_allocated / max(1, node.cpus), 8, "blue").append(
                f" {node.cpus_allocated}/{node.cpus}"
            ),
            "-" if node.cpu_load is None else f"{node.cpu_load:.1f}",
            _memory(node.memory_allocated_mib, node.memory_mib),
            f"{node.cpus_allocated}/{node.cpus}",
            self._jobs(row, len(names)),
        )

    def _gpus(self, row: NodeRow) -> Text:
        """Each GPU by its number in its holder's colour; a dot where it is free, a cross where it is away."""
        if not row.node.gpus:
            return Text("-", "dim")
        users = {job.job_id: job.user for job in row.jobs}
        text = Text()
        if row.node.gpus > _GPU_CELLS_MAX:
            return Text(f"{len(row.holders) - row.holders.count('')}/{row.node.gpus}")
        for index, holder in enumerate(row.holders):
            if holder:
                text.append(
                    str(index % 10), "bold " + self.colours.get(users.get(holder, ""), "white")
                )
            else:
                text.append(
                    "\N{MULTIPLICATION SIGN}" if row.away else "·", "red" if row.away else "green"
                )
        if row.unplaced_gpus:
            text.append(f" +{row.unplaced_gpus}", "yellow")
        if self.middle and row.node.gpu_type:
            text.append(f" {_cut(row.node.gpu_type, 10)}", "dim")
        return text

    def _jobs(self, row: NodeRow, count: int) -> Text:
        if count > 1:
            return Text(
                f"{count_text(count)} nodes"
                + (f": {printable(row.node.reason)}" if row.node.reason else ""),
                "dim",
            )
        text = Text()
        for job in row.jobs[:6]:
            indices = next(
                (part.gpus for part in job.allocations if part.node == row.node.name), ()
            )
            text.append(printable(job.user), self.colours.get(job.user, ""))
            text.append(f" {job.job_id}" + (f"[{_ranges(indices)}]" if indices else "") + "  ")
        if len(row.jobs) > 6:
            text.append(f"+{len(row.jobs) - 6}", "dim")
        if row.node.reason:
            text.append(printable(row.node.reason), "red")
        text.rstrip()
        return text

    # -- jobs --------------------------------------------------------------------------------------

    def running(self, jobs: Sequence[JobRow]) -> list[RenderableType]:
        stalls = any(row.stall is not None for row in jobs)
        table = _Rows(
            self.width, "RUNNING", "USER", *self.only("NAME", when=self.middle), "GPUS>",
            *self.only("CPUS>", when=self.wide), *self.only("RAN>", when=not self.tight),
            *self.only("LEFT>", when=not (self.tight and stalls)),
            *self.only("STALL>", when=stalls), "NODES",
        )  # fmt: skip
        for row in jobs if self.rows is None else jobs[: self.rows]:
            job, ends = row.job, row.ends_in_s
            left = "no end" if job.limit_minutes is None else span_text(ends)
            table.add(
                _cut(job.job_id, 14), self.user(job.user), self._name(job.name), str(job.gpu_count),
                count_text(job.cpu_count), span_text(row.ran_s),
                Text(left, "yellow" if ends is not None and ends < _SOON_S else ""), _stall(row.stall),
                _where(row),
            )  # fmt: skip
        return self._with_rest(table, jobs, "job", "running")

    def waiting(self, jobs: Sequence[JobRow]) -> list[RenderableType]:
        table = _Rows(
            self.width, "WAITING", "USER", *self.only("NAME", when=self.middle), "GPUS>",
            *self.only("NODES>", when=self.wide), *self.only("WAITED>", when=self.middle), "STARTS>", "WHY",
        )  # fmt: skip
        for row in jobs if self.rows is None else jobs[: self.rows]:
            job = row.job
            table.add(
                _cut(job.job_id, 14), self.user(job.user), self._name(job.name), str(job.gpu_count),
                str(job.node_count), span_text(row.waited_s),
                "-" if row.starts_in_s is None else f"in {span_text(row.starts_in_s)}",
                Text(printable(row.why), "red" if "never" in row.why else ""),
            )  # fmt: skip
        return self._with_rest(table, jobs, "job", "waiting")

    def users(self, users: Sequence[UserRow]) -> list[RenderableType]:
        table = _Rows(
            self.width, "USER", "GPUS>", *self.only("CPUS>", "RUNNING>", when=not self.tight), "WAITING>",
            "FOR GPUS>",
        )  # fmt: skip
        for row in users if self.rows is None else users[: self.rows]:
            table.add(
                self.user(row.user, 20), count_text(row.gpus), count_text(row.cpus), count_text(row.running),
                count_text(row.waiting), count_text(row.gpus_wanted),
            )  # fmt: skip
        return self._with_rest(table, users, "user", "")

    def _name(self, name: str) -> str:
        return _cut(name, max(10, self.width // 6))

    def _with_rest(
        self, table: _Rows, rows: Sequence[object], what: str, how: str
    ) -> list[RenderableType]:
        if self.rows is None or len(rows) <= self.rows:
            return [table.table()]
        return [table.table(), _more(len(rows) - self.rows, what, how)]


def _more(count: int, what: str, how: str) -> Text:
    name = what if count == 1 else f"{what}s"
    return Text(
        f"… {count_text(count)} more {name}{', ' + how if how else ''} (--all, --user, --node)",
        "dim",
    )


def _stall(share: float | None) -> Text:
    if share is None:
        return Text("-", "dim")
    return Text(
        f"{share:.0%}",
        "red" if share > _STALL_BAD else "yellow" if share > _STALL_WARN else "green",
    )


def _memory(used_mib: int, total_mib: int) -> str:
    return f"{used_mib / 1024:.0f}/{total_mib / 1024:.0f} G"


def _ranges(indices: Sequence[int]) -> str:
    return compress_hosts(str(i) for i in indices).strip("[]")


def _where(row: JobRow) -> str:
    """`gpu0[0,2] gpu1[0-3]` where the numbers are known and few; else the nodes in short."""
    indices = row.gpu_indices
    if indices and len(row.job.nodes) <= 4:
        return " ".join(
            printable(name) + (f"[{_ranges(indices[name])}]" if name in indices else "")
            for name in row.job.nodes
        )
    return printable(compress_hosts(row.job.nodes))
