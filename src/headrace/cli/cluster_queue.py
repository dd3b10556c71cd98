"""`headrace cluster queue`: who has which GPUs, who waits for what and until when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.cluster_options import From, Where
from headrace.cli.output import Json, Output

__all__ = ["queue"]

_ROWS = 20
Texts = list[str] | None


def queue(
    *,
    user: Annotated[
        Texts, typer.Option("--user", "-u", help="Only this user's jobs; `me`: mine.")
    ] = None,
    node: Annotated[
        Texts, typer.Option("--node", "-n", help="Only these nodes: gpu[01-04].")
    ] = None,
    partition: Annotated[
        Texts, typer.Option("--partition", "-p", help="Only this partition.")
    ] = None,
    watch: Annotated[
        float | None, typer.Option("--watch", "-w", help="Look again every so many seconds.")
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", help="At most so many lines of each kind.")
    ] = _ROWS,
    everything: Annotated[bool, typer.Option("--all", help="All lines.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Keep what was seen, for --from.")
    ] = None,
    executor: Where = None,
    source: From = None,
    as_json: Json = False,
) -> int:
    """Show nodes, who has which GPUs, who waits for what and until when. `0·2·`: GPUs 0 and 2 are in use."""
    from headrace.cli.cluster_queue_show import Selection, show_queue
    from headrace.cli.cluster_submit import cluster_snapshot

    if rows < 1:
        raise ValueError(f"--rows is {rows}, expected 1 or more")
    selection = Selection(user or (), node or (), partition or ())
    output = Output(as_json=as_json)
    return show_queue(
        output,
        selection,
        lambda: cluster_snapshot(executor, source, jobs=True),
        watch=watch,
        rows=None if everything else rows,
        save=save,
    )
