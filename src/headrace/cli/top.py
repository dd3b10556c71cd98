"""`headrace top`: a live view of node daemon and controller: who starves and why, where bytes come from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import exit_codes
from headrace.cli.interrupt import interrupt
from headrace.cli.output import Json, Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headrace.insight.planes import PlanesBoard
    from headrace.insight.top import Board

__all__ = ["top"]


def top(
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Look for one interval, print, end.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.")] = 2.0,
    controller: Annotated[
        str | None,
        typer.Option(help="Show its planes too: unix:PATH, http(s)://HOST:PORT, or `own`."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="Holds the token for it.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Authority of its certificate.")] = None,
    as_json: Json = False,
) -> int:
    """Show live who starves and why, and where bytes come from. Ctrl-C ends it."""
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval is {interval:g}, expected 0.1 to 3600 seconds")
    output = Output(as_json=as_json)
    try:
        eyes = _Eyes(controller, token_file, tls_ca)
        first = eyes.look()
        if first is None:
            return _nobody(output, eyes)
        if once or as_json:
            time.sleep(interval)
            _print(output, eyes.look() or first)
        elif sys.stdout.isatty():
            _live(output, eyes, interval, first)
        else:
            _frames(output, eyes, interval)
    except KeyboardInterrupt:
        if once or as_json:
            raise
    return exit_codes.OK


class _Seen:
    """What was seen at a look."""

    def __init__(self, board: Board | None, planes: PlanesBoard | None, folder: Path) -> None:
        self.board = board
        self.planes = planes
        self._folder = folder

    def view(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from headrace.cli.top_view import gone, view
        from headrace.cli.top_view_planes import view_planes

        shown = [gone(self._folder) if self.board is None else view(self.board, width)]
        if self.planes is not None:
            shown += [Text(), view_planes(self.planes, width)]
        return Group(*shown)

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"running": False, "folder": str(self._folder)}
        if self.board is not None:
            found = {"running": True, **self.board.as_dict()}
        if self.planes is not None:
            found["controller"] = self.planes.as_dict()
        return found


class _Eyes:
    """Look at the daemon of this user and, if one is named, at a controller."""

    def __init__(self, controller: str | None, token_file: Path | None, ca: Path | None) -> None:
        from headrace.insight.top import Watch
        from headrace.runtime import runtime_folder

        self.folder = runtime_folder()
        self._watch = Watch()
        self._client = None
        if controller is not None:
            from headrace.control.client import Client, Endpoint
            from headrace.insight.planes import PlanesWatch

            self._client = Client(Endpoint(url=controller, token_file=token_file, ca=ca))
            self._planes = PlanesWatch()

    def look(self) -> _Seen | None:
        """What is there now; None: nothing.

        Raises:
            ControlError: the controller does not answer.
        """
        from headrace.node.daemon import ask_status
        from headrace.node.link import LinkLost

        board = None
        try:
            board = self._watch.look(ask_status(self.folder), time.monotonic())
        except (FileNotFoundError, LinkLost):
            if self._client is None:
                return None
        planes = None if self._client is None else self._look_at_planes()
        return _Seen(board, planes, self.folder.path)

    def _look_at_planes(self) -> PlanesBoard:
        from headrace.errors import ControlError

        assert self._client is not None
        try:
            state = self._client.document("GET", "/v1/state")
        except FileNotFoundError as e:
            url = self._client.endpoint.url
            raise ControlError(
                f"{url}: no controller listens.", path=url,
                next_step="Start it: headrace control start.",
            ) from e  # fmt: skip
        return self._planes.look(state, time.monotonic())


def _nobody(output: Output, eyes: _Eyes) -> int:
    path = eyes.folder.path
    if output.as_json:
        output.document({"running": False, "folder": str(path)})
    else:
        output.line(f"no node daemon runs in {path}. Start one: headrace node start")
    return exit_codes.FINDING


def _live(output: Output, eyes: _Eyes, interval: float, first: _Seen) -> None:
    from rich.live import Live

    console = output.console()
    # A screen of its own: what was there before comes back at the end.
    shown = Live(first.view(console.width), console=console, screen=True, auto_refresh=False)
    with interrupt() as ended, shown as live:
        while not ended.wait(interval):
            live.update(_seen_or_why(eyes, console.width), refresh=True)


def _seen_or_why(eyes: _Eyes, width: int) -> RenderableType:
    """The screen; what cannot be seen now may come back."""
    from rich.text import Text

    from headrace.cli.top_view import gone
    from headrace.errors import ControlError

    try:
        seen = eyes.look()
    except ControlError as e:
        return Text(f"{e}; still looking.", "red")
    return gone(eyes.folder.path) if seen is None else seen.view(width)


def _frames(output: Output, eyes: _Eyes, interval: float) -> None:
    """Frame after frame, for logs."""
    console = output.console()
    with interrupt() as ended:
        while not ended.wait(interval):
            console.print(_seen_or_why(eyes, console.width))
            sys.stdout.flush()


def _print(output: Output, seen: _Seen) -> None:
    if output.as_json:
        output.document(seen.document())
    else:
        console = output.console()
        console.print(seen.view(console.width))
