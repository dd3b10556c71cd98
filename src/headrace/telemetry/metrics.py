"""The agent's metrics: its ledger's totals under their names in Prometheus, and back.

docs/howto/agent.md lists them. `PrometheusHistory` makes records out of any Prometheus that scrapes agents,
through its query API.

Counters are added up here rather than by `increase`, which extrapolates, and which misses what a counter
had counted when it was first scraped: a short job's figures would not be true. An agent's counters of a
job begin at 0 with the job, so the first value counts too where the job began within the stretch.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace import __version__
from headrace.base.job import clean
from headrace.control.prometheus import OTHER, Figures, JobLabels, Metric
from headrace.errors import TelemetryError
from headrace.telemetry.accounts import NODE
from headrace.telemetry.history import PEAKS, JobRecord, merged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.telemetry.accounts import JobFacts, Ledger

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


class _JobRow(NamedTuple):
    """A figure of jobs: the ledger's name, that after `headrace_agent_job_`, and what it is.

    `label` is what the ledger's label is; such figures are by file system, too.
    """

    figure: str
    metric: str
    help: str
    label: str = ""
    quality: str = ""

    @property
    def labels(self) -> str:
        """Names of its labels."""
        own = f"job_name {self.label} file_system" if self.label else "job_name"
        return f"{own} quality" if self.quality else own


_WAITED: Final = (
    "Time that its training steps waited for data: "
    "measured, of each process; inferred, of the node."
)
_LOST: Final = "GPU time that was lost by it."

_JOB: Final = (
    _JobRow("seconds", "seconds_total", "Time that it ran on this node."),
    _JobRow("gpu_s", "gpu_seconds_total", "GPU time that it had."),
    _JobRow("gpu_watched_s", "gpu_watched_seconds_total", "GPU time in which the GPUs were looked at."),
    _JobRow("gpu_busy_s", "gpu_busy_seconds_total", "Of it, GPU time in which they worked."),
    _JobRow("cpu_s", "cpu_seconds_total", "CPU time that it used."),
    _JobRow("read_bytes", "read_bytes_total", "Bytes that its processes read from storage."),
    _JobRow("written_bytes", "written_bytes_total", "Bytes that they wrote to it."),
    _JobRow("io_pressure_s", "io_pressure_seconds_total",
            "Time in which some of its tasks waited for I/O."),
    _JobRow("samples", "samples_total", "Samples that headrace delivered."),
    _JobRow("batches", "batches_total", "Batches that it delivered."),
    _JobRow("worked_s", "work_seconds_total", "Time that its training steps worked."),
    _JobRow("stall_s", "stall_seconds_total", _WAITED, "cause", "measured"),
    _JobRow("inferred_s", "stall_seconds_total", _WAITED, "cause", "inferred"),
    _JobRow("lost_gpu_s", "lost_gpu_seconds_total", _LOST, "cause", "measured"),
    _JobRow("inferred_gpu_s", "lost_gpu_seconds_total", _LOST, "cause", "inferred"),
    _JobRow("tier_bytes", "tier_bytes_total", "Bytes read, by where they came from.", "tier"),
    _JobRow("cpus_s", "cpus_seconds_total", "CPU time that it had."),
    _JobRow("gpus", "gpus", "GPUs that it has here."),
    _JobRow("gpus_used", "gpus_used", "Of them, those that have worked."),
    _JobRow("memory_bytes", "memory_bytes", "The most memory that it took."),
    _JobRow("memory_asked_bytes", "memory_asked_bytes", "Memory that it asked for here."),
    _JobRow("gpu_memory_bytes", "gpu_memory_bytes", "The most memory of its GPUs that it took."),
    _JobRow("gpu_memory_asked_bytes", "gpu_memory_asked_bytes", "Memory that its GPUs have."),
    _JobRow("node_cpus", "node_cpus", "CPUs of the node, of which it may have some."),
    _JobRow("node_memory_bytes", "node_memory_bytes", "Memory of the node, likewise."),
    _JobRow("node_gpus", "node_gpus", "GPUs of the node, likewise."),
    _JobRow("partition", "partition", "Always 1; the partition that it runs in.", "partition"),
)  # fmt: skip
_BY_FIGURE: Final = {row.figure: row for row in _JOB}
_BY_METRIC: Final = {(row.metric, row.quality): row for row in _JOB}


def _metric(name: str, labels: str, text: str) -> Metric:
    kind: Final = "counter" if name.endswith("_total") else "gauge"
    return Metric(f"{_PREFIX}{name}", kind, tuple(labels.split()), text)


TABLE: Final = (
    *(_metric(name, "version node" if name == "build_info" else "", t) for name, t in _AGENT.items()),
    *(_metric(name, labels, text) for _, name, labels, text in _NODE),
    _metric("job_info", "job_name alias title user account quality",
            "Always 1; whose job it is, and whether its stalls are measured or inferred."),
    *dict.fromkeys(_metric(f"job_{row.metric}", row.labels, row.help) for row in _JOB),
)  # fmt: skip
"""All that the agent serves."""


def figures_of(
    ledger: Ledger, facts: Mapping[str, JobFacts], state: Mapping[str, float], node: str,
    labels: JobLabels,
) -> Figures:  # fmt: skip
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
    row, shown = _BY_FIGURE.get(name), labels.jobs.of(job)
    if row is None or (name in PEAKS and shown == OTHER):
        return
    given = {"job_name": shown}
    if row.label:
        system = labels.systems.of(system) if system else ""
        given |= {row.label: label, "file_system": system}
    if row.quality:
        given["quality"] = row.quality
    figures.add(f"{_PREFIX}job_{row.metric}", value, **given)


# -- from Prometheus ------------------------------------------------------------------------------

TIMEOUT_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 512 << 20
POINTS_MAX: Final = 10_000  # Prometheus refuses more than 11,000 points of a series
STEP_S: Final = 15.0

BEGINNING_S: Final = 30 * 86400.0  # a stretch "from the beginning" goes so far back


class PrometheusHistory:
    """A Prometheus, by its URL: `http://host:9090`, with a path in front of `/api/v1` if it has one."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.skipped: list[str] = []

    def records(self, since_s: float, until_s: float, job_id: str = "") -> list[JobRecord]:
        """As `FileHistory.records`."""
        return merged(self.parts(since_s, until_s, job_id))

    def parts(
        self, since_s: float, until_s: float, job_id: str = ""
    ) -> list[tuple[str, JobRecord]]:
        """As `FileHistory.parts`; a node is called as the host of the instance that is scraped."""
        since_s = max(since_s, until_s - BEGINNING_S)
        names = self._names(since_s, until_s, job_id)
        if job_id and not names:
            return []
        matching = ""
        if job_id:
            either = "|".join(map(re.escape, sorted({key[1] for key in names})))
            matching = f"{{job_name=~{_quoted(either)}}}"
        by_node: dict[tuple[str, str], JobRecord] = {}
        for metric in dict.fromkeys(row.metric for row in _JOB):
            for labels, values in self._range(f"{_PREFIX}job_{metric}{matching}", since_s, until_s):
                key = labels.get("instance", ""), clean(labels.get("job_name", ""))
                if not key[1]:  # a sum of somebody's own, of no job
                    continue
                record = by_node.get(key)
                if record is None:
                    info = names.get(key, {})
                    record = by_node[key] = JobRecord(
                        job_id=key[1], alias=clean(info.get("alias", "")),
                        name=clean(info.get("title", "")), user=clean(info.get("user", "")),
                        account=clean(info.get("account", "")),
                        measured=info.get("quality") == "measured",
                        first_s=values[0][0], last_s=values[-1][0],
                    )  # fmt: skip
                record.first_s = min(record.first_s, values[0][0])
                record.last_s = max(record.last_s, values[-1][0])
                _put(record, metric, labels, values, since_s)
        return [
            (instance.rpartition(":")[0] or instance, record)
            for (instance, _), record in sorted(by_node.items())
        ]

    def _names(
        self, since_s: float, until_s: float, job_id: str
    ) -> dict[tuple[str, str], dict[str, str]]:
        """What jobs are called, by instance and job; what was told last counts."""
        names = ("job_name", "alias")
        matching = [f"{{{name}={_quoted(job_id)}}}" for name in names] if job_id else [""]
        latest: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}
        for part in matching:
            for labels, values in self._range(f"{_PREFIX}job_info{part}", since_s, until_s):
                key = labels.get("instance", ""), clean(labels.get("job_name", ""))
                if key not in latest or values[-1][0] >= latest[key][0]:
                    latest[key] = values[-1][0], labels
        return {key: labels for key, (_, labels) in latest.items()}

    def _range(
        self, query: str, since_s: float, until_s: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        step_s = max(STEP_S, math.ceil((until_s - since_s) / POINTS_MAX))
        times = {"start": f"{since_s:.3f}", "end": f"{until_s:.3f}", "step": step_s}
        series_list = []
        for series in self._ask("query_range", query=query, **times):
            points = ((float(at), float(value)) for at, value in series.get("values", ()))
            values = [(at, value) for at, value in points if math.isfinite(value)]
            labels = {str(k): str(v) for k, v in series.get("metric", {}).items()}
            if values and labels.get("job_name"):
                series_list.append((labels, values))
        return series_list

    def _ask(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http(s) only
                document = json.loads(answer.read(ANSWER_BYTES_MAX))
            result = document["data"]["result"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise TelemetryError(
                f"{self._url}: Prometheus does not answer as it should: {e}.",
                path=self._url,
                next_step="See that the address is that of Prometheus, not of Grafana or an agent.",
            ) from e
        return [series for series in result if isinstance(series, dict)]


def _put(
    record: JobRecord, metric: str, labels: dict[str, str], values: list[tuple[float, float]],
    since_s: float,
) -> None:  # fmt: skip
    row = _BY_METRIC.get((metric, labels.get("quality", "")))
    if row is None:
        return
    key = row.figure, clean(labels.get(row.label, "")), clean(labels.get("file_system", ""))
    before = record.figures.get(key, 0.0)
    if row.figure in PEAKS:
        record.figures[key] = max(before, *(value for _, value in values))
    else:
        record.figures[key] = before + _grown(values, since_s)


def _grown(values: list[tuple[float, float]], since_s: float) -> float:
    """How much a counter grew; one that appears within the stretch began at 0."""
    first_at, before = values[0]
    total = before if first_at - since_s > 2 * STEP_S else 0.0
    for _, value in values[1:]:
        total += value - before if value >= before else value
        before = value
    return total


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
