"""The daemon as a process: its options, started in the foreground or the background, asked, ended.

What ends it: `stop`, SIGTERM, SIGINT. A second one does not start where one rules. One that does not
answer is killed only on request, and only the process that holds the lock.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.base.lifetime import Latch
from headrace.base.peers import address_of
from headrace.config import ReaderOptions, TierOptions
from headrace.control.prometheus import serve_metrics
from headrace.machine.host import available_memory
from headrace.node.files.copies import raise_descriptor_limit
from headrace.node.link import Link, LinkLost
from headrace.node.server import Server
from headrace.node.wire import DaemonReport, StatusAsked
from headrace.plane.tiers import memory_quota
from headrace.runtime import end, launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.control.client import Endpoint
    from headrace.control.prometheus import MetricsServer
    from headrace.runtime import RuntimeFolder


def automatic_ram_bytes() -> int:
    """Half of the memory that machine and cgroup have left, 2 GiB left alone."""
    return memory_quota("auto", far=True, data_bytes=1 << 60, available_bytes=available_memory())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What a daemon may take. None of it changes what is delivered.

    Raises ValueError if a value is out of bounds.
    """

    ram_bytes: int = field(default_factory=automatic_ram_bytes)
    """Memory for samples, of all data sets together."""

    job_ram_bytes: int | None = None
    """Memory for the data sets of one job. None: no limit of its own."""

    yielding: bool = True
    """Give memory for samples back when the machine or the cgroup runs short of it."""

    window_bytes: int = 256 << 20
    """Batches that one client may hold or be read for, beyond samples that are kept."""

    job_window_bytes: int = 1 << 30  # the same for all clients of one job
    sessions_max: int = 1024  # clients at a time
    controller: Endpoint | None = None
    """Who says what jobs may take from file systems; None: nobody."""
    metrics: str | None = None
    """Where Prometheus may ask: `[HOST:]PORT`, on loopback without a host. None: nowhere."""

    reader: ReaderOptions = field(default_factory=ReaderOptions)
    tiers: TierOptions = field(default_factory=TierOptions)
    """`cache_dir`, `bytes_per_s`, ...; `ram_bytes` is shared out by the daemon."""

    def __post_init__(self) -> None:
        bounds = {
            "ram_bytes": (0, 1 << 50),
            "job_ram_bytes": (0, 1 << 50),
            "window_bytes": (1 << 20, 1 << 40),
            "job_window_bytes": (1 << 20, 1 << 40),
            "sessions_max": (1, 65536),
        }
        if self.metrics is not None:
            address_of(self.metrics)
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")


def systemd_unit(program: str, arguments: list[str]) -> str:
    """A unit for `systemctl --user`."""
    command = shlex.join([program, "node", "start", "--foreground", *arguments])
    return f"""\
# ~/.config/systemd/user/headrace-node.service
# systemctl --user daemon-reload && systemctl --user enable --now headrace-node
[Unit]
Description=headrace node daemon

[Service]
ExecStart={command}
Restart=on-failure
KillSignal=SIGTERM
TimeoutStopSec=15
NoNewPrivileges=yes
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


_log = logging.getLogger("headrace.node")

STOP_S = 10.0


def run(folder: RuntimeFolder, options: NodeOptions) -> None:
    """Be the daemon, until it is stopped.

    Raises HeadraceError if metrics cannot be served, and NodeError if another one rules, or the
    folder is not safe.
    """
    server: Server | None = None
    ends = Latch()

    def end(*_: object) -> None:
        ends.set()
        if server is not None:
            server.stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    metrics = None
    raise_descriptor_limit()
    try:
        claim = folder.claim()
        try:
            server = Server(claim, options)
            metrics = _serve_metrics(server, options.metrics)
            if claim.stale_socket:
                _log.info("took over from a daemon that was killed")
            _log.info(
                "process %d serves %s with %d MiB",
                os.getpid(),
                folder.path,
                options.ram_bytes >> 20,
            )
            if not ends.is_set():
                server.run()
            _log.info("ends")
        finally:
            for number in before:  # another signal must not cut the cleaning up short
                signal.signal(number, signal.SIG_IGN)
            if metrics is not None:
                metrics.close()
            ended = server.close() if server is not None else True
            claim.release()
            if not ended:
                # A thread that comes back from native code while the interpreter ends would abort it.
                _log.warning("ends although a read has not returned")
                logging.shutdown()
                os._exit(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve_metrics(server: Server, address: str | None) -> MetricsServer | None:
    if address is None:
        return None
    from headrace.node.metrics import figures_of

    metrics = serve_metrics(address, server.call_soon, server.describe, figures_of)
    server.metrics = str(metrics.address)
    _log.info("serves metrics at http://%s/metrics", metrics.address)
    if not metrics.address.loopback:
        _log.warning("whoever reaches %s can read them: names of jobs too", metrics.address)
    return metrics


def start(folder: RuntimeFolder, arguments: Sequence[str]) -> dict[str, Any]:
    """Start a daemon in the background, and return its state when it serves.

    Raises NodeError if one runs already, or it did not come up; the message has the end of its log.
    """

    def ask() -> dict[str, Any]:
        try:
            return ask_status(folder)
        except LinkLost as e:
            raise ConnectionError(str(e)) from e

    return launch(folder, arguments, ask, {"HEADRACE_RUNTIME_DIR": str(folder.path)})


def ask_status(folder: RuntimeFolder) -> dict[str, Any]:
    """The daemon's state.

    Raises:
        FileNotFoundError: no daemon runs.
        LinkLost: it does not answer.
        NodeError: the folder is not safe, or the daemon is of another version.
    """
    link = Link(folder, "status")
    try:
        link.send(StatusAsked(link.new_ticket()))
        report: DaemonReport = link.wait(DaemonReport, STOP_S)
    finally:
        link.close()
    state: dict[str, Any] = json.loads(report.json)
    return state


def stop(folder: RuntimeFolder, *, force: bool = False) -> int:
    """End the daemon; returns its process id when it is gone.

    Raises:
        FileNotFoundError: no daemon runs.
        NodeError: it does not end in time; with `force` it is killed then.
    """
    return end(folder, "Kill it: headrace node stop --force.", force=force)
