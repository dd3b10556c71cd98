"""The agent's metrics: its ledger's totals under their names in Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace import __version__
from headrace.control.metrics import OTHER, Figures, Labels, Metric
from headrace.telemetry.ledger import NODE, PEAKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.telemetry.ledger import JobFacts, Ledger

__all__ = ["JOBS", "LABELS_MAX", "TABLE", "Told", "figures_of"]

LABELS_MAX: Final = 64
"""Jobs, and file systems, that have a label of their own at a time."""

_JOB: Final = ("job_name",)
_WAIT: Final = ("job_name", "cause", "file_system", "quality")
_DEVICE: Final = ("device",)
_MOUNT: Final = ("file_system",)

TABLE: Final = (
    Metric("headrace_agent_build_info", "gauge", ("version", "node"),
           "Always 1; says which headrace this is, and the node."),
    Metric("headrace_agent_jobs", "gauge", (), "Jobs that run on this node now."),
    Metric("headrace_agent_look_seconds", "gauge", (), "CPU time that a look costs lately."),
    Metric("headrace_agent_interval_seconds", "gauge", (), "Time between looks now."),
    Metric("headrace_agent_messages_total", "counter", (), "Messages of processes that were counted."),
    Metric("headrace_agent_refused_total", "counter", (), "Messages that were not."),
    Metric("headrace_agent_waiting_entries", "gauge", (),
           "Entries that wait to be written to the history: grows where it cannot be written."),
    # The node.
    Metric("headrace_agent_cpu_busy_seconds_total", "counter", (), "CPU time in use."),
    Metric("headrace_agent_cpu_seconds_total", "counter", (), "CPU time there was."),
    Metric("headrace_agent_memory_bytes", "gauge", (), "Memory of the node."),
    Metric("headrace_agent_memory_available_bytes", "gauge", (), "Of it, what can be taken."),
    Metric("headrace_agent_pressure_seconds_total", "counter", ("resource", "share"),
           "Time in which some, or all, tasks waited for cpu, memory or io (PSI)."),
    Metric("headrace_agent_disk_read_bytes_total", "counter", _DEVICE, "Bytes read."),
    Metric("headrace_agent_disk_written_bytes_total", "counter", _DEVICE, "Bytes written."),
    Metric("headrace_agent_disk_busy_seconds_total", "counter", _DEVICE, "Time in which it worked."),
    Metric("headrace_agent_network_received_bytes_total", "counter", _DEVICE, "Bytes received."),
    Metric("headrace_agent_network_sent_bytes_total", "counter", _DEVICE, "Bytes sent."),
    Metric("headrace_agent_fs_read_bytes_total", "counter", _MOUNT,
           "Bytes that the file system's client read from its servers."),
    Metric("headrace_agent_fs_written_bytes_total", "counter", _MOUNT, "Bytes that it wrote to them."),
    Metric("headrace_agent_fs_operations_total", "counter", ("file_system", "kind"),
           "Requests of its client: read, write or metadata."),
    Metric("headrace_agent_fs_seconds_total", "counter", ("file_system", "kind"),
           "Time that they took, added up."),
    Metric("headrace_agent_gpu_busy_ratio", "gauge", ("gpu",), "Share of time in which it works."),
    Metric("headrace_agent_gpu_memory_bytes", "gauge", ("gpu",), "Memory in use."),
    Metric("headrace_agent_gpu_power_watts", "gauge", ("gpu",), "Power that it takes."),
    # Jobs.
    Metric("headrace_agent_job_info", "gauge",
           ("job_name", "alias", "title", "user", "account", "quality"),
           "Always 1; whose job it is, and whether its stalls are measured or inferred."),
    Metric("headrace_agent_job_seconds_total", "counter", _JOB, "Time that it ran on this node."),
    Metric("headrace_agent_job_gpu_seconds_total", "counter", _JOB, "GPU time that it had."),
    Metric("headrace_agent_job_gpu_watched_seconds_total", "counter", _JOB,
           "GPU time in which the GPUs were looked at."),
    Metric("headrace_agent_job_gpu_busy_seconds_total", "counter", _JOB,
           "Of it, GPU time in which they worked."),
    Metric("headrace_agent_job_cpu_seconds_total", "counter", _JOB, "CPU time that it used."),
    Metric("headrace_agent_job_read_bytes_total", "counter", _JOB,
           "Bytes that its processes read from storage."),
    Metric("headrace_agent_job_written_bytes_total", "counter", _JOB, "Bytes that they wrote to it."),
    Metric("headrace_agent_job_io_pressure_seconds_total", "counter", _JOB,
           "Time in which some of its tasks waited for I/O."),
    Metric("headrace_agent_job_samples_total", "counter", _JOB, "Samples that headrace delivered."),
    Metric("headrace_agent_job_batches_total", "counter", _JOB, "Batches that it delivered."),
    Metric("headrace_agent_job_work_seconds_total", "counter", _JOB,
           "Time that its training steps worked."),
    Metric("headrace_agent_job_stall_seconds_total", "counter", _WAIT,
           "Time that its training steps waited for data: measured, of each process; inferred, of the node."),
    Metric("headrace_agent_job_lost_gpu_seconds_total", "counter", _WAIT,
           "GPU time that was lost by it."),
    Metric("headrace_agent_job_tier_bytes_total", "counter", ("job_name", "tier", "file_system"),
           "Bytes delivered, by where they came from."),
    Metric("headrace_agent_job_gpus", "gauge", _JOB, "GPUs that it has here."),
    Metric("headrace_agent_job_memory_bytes", "gauge", _JOB, "The most memory that it took."),
    Metric("headrace_agent_job_gpu_memory_bytes", "gauge", _JOB, "The same of its GPUs."),
)  # fmt: skip
"""All that the agent tells; docs/howto/agent.md lists it too."""

JOBS: Final = {
    "seconds": "seconds_total",
    "gpu_s": "gpu_seconds_total",
    "gpu_watched_s": "gpu_watched_seconds_total",
    "gpu_busy_s": "gpu_busy_seconds_total",
    "cpu_s": "cpu_seconds_total",
    "read_bytes": "read_bytes_total",
    "written_bytes": "written_bytes_total",
    "io_pressure_s": "io_pressure_seconds_total",
    "samples": "samples_total",
    "batches": "batches_total",
    "worked_s": "work_seconds_total",
    "gpus": "gpus",
    "memory_bytes": "memory_bytes",
    "gpu_memory_bytes": "gpu_memory_bytes",
}
"""Figures of jobs without a label, and their names after `headrace_agent_job_`."""

_WAITS: Final = {
    "stall_s": ("stall_seconds_total", "measured"),
    "inferred_s": ("stall_seconds_total", "inferred"),
    "lost_gpu_s": ("lost_gpu_seconds_total", "measured"),
    "inferred_gpu_s": ("lost_gpu_seconds_total", "inferred"),
}

_NODE: Final = {
    "cpu_busy_s": "cpu_busy_seconds_total",
    "cpu_s": "cpu_seconds_total",
}
_DEVICES: Final = {
    "disk_read_bytes": "disk_read_bytes_total",
    "disk_written_bytes": "disk_written_bytes_total",
    "disk_busy_s": "disk_busy_seconds_total",
    "network_received_bytes": "network_received_bytes_total",
    "network_sent_bytes": "network_sent_bytes_total",
}
_MOUNTS: Final = {
    "fs_read_bytes": "fs_read_bytes_total",
    "fs_written_bytes": "fs_written_bytes_total",
}
_GAUGES: Final = {
    "memory_bytes": ("memory_bytes", ""),
    "memory_available_bytes": ("memory_available_bytes", ""),
    "gpu_busy": ("gpu_busy_ratio", "gpu"),
    "gpu_memory_bytes": ("gpu_memory_bytes", "gpu"),
    "gpu_power_w": ("gpu_power_watts", "gpu"),
}


class Told:
    """Which jobs and file systems have a label of their own."""

    def __init__(self) -> None:
        self.jobs = Labels(LABELS_MAX)
        self.systems = Labels(LABELS_MAX)


def figures_of(
    ledger: Ledger, facts: Mapping[str, JobFacts], state: Mapping[str, float], node: str, told: Told
) -> Figures:
    """The figures of an agent.

    Args:
        ledger: its totals and gauges.
        facts: what is known of jobs.
        state: the agent's own figures, by name after `headrace_agent_`.
        node: this one.
        told: who has a label.
    """
    figures = Figures(TABLE)
    told.jobs.update(facts)
    told.systems.update(dict.fromkeys(key[3] for key in ledger.totals if key[3]))
    figures.add("headrace_agent_build_info", 1, version=__version__, node=node)
    for name, value in state.items():
        figures.add(f"headrace_agent_{name}", value)
    for (name, label), value in ledger.gauges.items():
        if name in _GAUGES:
            metric, labelled = _GAUGES[name]
            figures.add(
                f"headrace_agent_{metric}", value, **({labelled: label} if labelled else {})
            )
    for job, one in facts.items():
        if told.jobs.of(job) != OTHER:
            identity = one.identity
            figures.add(
                "headrace_agent_job_info", 1, job_name=job, alias=identity.alias,
                title=identity.name, user=one.user, account=identity.account,
                quality="measured" if one.measured else "inferred",
            )  # fmt: skip
    for (job, name, label, system), value in ledger.totals.items():
        if job == NODE:
            _add_node(figures, name, label, value)
        else:
            _add_job(figures, told, (job, name, label, system), value)
    return figures


def _add_node(figures: Figures, name: str, label: str, value: float) -> None:
    begin = "headrace_agent_"
    if name in _NODE:
        figures.add(begin + _NODE[name], value)
    elif name in _DEVICES:
        figures.add(begin + _DEVICES[name], value, device=label)
    elif name in _MOUNTS:
        figures.add(begin + _MOUNTS[name], value, file_system=label)
    elif name.endswith("_pressure_s"):
        resource = name.removesuffix("_pressure_s")
        figures.add(begin + "pressure_seconds_total", value, resource=resource, share=label)
    elif name.startswith("fs_") and name.endswith("_operations"):
        kind = name.removeprefix("fs_").removesuffix("_operations")
        figures.add(begin + "fs_operations_total", value, file_system=label, kind=kind)
    elif name.startswith("fs_") and name.endswith("_s"):
        kind = name.removeprefix("fs_").removesuffix("_s")
        figures.add(begin + "fs_seconds_total", value, file_system=label, kind=kind)


def _add_job(figures: Figures, told: Told, key: tuple[str, str, str, str], value: float) -> None:
    job, name, label, system = key
    begin, shown = "headrace_agent_job_", told.jobs.of(job)
    system = told.systems.of(system) if system else ""
    if name in JOBS and not (name in PEAKS and shown == OTHER):
        figures.add(begin + JOBS[name], value, job_name=shown)
    elif name in _WAITS:
        metric, quality = _WAITS[name]
        figures.add(
            begin + metric, value, job_name=shown, cause=label, file_system=system, quality=quality
        )
    elif name == "tier_bytes":
        figures.add(
            begin + "tier_bytes_total", value, job_name=shown, tier=label, file_system=system
        )
