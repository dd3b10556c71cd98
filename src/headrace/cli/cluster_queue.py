"""How a cluster's queue is shown: once, again and again, or as JSON; for `cluster queue` and `swqueue`.

The whole in one line, then nodes, who runs, who waits, and the users. GPUs are drawn by their real numbers:
`0·2·` has 0 and 2 in use, 1 and 3 free. Nodes that are all free, or all away, share a line. What does not
fit is counted, never dropped in silence; narrow terminals get fewer columns.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from headrace.base.peers import user_name
from headrace.base.text import count_text, counted, printable, times_text
from headrace.cli import exit_codes
from headrace.cli.printing import Output, cut, plain, plain_table, stall_style
from headrace.cli.printing import watch as watch_frames
from headrace.cluster.executor import JobState
from headrace.cluster.notation import compress_hosts, expand_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from headrace.cluster.executor import JobStatus
    from headrace.cluster.snapshot import (
        ClusterSnapshot,
        Node,
        NodeRow,
        QueueBoard,
        QueueJobRow,
        QueueTotals,
        UserRow,
    )


WIDE: Final = 110
MIDDLE: Final = 70
TIGHT: Final = 50
"""Columns from which on more is shown."""

_COLOURS: Final = (
    "cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta",
)  # fmt: skip
"""Of users, in the order of their GPUs, again and again."""

_BAR_CELLS: Final = 10
_GPU_CELLS_MAX: Final = 16
_SOON_S: Final = 600


def queue_view(board: QueueBoard, width: int, rows: int | None) -> RenderableType:
    """The whole screen."""
    colours = {row.user: _COLOURS[i % len(_COLOURS)] for i, row in enumerate(board.users)}
    screen = _Screen(width, rows, colours, gpus=bool(board.totals.gpus or board.totals.gpus_wanted))
    parts: list[RenderableType] = [screen.title(board), screen.gpus(board.totals)]
    if board.nodes:
        parts += [Text(), *screen.nodes(board.nodes)]
    if board.running:
        parts += [Text(), *screen.running(board.running)]
    if board.waiting:
        parts += [Text(), *screen.waiting(board.waiting)]
    if len(board.users) > 1:
        parts += [Text(), *screen.users(board.users)]
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


def _bar(share: float, cells: int, style: str) -> Text:
    full = round(max(0.0, min(1.0, share)) * cells)
    text = Text("█" * full, style)
    text.append("░" * (cells - full), "dim")
    return text


_Column = tuple[str, Callable[[Any], "str | Text"]]
"""The name of a column, with a `>` behind it for numbers, and the cell of a row."""


class _Screen:
    """Draws for one width, and so many rows of a kind (None: all); `gpus`: whether there are any."""

    def __init__(
        self, width: int, rows: int | None, colours: dict[str, str], *, gpus: bool
    ) -> None:
        self.width = width
        self.rows = rows
        self.colours = colours
        self.has_gpus = gpus
        self.wide = width >= WIDE
        self.middle = width >= MIDDLE
        self.tight = width < TIGHT

    def table(self, rows: Iterable[Any], *columns: _Column | None) -> Table:
        """Without the columns that are None; the last one takes what the others leave: numbers are not cut."""
        shown = [column for column in columns if column]
        table = plain_table(*(name for name, _ in shown))
        table.columns[-1].no_wrap = False
        for row in rows:
            *cells, last = (cell(row) for _, cell in shown)
            last = last if isinstance(last, Text) else Text(last)
            last.no_wrap, last.overflow = True, "ellipsis"
            table.add_row(*(c if isinstance(c, Text) else Text(c) for c in cells), last)
        return table

    def some(
        self, rows: Sequence[Any], what: str, how: str, *columns: _Column | None
    ) -> list[RenderableType]:
        """The table of as many as are shown, and how many are not."""
        parts: list[RenderableType] = [self.table(rows[: self.rows], *columns)]
        if self.rows is not None and len(rows) > self.rows:
            parts.append(_more(len(rows) - self.rows, what, how))
        return parts

    def user(self, name: str, room: int = 12) -> Text:
        """A name in its user's colour."""
        return Text(cut(name, room), self.colours.get(name, ""))

    def title(self, board: QueueBoard) -> Text:
        totals, free = board.totals, count_text(board.totals.nodes_free)
        away = f", {count_text(totals.nodes_away)} away" if totals.nodes_away else ""
        return Text.assemble(
            (printable(board.cluster) or "cluster", "bold"),
            f"   {counted(totals.nodes, 'node')}, {free} free", (away, "red"),
            f"   {count_text(totals.running)} running, {count_text(totals.waiting)} waiting",
        )  # fmt: skip

    def gpus(self, totals: QueueTotals) -> Text:
        if not self.has_gpus:
            bar = _bar(totals.cpus_used / max(1, totals.cpus), _BAR_CELLS, "blue")
            used = f" {count_text(totals.cpus_used)} of {count_text(totals.cpus)} used"
            return Text.assemble("CPUs ", bar, used)
        cells = max(_BAR_CELLS, min(40, self.width - 60))
        bar = _bar(totals.gpus_used / max(1, totals.gpus), cells, "blue")
        rest = (("away", totals.gpus_away, "red"), ("waited for", totals.gpus_wanted, "yellow"))
        return Text.assemble(
            "GPUs ", bar, f" {count_text(totals.gpus_used)} of {count_text(totals.gpus)} used, ",
            (f"{count_text(totals.gpus_free)} free", "green" if totals.gpus_free else "red"),
            *((f", {count_text(count)} {what}", style) for what, count, style in rest if count),
        )  # fmt: skip

    # -- nodes -------------------------------------------------------------------------------------

    def nodes(self, nodes: Sequence[NodeRow]) -> list[RenderableType]:
        """Those with jobs one by one; those without, where all is alike, in one line."""
        busy = [row for row in nodes if row.jobs]
        alike: dict[tuple[object, ...], list[NodeRow]] = {}
        for row in nodes:
            if not row.jobs:
                node = row.node
                key = (node.states, node.gpu_type, node.gpus, node.cpus, row.holders, node.reason)
                alike.setdefault(key, []).append(row)
        groups = sorted(alike.values(), key=lambda rows: (rows[0].away, -len(rows)))
        room, state_room = max(8, min(30, self.width // 5)), 14 if self.middle else 9
        wide, middle = self.wide, self.middle and not self.wide
        table = self.table(
            [*([row] for row in busy[: self.rows]), *groups[: self.rows]],
            ("NODE", lambda rows: cut(compress_hosts(row.node.name for row in rows), room)),
            ("STATE", lambda rows: _state(rows[0], state_room)),
            ("GPUS", lambda rows: self._gpus(rows[0])) if self.has_gpus else None,
            ("CPUS", lambda rows: _cpus(rows[0].node, bar=True)) if wide else None,
            (
                "LOAD>",
                lambda rows: "-" if (load := rows[0].node.cpu_load) is None else f"{load:.1f}",
            )
            if wide
            else None,
            ("MEMORY>", lambda rows: _memory(rows[0].node)) if wide else None,
            ("CPUS>", lambda rows: _cpus(rows[0].node, bar=False)) if middle else None,
            ("JOBS", lambda rows: self._jobs(rows[0], len(rows))),
        )
        parts: list[RenderableType] = [table]
        shown = len(nodes) if self.rows is None else self.rows
        if left := busy[shown:]:
            held, total = sum(row.gpus_held for row in left), sum(row.node.gpus for row in left)
            how = f"{count_text(held)} of their {count_text(total)} GPUs used"
            parts.append(_more(len(left), "node", how))
        if rest := sum(map(len, groups[shown:])):
            parts.append(_more(rest, "node", "without jobs"))
        return parts

    def _gpus(self, row: NodeRow) -> Text:
        """Each GPU by its number in its holder's colour; a dot where it is free, a cross where it is away."""
        if not row.node.gpus:
            return Text("-", "dim")
        users = {job.job_id: job.user for job in row.jobs}
        text = Text()
        if row.node.gpus > _GPU_CELLS_MAX:
            return Text(f"{row.gpus_held}/{row.node.gpus}")
        for index, holder in enumerate(row.holders):
            if holder:
                colour = self.colours.get(users.get(holder, ""), "white")
                text.append(str(index % 10), f"bold {colour}")
            elif row.away:
                text.append("\N{MULTIPLICATION SIGN}", "red")
            else:
                text.append("·", "green")
        if row.unplaced_gpus:
            text.append(f" +{row.unplaced_gpus}", "yellow")
        if self.middle and row.node.gpu_type:
            text.append(f" {cut(row.node.gpu_type, 10)}", "dim")
        return text

    def _jobs(self, row: NodeRow, count: int) -> Text:
        if count > 1:
            reason = f": {printable(row.node.reason)}" if row.node.reason else ""
            return Text(f"{count_text(count)} nodes{reason}", "dim")
        text = Text()
        for job in row.jobs[:6]:
            parts = [part.gpus for part in job.allocations if part.node == row.node.name]
            indices = f"[{_ranges(parts[0])}]" if parts and parts[0] else ""
            text.append(printable(job.user), self.colours.get(job.user, ""))
            text.append(f" {job.job_id}{indices}  ")
        if len(row.jobs) > 6:
            text.append(f"+{len(row.jobs) - 6}", "dim")
        if row.node.reason:
            text.append(printable(row.node.reason), "red")
        text.rstrip()
        return text

    # -- jobs --------------------------------------------------------------------------------------

    def _job(self, title: str) -> list[_Column | None]:
        """What stands first of each job."""
        room = max(10, self.width // 6)
        return [
            (title, lambda row: cut(row.job.job_id, 14)),
            ("USER", lambda row: self.user(row.job.user)),
            ("NAME", lambda row: cut(row.job.name, room)) if self.middle else None,
            ("GPUS>", lambda row: str(row.job.gpu_count)) if self.has_gpus else None,
        ]

    def running(self, jobs: Sequence[QueueJobRow]) -> list[RenderableType]:
        stalls = any(row.stall is not None for row in jobs)
        return self.some(
            jobs, "job", "running", *self._job("RUNNING"),
            ("CPUS>", lambda row: count_text(row.job.cpu_count)) if self.wide else None,
            None if self.tight else ("RAN>", lambda row: span_text(row.ran_s)),
            None if self.tight and stalls else ("LEFT>", _left),
            ("STALL>", lambda row: _stall(row.stall)) if stalls else None,
            ("NODES", _where),
        )  # fmt: skip

    def waiting(self, jobs: Sequence[QueueJobRow]) -> list[RenderableType]:
        return self.some(
            jobs, "job", "waiting", *self._job("WAITING"),
            ("NODES>", lambda row: str(row.job.node_count)) if self.wide else None,
            ("WAITED>", lambda row: span_text(row.waited_s)) if self.middle else None,
            ("STARTS>", lambda row: "-" if row.starts_in_s is None else f"in {span_text(row.starts_in_s)}"),
            ("WHY", lambda row: Text(printable(row.why), "red" if "never" in row.why else "")),
        )  # fmt: skip

    def users(self, users: Sequence[UserRow]) -> list[RenderableType]:
        return self.some(
            users, "user", "", ("USER", lambda row: self.user(row.user, 20)),
            ("GPUS>", lambda row: count_text(row.gpus)) if self.has_gpus else None,
            None if self.tight else ("CPUS>", lambda row: count_text(row.cpus)),
            None if self.tight else ("RUNNING>", lambda row: count_text(row.running)),
            ("WAITING>", lambda row: count_text(row.waiting)),
            ("FOR GPUS>", lambda row: count_text(row.gpus_wanted)) if self.has_gpus else None,
        )  # fmt: skip


def _state(row: NodeRow, room: int) -> Text:
    state = "+".join(dict.fromkeys(row.node.states)) or "unknown"
    return Text(cut(state, room), "red" if row.away else "green" if state == "idle" else "")


def _cpus(node: Node, *, bar: bool) -> Text:
    text = _bar(node.cpus_allocated / max(1, node.cpus), 8, "blue") if bar else Text()
    return text.append(f"{' ' if bar else ''}{node.cpus_allocated}/{node.cpus}")


def _left(row: QueueJobRow) -> Text:
    if row.job.state is not JobState.RUNNING:  # "completing": its nodes are not free yet
        return Text(row.job.state.lower(), "yellow")
    left_s = row.ends_in_s
    text = "no end" if row.job.limit_minutes is None else span_text(left_s)
    return Text(text, "yellow" if left_s is not None and left_s < _SOON_S else "")


def _more(count: int, what: str, how: str) -> Text:
    more = f"{count_text(count)} more {what if count == 1 else what + 's'}"
    return Text(f"… {more}{', ' + how if how else ''} (--all, --user, --node)", "dim")


def _stall(share: float | None) -> Text:
    if share is None:
        return Text("-", "dim")
    return Text(f"{share:.0%}", stall_style(share) or "green")


def _memory(node: Node) -> str:
    return f"{node.memory_allocated_mib / 1024:.0f}/{node.memory_mib / 1024:.0f} G"


def _ranges(indices: Sequence[int]) -> str:
    return compress_hosts(str(i) for i in indices).strip("[]")


def _where(row: QueueJobRow) -> str:
    """`gpu0[0,2] gpu1[0-3]` where the numbers are known and few; else the nodes in short."""
    indices = row.gpu_indices
    if indices and len(row.job.nodes) <= 4:
        return " ".join(
            printable(name) + (f"[{_ranges(indices[name])}]" if name in indices else "")
            for name in row.job.nodes
        )
    return printable(compress_hosts(row.job.nodes))


def status_table(
    statuses: Sequence[JobStatus], *, everything: bool = False, folders: bool = False
) -> Table:
    """Jobs one below the other; tasks of an array that are in the same state share a line.

    `folders`: with the folder of each, where one is another than this.
    """
    now_s, here = time.time(), Path.cwd() if folders else None
    folders = folders and any(s.folder not in {None, here} for s in statuses)
    alike: dict[tuple[str, ...], list[JobStatus]] = {}
    for status in statuses:
        number, _, task = status.job_id.partition("_")
        line = task if everything or not task.isdigit() else "a task"
        alike.setdefault((number, line, status.state, _why(status)), []).append(status)

    def ran(of_line: list[JobStatus]) -> str:
        times = ((s.started_s, s.ended_s or now_s) for s in of_line)
        spans = [ended_s - began_s for began_s, ended_s in times if began_s and began_s <= ended_s]
        ends = {min(spans): None, max(spans): None} if spans else ()
        texts = dict.fromkeys(f"{s:.0f}s" if s < 90 else span_text(s) for s in ends)
        return " to ".join(texts) or "-"

    def folder_of(status: JobStatus) -> Text:
        text = str(status.folder or "-")
        home = os.path.expanduser("~/")  # noqa: PTH111 - Path.home() raises where there is none
        text = f"~/{text.removeprefix(home)}" if text.startswith(home) else text
        return Text(
            "."
            if status.folder == here
            else printable(f"…{text[-29:]}" if len(text) > 30 else text)
        )

    of_folder = ("FOLDER",) if folders else ()
    table = plain_table("JOB", "NAME", *of_folder, "STATE", "RAN>", "NODES", "WHY")
    table.columns[-1].no_wrap = False  # it takes what the others leave
    for (number, _, state, _), row in alike.items():
        # What each task's launch says would set alike ones apart.
        same = [row[0].with_run()] if len(row) == 1 else row
        tasks = [status.job_id.partition("_")[2] for status in same]
        job = f"{number}_{compress_hosts(tasks)}" if len(same) > 1 else same[0].job_id
        nodes = compress_hosts(dict.fromkeys(node for s in same for node in s.nodes))
        table.add_row(
            *map(Text, (cut(job, 24), cut(same[0].name, 24))),
            *map(folder_of, same[: len(of_folder)]),
            *map(Text, (state.lower(), ran(same), cut(nodes, 40), printable(_why(same[0])))),
        )
    return table


def _why(status: JobStatus) -> str:
    again = f"restarted {times_text(status.restarts)}" if status.restarts else ""
    return ", ".join(filter(None, (status.why, again, status.resumed)))


ROWS = 20
"""Of nodes, running jobs and waiting jobs each, where nobody says otherwise."""

SECONDS_LEAST = 5.0
"""Between looks: every look asks the scheduler, and many people watch."""


def _board(
    snapshot: ClusterSnapshot, users: Sequence[str], nodes: Sequence[str], partitions: Sequence[str]
) -> QueueBoard:
    """The view. What is named and not there is an error: an empty screen would say that nothing runs."""
    from headrace.cluster.snapshot import queue_board
    from headrace.errors import TelemetryError
    from headrace.telemetry.history import history_place, stalls

    users = [name for text in users for name in text.split(",") if name]
    partitions = [name for text in partitions for name in text.split(",") if name]
    nodes = [name for text in nodes for name in expand_hosts(text)]
    known = {node.name for node in snapshot.nodes}
    if missing := [name for name in nodes if name not in known]:
        first = f"of {len(known)} nodes the first is {min(known, default='-')}"
        raise ValueError(f"there is no node {missing[0]}; {first}")
    names = [partition.name for partition in snapshot.partitions]
    if missing := [name for name in partitions if name not in names]:
        expected = ", ".join(sorted(names))
        raise ValueError(f"there is no partition {missing[0]}; expected {expected}")
    shares: dict[str, float] = {}
    with contextlib.suppress(TelemetryError):  # nobody measures it
        shares = {job: stall.share for job, stall in stalls(history_place()).items()}
    users = [user_name(os.geteuid()) if name == "me" else name for name in users]
    return queue_board(snapshot, users=users, nodes=nodes, partitions=partitions, stalls=shares)


def show_queue(
    output: Output,
    source: Callable[[], ClusterSnapshot],
    *,
    users: Sequence[str] = (),
    nodes: Sequence[str] = (),
    partitions: Sequence[str] = (),
    watch: float | None,
    rows: int | None,
    save: Path | None = None,
) -> int:
    """Look once, or again and again until Ctrl-C.

    Args:
        output: the command's.
        source: what looks at the cluster.
        users: only these; "me" is the caller.
        nodes: only these names and lists of names.
        partitions: only these.
        watch: seconds between looks; None: once.
        rows: at most so many of each kind.
        save: where to keep what was seen.
    """
    if watch is not None and not SECONDS_LEAST <= watch <= 86_400:
        raise ValueError(f"--watch is {watch:g}, expected {SECONDS_LEAST:g} to 86400 seconds")
    from headrace.errors import ClusterError

    def look() -> QueueBoard:
        snapshot = source()
        if save is not None:
            from headrace.cluster.snapshot import save_snapshot

            save_snapshot(snapshot, save)
        return _board(snapshot, users, nodes, partitions)

    def frame(width: int) -> RenderableType:
        try:
            return queue_view(look(), width, rows)
        except ClusterError as e:
            return Text(f"{e} Still looking.", "red")

    # A hundred thousand small objects are made and none is thrown away: to look for garbage doubles the time.
    gc.disable()
    if output.as_json:
        import msgspec

        # The standard library takes seconds to indent 50,000 jobs.
        text = msgspec.json.encode(_board_document(look()), enc_hook=plain)
        sys.stdout.write(msgspec.json.format(text, indent=2).decode() + "\n")
        return exit_codes.OK
    console = output.console()
    first = queue_view(look(), console.width, rows)
    if watch is None or not sys.stdout.isatty():
        console.print(first)
    if watch is not None:
        gc.enable()
        watch_frames(output, first, frame, watch)
    return exit_codes.OK


# -- JSON ---------------------------------------------------------------------------------------------


def _board_document(board: QueueBoard) -> dict[str, Any]:
    return {
        "cluster": board.cluster, "slurm": board.version, "taken_s": board.taken_s,
        "totals": board.totals._asdict(), "nodes": list(map(_node_document, board.nodes)),
        "running": list(map(_job_document, board.running)),
        "waiting": list(map(_job_document, board.waiting)),
        "users": [row._asdict() for row in board.users],
    }  # fmt: skip


def _node_document(row: NodeRow) -> dict[str, Any]:
    node = row.node
    return {
        "name": node.name, "states": node.states, "away": row.away, "reason": node.reason,
        "partitions": node.partitions, "gpu_type": node.gpu_type, "gpus": node.gpus, "gpus_free": row.gpus_free,
        "gpu_jobs": [holder or None for holder in row.holders], "cpus": node.cpus,
        "cpus_allocated": node.cpus_allocated, "cpu_load": node.cpu_load, "memory_mib": node.memory_mib,
        "memory_allocated_mib": node.memory_allocated_mib, "jobs": [job.job_id for job in row.jobs],
    }  # fmt: skip


def _job_document(row: QueueJobRow) -> dict[str, Any]:
    job = row.job
    return {
        "job": job.job_id, "name": job.name, "user": job.user, "account": job.account,
        "partition": job.partition, "state": str(job.state), "reason": job.reason, "why": row.why,
        "nodes": job.nodes, "node_count": job.node_count, "cpus": job.cpu_count, "gpus": job.gpu_count,
        "gpu_indices": row.gpu_indices, "waited_s": row.waited_s, "ran_s": row.ran_s,
        "starts_in_s": row.starts_in_s, "ends_in_s": row.ends_in_s, "limit_minutes": job.limit_minutes,
        "priority": job.priority, "stall": row.stall,
    }  # fmt: skip
