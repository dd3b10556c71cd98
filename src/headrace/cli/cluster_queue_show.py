"""Looking at a cluster's queue: once, again and again, or as JSON; for `cluster queue` and `swqueue`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli import exit_codes
from headrace.cli.interrupt import interrupt
from headrace.cli.printing import Output, plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from headrace.cluster.queue_view import JobRow, NodeRow, QueueBoard
    from headrace.cluster.snapshot import ClusterSnapshot

__all__ = ["ROWS", "Selection", "show_queue"]

ROWS = 20
"""Of nodes, running jobs and waiting jobs each, where nobody says otherwise."""

SECONDS_LEAST = 5.0
"""Between looks: every look asks the scheduler, and many people watch."""

Source = Callable[[], "ClusterSnapshot"]


class Selection:
    """Which users, nodes and partitions are shown.

    Args:
        users: names; "me" is the caller.
        nodes: names and lists of names.
        partitions: names.

    Raises:
        ValueError: no list of nodes.
    """

    def __init__(
        self, users: Sequence[str] = (), nodes: Sequence[str] = (), partitions: Sequence[str] = ()
    ) -> None:
        import getpass

        from headrace.cluster.hostlist import expand_hosts

        named = [name for text in users for name in text.split(",") if name]
        self.users = [getpass.getuser() if name == "me" else name for name in named]
        self.nodes = [name for text in nodes for name in expand_hosts(text)]
        self.partitions = [name for text in partitions for name in text.split(",") if name]

    def board(self, snapshot: ClusterSnapshot, stalls: Mapping[str, float] | None) -> QueueBoard:
        """The view. What is named and not there is an error: an empty screen would say that nothing runs.

        Raises:
            ValueError: there is no such node or partition.
        """
        from headrace.cluster.queue_view import queue_board

        known = {node.name for node in snapshot.nodes}
        if missing := [name for name in self.nodes if name not in known]:
            raise ValueError(
                f"there is no node {missing[0]}; of {len(known)} nodes the first is {min(known, default='-')}"
            )
        names = [partition.name for partition in snapshot.partitions]
        if missing := [name for name in self.partitions if name not in names]:
            raise ValueError(
                f"there is no partition {missing[0]}; expected {', '.join(sorted(names))}"
            )
        return queue_board(
            snapshot, users=self.users, nodes=self.nodes, partitions=self.partitions, stalls=stalls
        )


def show_queue(
    output: Output,
    selection: Selection,
    source: Source,
    *,
    watch: float | None,
    rows: int | None,
    save: Path | None = None,
) -> int:
    """Look once, or again and again until Ctrl-C.

    Args:
        output: where it is shown.
        selection: what of it.
        source: takes a snapshot.
        watch: seconds between looks; None: once.
        rows: at most so many of a kind; None: all.
        save: keep what was seen first.
    """
    if watch is not None and not SECONDS_LEAST <= watch <= 86_400:
        raise ValueError(f"--watch is {watch:g}, expected {SECONDS_LEAST:g} to 86400 seconds")
    # A hundred thousand small objects are made and none is thrown away: to look for garbage doubles the time.
    gc.disable()
    if watch is None or output.as_json:
        board = _look(selection, source, save)
        if output.as_json:
            _print_json(output, board)
        else:
            console = output.console()
            console.print(_drawn(board, console.width, rows))
        return exit_codes.OK
    gc.enable()
    _watch(output, selection, source, watch, rows)
    return exit_codes.OK


def _print_json(output: Output, board: QueueBoard) -> None:
    """As every command's JSON, but fast: the standard library takes seconds to indent 50,000 jobs."""
    try:
        import msgspec
    except ModuleNotFoundError:
        output.document(_document(board))
        return
    text = msgspec.json.encode(_document(board), enc_hook=plain)
    sys.stdout.write(msgspec.json.format(text, indent=2).decode() + "\n")


def _drawn(board: QueueBoard, width: int, rows: int | None) -> RenderableType:
    from headrace.cli.cluster_queue_view import queue_view

    return queue_view(board, width, rows)


def _look(selection: Selection, source: Source, save: Path | None = None) -> QueueBoard:
    snapshot = source()
    if save is not None:
        from headrace.cluster.snapshot_file import save_snapshot

        save_snapshot(snapshot, save)
    return selection.board(snapshot, _stalls())


def _stalls() -> Mapping[str, float] | None:
    """By job id, the share of time that a job waited for data; None where nobody measures it."""
    from headrace.errors import TelemetryError
    from headrace.telemetry.place import history_place
    from headrace.telemetry.stall import stalls

    try:
        return {job: stall.share for job, stall in stalls(history_place()).items()}
    except TelemetryError:
        return None


def _watch(
    output: Output, selection: Selection, source: Source, seconds: float, rows: int | None
) -> None:
    from rich.live import Live
    from rich.text import Text

    from headrace.errors import ClusterError

    console = output.console()

    def frame() -> RenderableType:
        try:
            return _drawn(_look(selection, source), console.width, rows)
        except ClusterError as e:
            return Text(f"{e} Still looking.", "red")

    first = _drawn(_look(selection, source), console.width, rows)
    with interrupt() as ended:
        if not sys.stdout.isatty():
            console.print(first)
            while not ended.wait(seconds):
                console.print(frame())
            return
        with Live(first, console=console, screen=True, auto_refresh=False) as live:
            while not ended.wait(seconds):
                live.update(frame(), refresh=True)


# -- JSON ---------------------------------------------------------------------------------------------


def _document(board: QueueBoard) -> dict[str, Any]:
    totals = board.totals
    return {
        "cluster": board.cluster,
        "slurm": board.version,
        "taken_s": board.taken_s,
        "totals": {name: getattr(totals, name) for name in totals.__slots__},
        "nodes": [_node(row) for row in board.nodes],
        "running": [_job(row) for row in board.running],
        "waiting": [_job(row) for row in board.waiting],
        "users": [{name: getattr(row, name) for name in row.__slots__} for row in board.users],
    }


def _node(row: NodeRow) -> dict[str, Any]:
    node = row.node
    return {
        "name": node.name, "states": node.states, "away": row.away, "reason": node.reason,
        "partitions": node.partitions, "gpu_type": node.gpu_type, "gpus": node.gpus, "gpus_free": row.gpus_free,
        "gpu_jobs": [holder or None for holder in row.holders], "cpus": node.cpus,
        "cpus_allocated": node.cpus_allocated, "cpu_load": node.cpu_load, "memory_mib": node.memory_mib,
        "memory_allocated_mib": node.memory_allocated_mib, "jobs": [job.job_id for job in row.jobs],
    }  # fmt: skip


def _job(row: JobRow) -> dict[str, Any]:
    job = row.job
    return {
        "job": job.job_id, "name": job.name, "user": job.user, "account": job.account,
        "partition": job.partition, "state": str(job.state), "reason": job.reason, "why": row.why,
        "nodes": job.nodes, "node_count": job.node_count, "cpus": job.cpu_count, "gpus": job.gpu_count,
        "gpu_indices": row.gpu_indices, "waited_s": row.waited_s, "ran_s": row.ran_s,
        "starts_in_s": row.starts_in_s, "ends_in_s": row.ends_in_s, "limit_minutes": job.limit_minutes,
        "priority": job.priority, "stall": row.stall,
    }  # fmt: skip
