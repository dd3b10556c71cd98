"""The node daemon's metrics: from its report, which the loop makes, to Prometheus's text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace import __version__
from headrace.control.prometheus import OTHER, Figures, Metric

if TYPE_CHECKING:
    from collections.abc import Mapping

_DATA: Final = ("dataset",)
_JOB: Final = ("job_name",)

_OF_NODE: Final = {
    "sessions_made": Metric("headrace_node_clients_total", "counter", (), "Connections so far."),
    "refused": Metric("headrace_node_refused_total", "counter", (), "Connections that were refused."),
    "protocol_errors": Metric("headrace_node_protocol_errors_total", "counter", (),
                              "Clients that broke the protocol."),
    "ram_bytes": Metric("headrace_node_ram_quota_bytes", "gauge", (),
                        "Memory for samples, of all data sets."),
    "held_bytes": Metric("headrace_node_ram_held_bytes", "gauge", (),
                         "Memory of samples that are held."),
}  # fmt: skip
"""Here and below: by the figure's name in the daemon's report."""

_OF_CONTROLLER: Final = {
    "registered": Metric("headrace_controller_registered", "gauge", (),
           "1: a controller knows this daemon; 0: it does not answer. Nothing without one."),
    "reports": Metric("headrace_controller_reports_total", "counter", (), "Reports that it answered."),
    "failures": Metric("headrace_controller_failures_total", "counter", (), "Times that it did not."),
    "lapses": Metric("headrace_controller_lapses_total", "counter", (), "Leases that ran out."),
    "lease_left_s": Metric("headrace_controller_lease_left_seconds", "gauge", (),
                           "How long the lease runs still."),
    "epoch": Metric("headrace_controller_epoch", "gauge", (), "Epoch of the controller that gave it."),
    "waiting": Metric("headrace_controller_waiting_clients", "gauge", (),
                      "Clients held back by limits now."),
}  # fmt: skip

_OF_DATA: Final = {
    "delivered_bytes": Metric("headrace_delivered_bytes_total", "counter", _DATA,
                              "Bytes delivered to clients."),
    "delivered_samples": Metric("headrace_delivered_samples_total", "counter", _DATA,
                                "Samples delivered to clients."),
    "delivered_batches": Metric("headrace_delivered_batches_total", "counter", _DATA,
                                "Batches delivered to clients."),
    "shared_batches": Metric("headrace_shared_batches_total", "counter", _DATA,
                             "Batches that somebody else was reading already."),
    "postponed_batches": Metric("headrace_postponed_batches_total", "counter", _DATA,
                                "Batches that waited for samples that somebody else was reading."),
    "failed_batches": Metric("headrace_failed_batches_total", "counter", _DATA,
                             "Batches that could not be read."),
    "samples": Metric("headrace_dataset_samples", "gauge", _DATA, "Samples of the data set."),
    "held_samples": Metric("headrace_dataset_held_samples", "gauge", _DATA,
                           "Samples that are held in memory."),
    "held_bytes": Metric("headrace_dataset_held_bytes", "gauge", _DATA, "Memory that they take."),
    "quota_bytes": Metric("headrace_dataset_quota_bytes", "gauge", _DATA,
                          "Memory that they may take."),
}  # fmt: skip

_OF_REMOTE: Final = {
    "requests": Metric("headrace_remote_requests_total", "counter", _DATA,
                       "Requests to the object store."),
    "retries": Metric("headrace_remote_retries_total", "counter", _DATA,
                      "Of these, repeated after a fault."),
    "hedges": Metric("headrace_remote_hedges_total", "counter", _DATA,
                     "Of these, sent a second time because the first was slow."),
    "hedges_won": Metric("headrace_remote_hedges_won_total", "counter", _DATA,
                         "Of these, answered before the first."),
    "failures": Metric("headrace_remote_failures_total", "counter", _DATA,
                       "Reads of the object store that were given up."),
}  # fmt: skip

_OF_JOBS: Final = {
    "worked_s": Metric("headrace_work_seconds_total", "counter", _JOB,
                       "Time that training steps worked."),
    "consumed_samples": Metric("headrace_job_samples_total", "counter", _JOB,
                               "Samples delivered to training steps."),
    "consumed_batches": Metric("headrace_job_batches_total", "counter", _JOB,
                               "Batches delivered to training steps."),
    "consumed_bytes": Metric("headrace_job_bytes_total", "counter", _JOB,
                             "Bytes delivered to training steps."),
    "bytes": Metric("headrace_job_node_bytes_total", "counter", _JOB,
                    "Bytes that the daemon delivered."),
    "ram_bytes": Metric("headrace_job_ram_bytes_total", "counter", _JOB,
                        "Of these, bytes that were in its memory."),
    "direct_batches": Metric("headrace_job_direct_batches_total", "counter", _JOB,
                             "Batches that clients read by themselves."),
    "busy": Metric("headrace_job_busy_batches_total", "counter", _JOB,
                   "Batches refused for want of room in a window."),
    "failed": Metric("headrace_job_failed_batches_total", "counter", _JOB,
                     "Batches that could not be read."),
}  # fmt: skip

_OF_WORKING_JOBS: Final = {
    "sessions": Metric("headrace_job_clients", "gauge", _JOB, "Connections of the job."),
    "leases": Metric("headrace_job_leases", "gauge", _JOB, "Batches that its clients have."),
    "leased_samples": Metric("headrace_buffer_samples", "gauge", _JOB,
                             "Samples that its clients have: ready, or in use."),
    "held_bytes": Metric("headrace_job_held_bytes", "gauge", _JOB,
                         "Memory of these, and of what is being read."),
    "window_bytes": Metric("headrace_job_window_bytes", "gauge", _JOB,
                           "Memory that these may take."),
    "waiting": Metric("headrace_job_waiting_batches", "gauge", _JOB,
                      "Batches that wait for room in a window."),
}  # fmt: skip

TABLE: Final = (
    Metric("headrace_build_info", "gauge", ("version",), "Always 1; says which headrace this is."),
    Metric("headrace_node_clients", "gauge", (), "Connections now: processes that read, and tools."),
    *_OF_NODE.values(),
    *_OF_CONTROLLER.values(),
    Metric("headrace_read_bytes_total", "counter", ("dataset", "tier"),
           "Bytes read, by where they came from: ram, page_cache, disk or source."),
    Metric("headrace_read_seconds", "histogram", _DATA, "How long each read of the source took."),
    Metric("headrace_reads_in_flight", "gauge", _DATA, "Reads in flight now."),
    Metric("headrace_reads_in_flight_max", "gauge", _DATA, "How many may be in flight."),
    Metric("headrace_dataset_buffer_bytes", "gauge", _DATA,
           "Bytes that clients may have asked for and not taken."),
    *_OF_DATA.values(),
    *_OF_REMOTE.values(),
    Metric("headrace_dataset_cached_samples", "gauge", _DATA, "Samples cached on the local disk."),
    Metric("headrace_dataset_clients", "gauge", _DATA, "Clients that have it open."),
    Metric("headrace_stall_seconds_total", "counter", ("job_name", "cause"),
           "Time that training steps waited for data, by cause."),
    *_OF_JOBS.values(),
    *_OF_WORKING_JOBS.values(),
)  # fmt: skip
"""All that the daemon tells; docs/howto/metrics.md lists it too."""


def figures_of(state: Mapping[str, Any]) -> Figures:
    """The figures of a daemon, from what `Server.describe` says."""
    figures = Figures(TABLE)
    figures.add("headrace_build_info", 1, version=__version__)
    figures.add("headrace_node_clients", len(state["sessions"]))
    _add(figures, _OF_NODE, state)
    if state["governed"] is not None:
        _add(figures, _OF_CONTROLLER, state["governed"])
    for data in state["datasets"]:
        label, reads = data["name"], data["reads"]
        _add(figures, _OF_DATA, data, dataset=label)
        for tier, count in data["bytes_by_tier"].items():
            figures.add("headrace_read_bytes_total", count, dataset=label, tier=tier)
        figures.add_latencies(
            "headrace_read_seconds", reads["latency_us"], reads["seconds"], dataset=label
        )
        figures.add("headrace_reads_in_flight", reads["in_flight"], dataset=label)
        figures.add("headrace_reads_in_flight_max", reads["in_flight_max"], dataset=label)
        figures.add("headrace_dataset_buffer_bytes", reads["buffer_bytes"], dataset=label)
        figures.add("headrace_dataset_clients", sum(data["jobs"].values()), dataset=label)
        if data["remote"] is not None:
            _add(figures, _OF_REMOTE, data["remote"], dataset=label)
        if data["cache"] is not None:
            figures.add("headrace_dataset_cached_samples", data["cache"]["samples"], dataset=label)
    for label, totals in state["labels"].items():
        _add(figures, _OF_JOBS, totals, job_name=label)
        for cause, seconds in totals["stall_s"].items():
            figures.add("headrace_stall_seconds_total", seconds, job_name=label, cause=cause)
    for job in state["jobs"]:
        if job["totals"] is not None:
            label = job["name"] if job["name"] in state["labels"] else OTHER
            _add(figures, _OF_WORKING_JOBS, job, job_name=label)
    return figures


def _add(
    figures: Figures, metrics: Mapping[str, Metric], report: Mapping[str, Any], **labels: str
) -> None:
    for key, metric in metrics.items():
        figures.add(metric.name, report[key], **labels)
