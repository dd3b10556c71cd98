"""`headrace top`: a live view of node daemon and controller: who starves and why, where bytes come from.

The answer first, then jobs, then data sets, then the controller's nodes; more columns on wider terminals.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text
from typer import Option

from headrace.base.text import bytes_text, count_text, counted, duration_text, printable
from headrace.cli import exit_codes
from headrace.cli.options import JsonOutput, controller_options
from headrace.cli.printing import cut, plain_table, stall_style, watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from headrace.control.client import Endpoint
    from headrace.insight.top import Row

WIDE: Final = 110
"""Columns from which on more is shown."""

_SPARKS: Final = " ▁▂▃▄▅▆▇█"
_SPARK_NARROW, _SPARK_WIDE = 9, 24
_NAME_MIN, _NAME_MAX = 12, 40
_NUMBERS_WIDTH: Final = 55
"""What the other columns of a narrow table take."""

_TIER_STYLES: Final = {
    "ram": "green", "page_cache": "cyan", "disk": "blue", "peer": "magenta", "source": "yellow",
}  # fmt: skip


def view(board: Row, width: int) -> RenderableType:
    """The whole screen, of a daemon's board."""
    worst = max((job["stall"] or 0.0 for job in board["jobs"]), default=0.0)
    answer = Text(printable(board["answer"]), stall_style(worst) or "green")
    parts: list[RenderableType] = [_board_title(board), answer]
    if board["jobs"]:
        parts += [Text(), _jobs(board["jobs"], width)]
    if board["datasets"]:
        parts += [Text(), _datasets(board["datasets"], width)]
    if sum(board["tiers"].values()) > 0:
        parts += [Text(), _tiers(board["tiers"], width)]
    return Group(*parts)


def _board_title(board: Row) -> Text:
    clients, jobs = counted(board["clients"], "client"), counted(len(board["jobs"]), "job")
    held = f"{bytes_text(board['held_bytes'])} of {bytes_text(board['ram_bytes'])} held"
    text = Text("headrace top", "bold")
    text.append(
        f"   up {duration_text(board['uptime_s'])}   {clients}, {jobs}   {held}", "not bold"
    )
    refused, errors = board["refused"], board["protocol_errors"]
    if refused or errors:
        text.append(f"   {refused} refused, {errors} broke the protocol", "red")
    return text


def _name(name: str, width: int) -> str:
    """Cut, so that numbers need not be."""
    return cut(name, max(_NAME_MIN, min(_NAME_MAX, width - _NUMBERS_WIDTH)))


def _jobs(jobs: Sequence[Row], width: int) -> Table:
    wide = width >= WIDE
    more = ("CLIENTS>", "LEASES>", "WAITING>", "DIRECT/S>", "WINDOW>") if wide else ()
    table = plain_table("JOB", "SAMPLES/S>", "BYTES/S>", "STALL>", "CAUSE", "RAM>", *more, "RATE")
    for job in jobs:
        stall, ram = job["stall"], job["ram"]
        style = stall_style(stall or 0.0)
        extra = (
            str(job["clients"]), str(job["leases"]), str(job["waiting"]),
            f"{job['direct'] + job['busy']:.1f}",
            f"{job['held_bytes'] / max(1, job['window_bytes']):.0%}",
        )  # fmt: skip
        table.add_row(
            _name(job["name"], width), count_text(round(job["samples_per_s"])),
            bytes_text(job["bytes_per_s"]) + "/s",
            Text("-", "dim") if stall is None else Text(f"{stall:.0%}", style),
            Text(job["cause"] or "-", style or "dim"), "-" if ram is None else f"{ram:.0%}",
            *(extra if wide else ()),
            Text(sparkline(job["rates"], _SPARK_WIDE if wide else _SPARK_NARROW), "green"),
        )  # fmt: skip
    return table


