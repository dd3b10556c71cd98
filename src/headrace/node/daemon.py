"""The daemon as a process: its options, started in the foreground or the background, asked, ended.

What ends it: `stop`, SIGTERM, SIGINT. A second one does not start where one rules. One that does not
answer is killed only on request, and only the process that holds the lock. Its metrics are made from its
report, which the loop makes.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace import __version__
from headrace.base.lifetime import Latch
from headrace.base.peers import address_of
from headrace.config import ReaderOptions, TierOptions
from headrace.control.prometheus import OTHER, Figures, Metric, serve_metrics
from headrace.machine.host import available_memory, raise_descriptor_limit
from headrace.node.link import Link, LinkLost
from headrace.node.server import Server
from headrace.node.wire import DaemonReport, StatusAsked
from headrace.plane.tiers import memory_quota
from headrace.runtime import end, end_signals, launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    window_bytes: int = 1 << 30
    """Batches that one client may hold or be read for, beyond samples that are kept."""

    job_window_bytes: int = 2 << 30  # the same for all clients of one job
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

    before = {number: signal.signal(number, end) for number in end_signals()}
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


# Each row: the figure's name in the daemon's report ('' where it is added by itself), that of the metric after
# `headrace_`, and what it is.
_NODE: Final = (
    ("", "node_clients", "Connections now: processes that read, and tools."),
    ("sessions_made", "node_clients_total", "Connections so far."),
    ("refused", "node_refused_total", "Connections that were refused."),
    ("protocol_errors", "node_protocol_errors_total", "Clients that broke the protocol."),
    ("ram_bytes", "node_ram_quota_bytes", "Memory for samples, of all data sets."),
    ("held_bytes", "node_ram_held_bytes", "Memory of samples that are held."),
)
_CONTROLLER: Final = (
    ("registered", "controller_registered",
     "1: a controller knows this daemon; 0: it does not answer. Nothing without one."),
    ("reports", "controller_reports_total", "Reports that it answered."),
    ("failures", "controller_failures_total", "Times that it did not."),
    ("lapses", "controller_lapses_total", "Leases that ran out."),
    ("lease_left_s", "controller_lease_left_seconds", "How long the lease runs still."),
    ("epoch", "controller_epoch", "Epoch of the controller that gave it."),
    ("waiting", "controller_waiting_clients", "Clients held back by limits now."),
)  # fmt: skip
_READS: Final = (
    ("in_flight", "reads_in_flight", "Reads in flight now."),
    ("in_flight_max", "reads_in_flight_max", "How many may be in flight."),
    ("buffer_bytes", "dataset_buffer_bytes", "Bytes that clients may have asked for and not taken."),
)  # fmt: skip
_DATA: Final = (
    ("delivered_bytes", "delivered_bytes_total", "Bytes delivered to clients."),
    ("delivered_samples", "delivered_samples_total", "Samples delivered to clients."),
    ("delivered_batches", "delivered_batches_total", "Batches delivered to clients."),
    ("shared_batches", "shared_batches_total", "Batches that somebody else was reading already."),
    ("postponed_batches", "postponed_batches_total",
     "Batches that waited for samples that somebody else was reading."),
    ("failed_batches", "failed_batches_total", "Batches that could not be read."),
    ("samples", "dataset_samples", "Samples of the data set."),
    ("held_samples", "dataset_held_samples", "Samples that are held in memory."),
    ("held_bytes", "dataset_held_bytes", "Memory that they take."),
    ("quota_bytes", "dataset_quota_bytes", "Memory that they may take."),
)  # fmt: skip
_REMOTE: Final = (
    ("requests", "remote_requests_total", "Requests to the object store."),
    ("retries", "remote_retries_total", "Of these, repeated after a fault."),
    ("hedges", "remote_hedges_total", "Of these, sent a second time because the first was slow."),
    ("hedges_won", "remote_hedges_won_total", "Of these, answered before the first."),
    ("failures", "remote_failures_total", "Reads of the object store that were given up."),
)
_DATA_ALONE: Final = (
    ("", "dataset_cached_samples", "Samples cached on the local disk."),
    ("", "dataset_clients", "Clients that have it open."),
)
_JOBS: Final = (
    ("worked_s", "work_seconds_total", "Time that training steps worked."),
    ("consumed_samples", "job_samples_total", "Samples delivered to training steps."),
    ("consumed_batches", "job_batches_total", "Batches delivered to training steps."),
    ("consumed_bytes", "job_bytes_total", "Bytes delivered to training steps."),
    ("bytes", "job_node_bytes_total", "Bytes that the daemon delivered."),
    ("ram_bytes", "job_ram_bytes_total", "Of these, bytes that were in its memory."),
    ("direct_batches", "job_direct_batches_total", "Batches that clients read by themselves."),
    ("busy", "job_busy_batches_total", "Batches refused for want of room in a window."),
    ("failed", "job_failed_batches_total", "Batches that could not be read."),
)
_WORKING_JOBS: Final = (
    ("sessions", "job_clients", "Connections of the job."),
    ("leases", "job_leases", "Batches that its clients have."),
    ("leased_samples", "buffer_samples", "Samples that its clients have: ready, or in use."),
    ("held_bytes", "job_held_bytes", "Memory of these, and of what is being read."),
    ("window_bytes", "job_window_bytes", "Memory that these may take."),
    ("waiting", "job_waiting_batches", "Batches that wait for room in a window."),
)
_Rows = tuple[tuple[str, str, str], ...]


def _metrics(labels: tuple[str, ...], *tables: _Rows) -> tuple[Metric, ...]:
    return tuple(
        Metric(f"headrace_{name}", "counter" if name.endswith("_total") else "gauge", labels, text)
        for table in tables
        for _, name, text in table
    )


TABLE: Final = (
    Metric("headrace_build_info", "gauge", ("version",), "Always 1; says which headrace this is."),
    *_metrics((), _NODE, _CONTROLLER),
    Metric("headrace_read_bytes_total", "counter", ("dataset", "tier"),
           "Bytes read, by where they came from: ram, page_cache, disk or source."),
    Metric("headrace_read_seconds", "histogram", ("dataset",), "How long each read of the source took."),
    *_metrics(("dataset",), _READS, _DATA, _REMOTE, _DATA_ALONE),
    Metric("headrace_stall_seconds_total", "counter", ("job_name", "cause"),
           "Time that training steps waited for data, by cause."),
    *_metrics(("job_name",), _JOBS, _WORKING_JOBS),
)  # fmt: skip
"""All that the daemon tells; docs/howto/metrics.md lists it too."""


def figures_of(state: Mapping[str, Any]) -> Figures:
    """The figures of a daemon, from what `Server.describe` says."""
    figures = Figures(TABLE)
    figures.add("headrace_build_info", 1, version=__version__)
    figures.add("headrace_node_clients", len(state["sessions"]))
    _add(figures, _NODE, state)
    _add(figures, _CONTROLLER, state["governed"])
    for data in state["datasets"]:
        label, reads, cache = data["name"], data["reads"], data["cache"]
        for tier, count in data["bytes_by_tier"].items():
            figures.add("headrace_read_bytes_total", count, dataset=label, tier=tier)
        figures.add_latencies(
            "headrace_read_seconds", reads["latency_us"], reads["seconds"], dataset=label
        )
        for rows, report in ((_DATA, data), (_READS, reads), (_REMOTE, data["remote"])):
            _add(figures, rows, report, dataset=label)
        figures.add("headrace_dataset_clients", sum(data["jobs"].values()), dataset=label)
        if cache is not None:
            figures.add("headrace_dataset_cached_samples", cache["samples"], dataset=label)
    for label, totals in state["labels"].items():
        _add(figures, _JOBS, totals, job_name=label)
        for cause, seconds in totals["stall_s"].items():
            figures.add("headrace_stall_seconds_total", seconds, job_name=label, cause=cause)
    for job in state["jobs"]:
        if job["totals"] is not None:
            label = job["name"] if job["name"] in state["labels"] else OTHER
            _add(figures, _WORKING_JOBS, job, job_name=label)
    return figures


def _add(figures: Figures, rows: _Rows, report: Mapping[str, Any] | None, **labels: str) -> None:
    """Add what a report has; None: there is none."""
    for key, name, _ in rows:
        if key and report is not None:
            figures.add(f"headrace_{name}", report[key], **labels)
