"""The controller's metrics: from what it describes, in its loop, to Prometheus's text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace import __version__
from headrace.control.metrics import Figures, JobLabels, Metric
from headrace.control.policy import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping

_FLOW: Final = ("job_name", "file_system")
_SYSTEM: Final = ("file_system",)
_UNITS: Final = {
    "bytes_per_s": "bytes_per_second",
    "reads_per_s": "reads_per_second",
    "metadata_per_s": "metadata_operations_per_second",
}


def _rates(prefix: str, labels: tuple[str, ...], meanings: Mapping[str, str]) -> tuple[Metric, ...]:
    """One metric for each meaning and unit."""
    return tuple(
        Metric(f"{prefix}_{what}_{unit}", "gauge", labels, text)
        for what, text in meanings.items()
        for unit in _UNITS.values()
    )


TABLE: Final = (
    Metric("headrace_build_info", "gauge", ("version",), "Always 1; says which headrace this is."),
    Metric("headrace_control_epoch", "gauge", (), "Grows with each controller that rules."),
    Metric("headrace_control_policy_version", "gauge", (), "Version of the policy in force."),
    Metric("headrace_control_degraded", "gauge", (), "1: it rules, but cannot write its database."),
    Metric("headrace_control_planes", "gauge", (), "Planes that have a lease."),
    Metric("headrace_control_silent_planes", "gauge", (), "Of these, planes that do not report."),
    Metric("headrace_control_lease_seconds", "gauge", (), "How long a lease runs."),
    Metric("headrace_control_report_interval_seconds", "gauge", (), "How often planes report."),
    Metric("headrace_control_reports_total", "counter", (), "Reports that were answered."),
    Metric("headrace_control_refused_total", "counter", (), "Requests that were refused."),
    Metric("headrace_control_expired_total", "counter", (), "Planes whose lease ran out."),
    Metric("headrace_control_decide_seconds", "histogram", (), "How long each decision took."),
    Metric("headrace_control_held_bytes", "gauge", (), "Memory of samples, of all planes."),
    Metric("headrace_control_clients", "gauge", (), "Clients of all planes."),
    *_rates("headrace_control_job", _FLOW, {
        "used": "What planes reported of the job on the file system.",
        "granted": "What they may use; nothing where there is no limit.",
    }),
    *_rates("headrace_control_file_system", _SYSTEM, {
        "used": "What planes reported of the file system.",
        "granted": "What they may use of it, all together; without a limit, what they use.",
        "capacity": "What the policy says it can do; nothing where it says nothing.",
    }),
)  # fmt: skip
"""All that the controller tells; docs/howto/metrics.md lists it too."""

_PLAIN: Final = {
    "headrace_control_epoch": "epoch",
    "headrace_control_policy_version": "policy_version",
    "headrace_control_lease_seconds": "lease_s",
    "headrace_control_report_interval_seconds": "report_s",
    "headrace_control_reports_total": "reports",
    "headrace_control_refused_total": "refused",
    "headrace_control_expired_total": "expired",
}


def figures_of(state: Mapping[str, Any], known: JobLabels | None = None) -> Figures:
    """The figures of a controller, out of what `Controller.describe` says."""
    known = known or JobLabels()
    figures = Figures(TABLE)
    figures.add("headrace_build_info", 1, version=__version__)
    for name, key in _PLAIN.items():
        figures.add(name, state[key])
    planes = state["planes"]
    figures.add("headrace_control_degraded", bool(state["degraded"]))
    figures.add("headrace_control_planes", len(planes))
    silent = [p for p in planes if p["silent_s"] > SILENT_REPORTS * state["report_s"]]
    figures.add("headrace_control_silent_planes", len(silent))
    figures.add("headrace_control_held_bytes", sum(p["held_bytes"] for p in planes))
    clients = sum(sum(p["sessions"].values()) for p in planes)
    figures.add("headrace_control_clients", clients)
    figures.add_latencies(
        "headrace_control_decide_seconds", state["decide_us"], state["decide_s_sum"]
    )
    flows = [flow for plane in planes for flow in plane["flows"]]
    known.jobs.update(flow["job"] for flow in flows)
    known.systems.update(system["name"] for system in state["file_systems"])
    for flow in flows:
        labels = {
            "job_name": known.jobs.of(flow["job"]),
            "file_system": known.systems.of(flow["file_system"]),
        }
        _add_rates(figures, "headrace_control_job", flow, ("used", "granted"), labels)
    for system in state["file_systems"]:
        label = {"file_system": known.systems.of(system["name"])}
        meanings = ("used", "granted", "capacity")
        _add_rates(figures, "headrace_control_file_system", system, meanings, label)
    return figures


SILENT_REPORTS: Final = 3.0
"""A plane that has missed so many reports is silent."""


def _add_rates(
    figures: Figures,
    prefix: str,
    rates: Mapping[str, Any],
    meanings: tuple[str, ...],
    labels: Mapping[str, str],
) -> None:
    for what in meanings:
        for resource in RESOURCES:
            value = rates[what][resource]
            if value is not None:
                figures.add(f"{prefix}_{what}_{_UNITS[resource]}", value, **labels)