def _datasets(datasets: Sequence[Row], width: int) -> Table:
    wide = width >= WIDE
    more = ("QUOTA>", "CACHED>", "CLIENTS>") if wide else ()
    table = plain_table(
        "DATA SET", "BYTES/S>", "HELD>", "", *more, "READ IN>", "99 %>", "IN FLIGHT>"
    )
    for data in datasets:
        samples, cached = max(1, data["samples"]), data["cached_samples"]
        extra = (
            bytes_text(data["quota_bytes"]), "-" if cached is None else f"{cached / samples:.0%}",
            str(data["clients"]),
        )  # fmt: skip
        table.add_row(
            _name(data["name"], width), bytes_text(data["bytes_per_s"]) + "/s",
            f"{data['held_samples'] / samples:.0%}", bytes_text(data["held_bytes"]),
            *(extra if wide else ()),
            _milliseconds(data["latency_s_p50"]), _milliseconds(data["latency_s_p99"]),
            f"{data['reads_in_flight']}/{data['reads_in_flight_max']}",
        )  # fmt: skip
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds else "-"


def _tiers(tiers: dict[str, float], width: int) -> Text:
    """One bar of where bytes came from, and its legend."""
    from headrace.plane.stage import TIER_WORDS

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
        text.append(f"{TIER_WORDS.get(tier, tier)} {rate / total:.0%} {bytes_text(rate)}/s   ")
    text.rstrip()
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as little bars, the tallest at the largest of them."""
    last = values[-width:]
    top = max(last, default=0.0)
    if top <= 0.0:
        return ""
    return "".join(_SPARKS[max(1, round(8 * value / top)) if value > 0 else 0] for value in last)


PLANES_SHOWN = 20
FLOWS_SHOWN = 20


def view_planes(board: Row, width: int) -> RenderableType:
    """The controller's part of the screen, of its board."""
    planes, flows = board["planes"], board["flows"]
    title = Text("controller", "bold")
    title.append(
        f"   epoch {board['epoch']}   policy {board['policy_version']}   "
        f"{counted(len(planes), 'plane')}   decided in {board['decide_s'] * 1e3:.1f} ms",
        "not bold",
    )
    if silent := sum(plane["silent"] for plane in planes):
        title.append(f"   {silent} silent", "red")
    parts: list[RenderableType] = [title]
    if board["degraded"]:
        parts.append(Text(f"degraded: {printable(board['degraded'])}", "red"))
    if planes:
        parts += [Text(), _planes(planes, width)]
    if flows:
        parts += [Text(), _flows(flows, width)]
    return Group(*parts)


def _planes(planes: Sequence[Row], width: int) -> Table:
    table = plain_table("NODE", "USER", "CLIENTS>", "STALLED>", "CAUSE", "HELD>", "LEASE>")
    for plane in planes[:PLANES_SHOWN]:
        stalled = plane["stalled"]
        table.add_row(
            _name(plane["name"], width), printable(plane["user"]), str(plane["clients"]),
            Text(f"{stalled:.2f}", "yellow" if stalled > 0.1 else ""), plane["cause"] or "-",
            bytes_text(plane["held_bytes"]),
            Text(f"{plane['lease_left_s']:.0f} s", "red" if plane["silent"] else ""),
        )  # fmt: skip
    _rest(table, len(planes) - PLANES_SHOWN)
    return table


def _flows(flows: Sequence[Row], width: int) -> Table:
    table = plain_table("JOB", "FILE SYSTEM", "BYTES/S>", "MAY>", "READS/S>", "MAY>")
    for flow in flows[:FLOWS_SHOWN]:
        style = "yellow" if flow["limited"] else ""
        may_bytes, may_reads = flow["granted_bytes_per_s"], flow["granted_reads_per_s"]
        table.add_row(
            _name(flow["job"], width), printable(flow["file_system"]),
            Text(f"{bytes_text(flow['bytes_per_s'])}/s", style),
            "-" if may_bytes is None else f"{bytes_text(may_bytes)}/s",
            Text(count_text(round(flow["reads_per_s"])), style),
            "-" if may_reads is None else count_text(round(may_reads)),
        )  # fmt: skip
    _rest(table, len(flows) - FLOWS_SHOWN)
    return table


def _rest(table: Table, hidden: int) -> None:
    if hidden > 0:
        table.add_row(Text(f"and {hidden} more", "dim"))


_CONTROLLER = controller_options(
    "Show its planes too: unix:PATH, http(s)://HOST:PORT, or `own`.", "--token-file", "--tls-ca"
)


