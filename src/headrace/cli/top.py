"""`headrace top`: a live view of the node daemon: who starves and why, and where bytes come from."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import exit_codes
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from headrace.insight.top import Board, Watch
    from headrace.node.runtime import RuntimeFolder

__all__ = ["top"]


def top(
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Look for one interval, print, end.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.")] = 2.0,
    as_json: Json = False,
) -> int:
    """Show live who starves and why, and where bytes come from. Ctrl-C ends it."""
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval is {interval:g}, expected 0.1 to 3600 seconds")
    try:
        return _top(Output(as_json=as_json), interval, once=once or as_json)
    except KeyboardInterrupt:
        if once or as_json:
            raise
        return exit_codes.OK


def _top(output: Output, interval: float, *, once: bool) -> int:
    from headrace.insight.top import Watch
    from headrace.node.runtime import runtime_folder

    folder, watch = runtime_folder(), Watch()
    board = _look(folder, watch)
    if board is None:
        if output.as_json:
            output.document({"running": False, "folder": str(folder.path)})
        else:
            output.line(f"no node daemon runs in {folder.path}. Start one: headrace node start")
        return exit_codes.FINDING
    if once:
        time.sleep(interval)
        board = _look(folder, watch) or board
        if output.as_json:
            output.document({"running": True, **board.as_dict()})
        else:
            _print(output, board)
        return exit_codes.OK
    if sys.stdout.isatty():
        _live(output, folder, watch, interval, board)
    else:
        _lines(output, folder, watch, interval)
    return exit_codes.OK


def _look(folder: RuntimeFolder, watch: Watch) -> Board | None:
    """The board; None: no daemon answers."""
    from headrace.node.daemon import ask_status
    from headrace.node.link import LinkLost

    try:
        state = ask_status(folder)
    except (FileNotFoundError, LinkLost):
        return None
    return watch.look(state, time.monotonic())


def _live(
    output: Output, folder: RuntimeFolder, watch: Watch, interval: float, board: Board
) -> None:
    from rich.live import Live

    from headrace.cli.top_view import gone, view

    console = output.console()
    # A screen of its own: what was there before comes back at the end.
    with Live(view(board, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            found = _look(folder, watch)
            shown = gone(folder.path) if found is None else view(found, console.width)
            live.update(shown, refresh=True)


def _lines(output: Output, folder: RuntimeFolder, watch: Watch, interval: float) -> None:
    """Frame after frame, for logs."""
    while True:
        time.sleep(interval)
        board = _look(folder, watch)
        if board is None:
            output.line(f"no node daemon runs in {folder.path}")
        else:
            _print(output, board)
        sys.stdout.flush()


def _print(output: Output, board: Board) -> None:
    from headrace.cli.top_view import view

    console = output.console()
    console.print(view(board, console.width))
