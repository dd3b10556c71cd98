"""The node daemon's metrics: from its report, which the loop makes, to Prometheus's text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace import __version__
from headrace.control.prometheus import OTHER, Figures, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping

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