def top(
    *,
    once: bool = Option(False, "--once", help="Look for one interval, print, end."),
    interval: float = Option(2.0, help="Seconds between looks.", metavar="SECONDS"),
    controller: Annotated[Any, _CONTROLLER],
    output: JsonOutput,
) -> int:
    """Show live who starves and why, and where bytes come from. Ctrl-C ends it."""
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"--interval is {interval:g}, expected 0.1 to 3600 seconds")
    try:
        observer = _Observer(controller)
        if not observer.look():
            output.result(observer.document(), f"no node daemon runs in {observer.nobody}")
            return exit_codes.FINDING
        if once or output.as_json:
            time.sleep(interval)
            observer.look()
            if output.as_json:
                output.document(observer.document())
            else:
                console = output.console()
                console.print(observer.view(console.width))
        else:
            shown = observer.view(output.console().width)
            watch(output, shown, lambda width: _frame(observer, width), interval)
    except KeyboardInterrupt:
        if once or output.as_json:
            raise
    return exit_codes.OK


class _Observer:
    """Looks at the daemon of this user, else at one of a `headrace launch` on this node, and at a controller.

    Keeps what they said last.
    """

    board: Row | None = None
    planes: Row | None = None
    _launched: Sequence[Path] = ()

    def __init__(self, controller: Endpoint | None) -> None:
        from headrace.control.client import Client
        from headrace.insight.top import DaemonWatch, PlanesWatch
        from headrace.runtime import runtime_folder

        self.folder = runtime_folder()
        self.nobody = (
            f"{self.folder.path}. Start one: headrace node start; "
            "loaders that read through it are shown (HEADRACE_PLANE=node)"
        )
        self._watches = defaultdict[Path, DaemonWatch](DaemonWatch)
        self._planes = PlanesWatch()
        self._client = None if controller is None else Client(controller)

    def look(self) -> bool:
        """See what is there now; False: nothing.

        Raises:
            ControlError: the controller does not answer.
        """
        from headrace.cluster.launch.folders import daemon_folders, local_folder
        from headrace.errors import HeadraceError
        from headrace.node.daemon import ask_status
        from headrace.node.link import LinkLost
        from headrace.runtime import FOLDER_VARIABLE, RuntimeFolder, runtime_folder

        self.board = None
        is_named = FOLDER_VARIABLE in os.environ
        launched = [] if is_named else daemon_folders(local_folder(None, os.environ))
        for folder in (runtime_folder(), *map(RuntimeFolder, launched)):
            # A launch's folder may be another user's, or another version's: it is passed over.
            others = (HeadraceError,) if folder.path in launched else ()
            with contextlib.suppress(FileNotFoundError, LinkLost, *others):
                state = ask_status(folder)
                self.board = self._watches[folder.path].look(state, time.monotonic())
                self.folder = folder
                break
        self._launched = launched if self.folder.path in launched else []
        if self._client is not None:
            with contextlib.closing(self._client) as client:
                state = client.document("GET", "/v1/state")
            self.planes = self._planes.look(state, time.monotonic())
        return self.board is not None or self.planes is not None

    def view(self, width: int) -> RenderableType:
        nobody = f"still looking: no node daemon answers in {self.nobody}"
        shown = [Text(nobody, "red") if self.board is None else view(self.board, width)]
        for path in self._launched:
            hint = f"another launch's: HEADRACE_RUNTIME_DIR={shlex.quote(str(path))} headrace top"
            if path == self.folder.path:
                hint = "above: of a launch; what its ranks wait for otherwise: headrace starving --last 10m"
            shown.append(Text(hint, "dim"))
        if self.planes is not None:
            shown += [Text(), view_planes(self.planes, width)]
        return Group(*shown)

    def document(self) -> dict[str, Any]:
        if self.board is None:
            document: dict[str, Any] = {"running": False, "folder": str(self.folder.path)}
        else:
            document = {"running": True, **self.board}
        return document if self.planes is None else {**document, "controller": self.planes}


def _frame(observer: _Observer, width: int) -> RenderableType:
    """The screen; what does not answer now may come back."""
    from headrace.errors import ControlError

    try:
        observer.look()
    except ControlError as e:
        return Text(f"{e}; still looking.", "red")
    return observer.view(width)
