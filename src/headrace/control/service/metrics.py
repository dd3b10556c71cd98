"""The controller's metrics: from what it describes, in its loop, to Prometheus's text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace import __version__
from headrace.control.metrics import Figures, JobLabels, Kind, Metric

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


# Metric, kind, what `ControlService.describe` calls it ('' where it is computed), what it is.
_PLAIN: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("epoch", "gauge", "epoch", "Grows with each controller that rules."),
    ("policy_version", "gauge", "policy_version", "Version of the policy in force."),
    ("degraded", "gauge", "", "1: it rules, but cannot write its database."),
    ("planes", "gauge", "", "Planes that have a lease."),
    ("silent_planes", "gauge", "", "Of these, planes that do not report."),
    ("lease_seconds", "gauge", "lease_s", "How long a lease runs."),
    ("report_interval_seconds", "gauge", "report_s", "How often planes report."),
    ("reports_total", "counter", "reports", "Reports that were answered."),
    ("refused_total", "counter", "refused", "Requests that were refused."),
    ("expired_total", "counter", "expired", "Planes whose lease ran out."),
    ("decide_seconds", "histogram", "", "How long each decision took."),
    ("held_bytes", "gauge", "", "Memory of samples, of all planes."),
    ("clients", "gauge", "", "Clients of all planes."),
)

SILENT_REPORTS: Final = 3.0
"""A plane that has missed so many reports is silent."""

TABLE: Final = (
    Metric("headrace_build_info", "gauge", ("version",), "Always 1; says which headrace this is."),
    *(Metric(f"headrace_control_{name}", kind, (), text) for name, kind, _, text in _PLAIN),
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


def figures_of(state: Mapping[str, Any], known: JobLabels | None = None) -> Figures:
    """The figures of a controller, out of what `ControlService.describe` says."""
    known = known or JobLabels()
    figures = Figures(TABLE)
    figures.add("headrace_build_info", 1, version=__version__)
    for name, _, key, _ in _PLAIN:
        if key:
            figures.add(f"headrace_control_{name}", state[key])
    planes = state["planes"]
    figures.add("headrace_control_degraded", bool(state["degraded"]))
    figures.add("headrace_control_planes", len(planes))
    silent = [p for p in planes if p["silent_s"] > SILENT_REPORTS * state["report_s"]]
    figures.add("headrace_control_silent_planes", len(silent))
    figures.add("headrace_control_held_bytes", sum(p["held_bytes"] for p in planes))
    clients = sum(sum(p["sessions"].values()) for p in planes)
    figures.add("headrace_control_clients", clients)
    decided = state["decide_us"], state["decide_s_sum"]
    figures.add_latencies("headrace_control_decide_seconds", *decided)
    flows = [flow for plane in planes for flow in plane["flows"]]
    known.jobs.update(flow["job"] for flow in flows)
    known.systems.update(system["name"] for system in state["file_systems"])
    for flow in flows:
        system = known.systems.of(flow["file_system"])
        _add_rates(figures, "job", flow, job_name=known.jobs.of(flow["job"]), file_system=system)
    for each in state["file_systems"]:
        _add_rates(figures, "file_system", each, file_system=known.systems.of(each["name"]))
    return figures


def _add_rates(figures: Figures, of: str, rates: Mapping[str, Any], **labels: str) -> None:
    for what in ("used", "granted", "capacity"):
        for resource, value in rates.get(what, {}).items():
            if value is not None:
                figures.add(f"headrace_control_{of}_{what}_{_UNITS[resource]}", value, **labels)
