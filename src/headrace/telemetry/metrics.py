"""The agent's metrics: its ledger's totals under their names in Prometheus. docs/howto/agent.md lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace import __version__
from headrace.control.metrics import OTHER, Figures, JobLabels, Metric
from headrace.telemetry.accounts import NODE
from headrace.telemetry.history import PEAKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.telemetry.accounts import JobFacts, Ledger

__all__ = ["JOBS", "TABLE", "figures_of"]

_PREFIX: Final = "headrace_agent_"

_AGENT: Final = {
    "build_info": "Always 1; says which headrace this is, and the node.",
    "jobs": "Jobs that run on this node now.",
    "look_seconds": "CPU time that a look costs lately.",
    "interval_seconds": "Time between looks now.",
    "messages_total": "Messages of processes that were counted.",
    "refused_total": "Messages that were not.",
    "waiting_entries": "Entries that wait to be written to the history: grows where it cannot be written.",
}

# Of the node: the ledger's figure, its metric, the name of its label, what it is.
_NODE: Final = (
    ("cpu_busy_s", "cpu_busy_seconds_total", "", "CPU time in use."),
    ("cpu_s", "cpu_seconds_total", "", "CPU time there was."),
    ("memory_bytes", "memory_bytes", "", "Memory of the node."),
    ("memory_available_bytes", "memory_available_bytes", "", "Of it, what can be taken."),
    ("*_pressure_s", "pressure_seconds_total", "resource share",
     "Time in which some, or all, tasks waited for cpu, memory or io (PSI)."),
    ("disk_read_bytes", "disk_read_bytes_total", "device", "Bytes read."),
    ("disk_written_bytes", "disk_written_bytes_total", "device", "Bytes written."),
    ("disk_busy_s", "disk_busy_seconds_total", "device", "Time in which it worked."),
    ("network_received_bytes", "network_received_bytes_total", "device", "Bytes received."),
    ("network_sent_bytes", "network_sent_bytes_total", "device", "Bytes sent."),
    ("fs_read_bytes", "fs_read_bytes_total", "file_system",
     "Bytes that the file system's client read from its servers."),
    ("fs_written_bytes", "fs_written_bytes_total", "file_system", "Bytes that it wrote to them."),
    ("fs_*_operations", "fs_operations_total", "file_system kind",
     "Requests of its client: read, write or metadata."),
    ("fs_*_s", "fs_seconds_total", "file_system kind", "Time that they took, added up."),
    ("gpu_busy", "gpu_busy_ratio", "gpu", "Share of time in which it works."),
    ("gpu_memory_bytes", "gpu_memory_bytes", "gpu", "Memory in use."),
    ("gpu_power_w", "gpu_power_watts", "gpu", "Power that it takes."),
)  # fmt: skip

# Of jobs: the ledger's figure, its metric after `job_`, what it is.
_JOB: Final = (
    ("seconds", "seconds_total", "Time that it ran on this node."),
    ("gpu_s", "gpu_seconds_total", "GPU time that it had."),
    ("gpu_watched_s", "gpu_watched_seconds_total", "GPU time in which the GPUs were looked at."),
    ("gpu_busy_s", "gpu_busy_seconds_total", "Of it, GPU time in which they worked."),
    ("cpu_s", "cpu_seconds_total", "CPU time that it used."),
    ("read_bytes", "read_bytes_total", "Bytes that its processes read from storage."),
    ("written_bytes", "written_bytes_total", "Bytes that they wrote to it."),
    (
        "io_pressure_s",
        "io_pressure_seconds_total",
        "Time in which some of its tasks waited for I/O.",
    ),
    ("samples", "samples_total", "Samples that headrace delivered."),
    ("batches", "batches_total", "Batches that it delivered."),
    ("worked_s", "work_seconds_total", "Time that its training steps worked."),
)
_JOB_WAITS: Final = (
    ("stall_seconds_total", ("stall_s", "inferred_s"),
     "Time that its training steps waited for data: measured, of each process; inferred, of the node."),
    ("lost_gpu_seconds_total", ("lost_gpu_s", "inferred_gpu_s"), "GPU time that was lost by it."),
)  # fmt: skip
_JOB_PEAKS: Final = (
    ("gpus", "gpus", "GPUs that it has here."),
    ("memory_bytes", "memory_bytes", "The most memory that it took."),
    ("gpu_memory_bytes", "gpu_memory_bytes", "The same of its GPUs."),
)

JOBS: Final = {figure: metric for figure, metric, _ in (*_JOB, *_JOB_PEAKS)}
"""Figures of jobs without a label, and their names after `headrace_agent_job_`."""


def _metric(name: str, labels: str, text: str) -> Metric:
    kind: Final = "counter" if name.endswith("_total") else "gauge"
    return Metric(f"{_PREFIX}{name}", kind, tuple(labels.split()), text)


TABLE: Final = (
    *(_metric(name, "version node" if name == "build_info" else "", t) for name, t in _AGENT.items()),
    *(_metric(name, labels, text) for _, name, labels, text in _NODE),
    _metric("job_info", "job_name alias title user account quality",
            "Always 1; whose job it is, and whether its stalls are measured or inferred."),
    *(_metric(f"job_{name}", "job_name", text) for _, name, text in _JOB),
    *(_metric(f"job_{name}", "job_name cause file_system quality", t) for name, _, t in _JOB_WAITS),
    _metric("job_tier_bytes_total", "job_name tier file_system",
            "Bytes delivered, by where they came from."),
    *(_metric(f"job_{name}", "job_name", text) for _, name, text in _JOB_PEAKS),
)  # fmt: skip
"""All that the agent serves."""

_WAITS: Final = {
    figure: (metric, quality)
    for metric, figures, _ in _JOB_WAITS
    for figure, quality in zip(figures, ("measured", "inferred"), strict=True)
}


def figures_of(
    ledger: Ledger,
    facts: Mapping[str, JobFacts],
    state: Mapping[str, float],
    node: str,
    labels: JobLabels,
) -> Figures:
    """The figures of an agent."""
    figures = Figures(TABLE)
    labels.jobs.update(facts)
    labels.systems.update(dict.fromkeys(key[3] for key in ledger.totals if key[3]))
    figures.add(f"{_PREFIX}build_info", 1, version=__version__, node=node)
    for name, value in state.items():
        figures.add(f"{_PREFIX}{name}", value)
    for (name, label), value in ledger.gauges.items():
        _add_node(figures, name, label, value)
    for job, one in facts.items():
        if labels.jobs.of(job) != OTHER:
            identity = one.identity
            figures.add(
                f"{_PREFIX}job_info", 1, job_name=job, alias=identity.alias,
                title=identity.name, user=one.user, account=identity.account,
                quality="measured" if one.measured else "inferred",
            )  # fmt: skip
    for (job, name, label, system), value in ledger.totals.items():
        if job == NODE:
            _add_node(figures, name, label, value)
        else:
            _add_job(figures, labels, (job, name, label, system), value)
    return figures


def _add_node(figures: Figures, name: str, label: str, value: float) -> None:
    for figure, metric, labels, _ in _NODE:
        begin, star, end = figure.partition("*")
        if name != figure and not (star and name.startswith(begin) and name.endswith(end)):
            continue
        kind = name.removeprefix(begin).removesuffix(end)
        values = {"kind": kind, "resource": kind, "share": label}
        given = {key: values.get(key, label) for key in labels.split()}
        figures.add(f"{_PREFIX}{metric}", value, **given)
        return


def _add_job(
    figures: Figures, labels: JobLabels, key: tuple[str, str, str, str], value: float
) -> None:
    job, name, label, system = key
    begin, shown = f"{_PREFIX}job_", labels.jobs.of(job)
    system = labels.systems.of(system) if system else ""
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
