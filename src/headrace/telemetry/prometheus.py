"""PrometheusHistory: records out of any Prometheus that scrapes agents, through its query API.

Counters are added up here rather than by `increase`, which extrapolates, and which misses what a counter
had counted when it was first scraped: a short job's figures would not be true. An agent's counters of a
job begin at 0 with the job, so the first value counts too where the job began within the stretch.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from headrace.base.job import clean
from headrace.errors import TelemetryError
from headrace.telemetry.history import PEAKS, JobRecord, merged
from headrace.telemetry.metrics import JOBS

__all__ = ["PrometheusHistory"]

TIMEOUT_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 512 << 20
POINTS_MAX: Final = 10_000
"""Prometheus refuses more than 11,000 points of a series."""

STEP_S: Final = 15.0

BEGINNING_S: Final = 30 * 86400.0
"""A stretch "from the beginning" goes so far back."""

_PREFIX: Final = "headrace_agent_job_"
_LABELLED: Final = {
    "stall_seconds_total": {"measured": "stall_s", "inferred": "inferred_s"},
    "lost_gpu_seconds_total": {"measured": "lost_gpu_s", "inferred": "inferred_gpu_s"},
}
_NAMES: Final = {metric: name for name, metric in JOBS.items()}


class PrometheusHistory:
    """A Prometheus.

    Args:
        url: as `http://host:9090`, with a path in front of `/api/v1` if it has one.

    Attributes:
        skipped: always empty.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.skipped: list[str] = []

    def records(self, since_s: float, until_s: float, job_id: str = "") -> list[JobRecord]:
        """See `History.records`."""
        since_s = max(since_s, until_s - BEGINNING_S)
        names = self._names(since_s, until_s, job_id)
        if job_id and not names:
            return []
        matching = ""
        if job_id:
            either = "|".join(_escaped(name) for name in sorted({key[1] for key in names}))
            matching = f"{{job_name=~{_quoted(either)}}}"
        by_node: dict[tuple[str, str], JobRecord] = {}
        wanted = [*_NAMES, *_LABELLED, "tier_bytes_total"]
        for metric in wanted:
            for labels, values in self._range(f"{_PREFIX}{metric}{matching}", since_s, until_s):
                key = labels.get("instance", ""), clean(labels.get("job_name", ""))
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
        return merged((instance, record) for (instance, _), record in sorted(by_node.items()))

    def close(self) -> None:
        """Nothing is held."""

    def _names(
        self, since_s: float, until_s: float, job_id: str
    ) -> dict[tuple[str, str], dict[str, str]]:
        """What jobs are called, by instance and job; what was told last counts."""
        queries = [f"{_PREFIX}info"]
        if job_id:
            quoted = _quoted(job_id)
            queries = [f"{_PREFIX}info{{job_name={quoted}}}", f"{_PREFIX}info{{alias={quoted}}}"]
        latest: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}
        for query in queries:
            for labels, values in self._range(query, since_s, until_s):
                key = labels.get("instance", ""), clean(labels.get("job_name", ""))
                if key not in latest or values[-1][0] >= latest[key][0]:
                    latest[key] = values[-1][0], labels
        return {key: labels for key, (_, labels) in latest.items()}

    def _range(
        self, query: str, since_s: float, until_s: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        step_s = max(STEP_S, math.ceil((until_s - since_s) / POINTS_MAX))
        answer = self._ask(
            "query_range", query=query, start=f"{since_s:.3f}", end=f"{until_s:.3f}", step=step_s
        )
        series_list = []
        for series in answer:
            values = [
                (float(at), float(value))
                for at, value in series.get("values", ())
                if math.isfinite(float(value))
            ]
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
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise TelemetryError(
                f"{self._url}: Prometheus does not answer as it should: {e}.",
                path=self._url,
                next_step="See that the address is that of Prometheus, not of Grafana or an agent.",
            ) from e
        return [series for series in result if isinstance(series, dict)]


def _put(
    record: JobRecord,
    metric: str,
    labels: dict[str, str],
    values: list[tuple[float, float]],
    since_s: float,
) -> None:
    system = clean(labels.get("file_system", ""))
    if metric in _LABELLED:
        name = _LABELLED[metric].get(labels.get("quality", ""), "")
        key = (name, clean(labels.get("cause", "")), system)
    elif metric == "tier_bytes_total":
        key = ("tier_bytes", clean(labels.get("tier", "")), system)
    else:
        key = (_NAMES[metric], "", "")
    if key[0] in PEAKS:
        amount = max(value for _, value in values)
        record.figures[key] = max(record.figures.get(key, 0.0), amount)
    elif key[0]:
        record.figures[key] = record.figures.get(key, 0.0) + _grown(values, since_s)


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


def _escaped(text: str) -> str:
    """A name as a regular expression."""
    return "".join(c if c.isalnum() or c == "_" or ord(c) > 127 else f"\\{c}" for c in text)
