"""Metrics: what Prometheus is told, as a table of names, and figures that are put under them.

A figure whose name, kind or labels are not in the table cannot be told: the table is what the
documentation lists and what dashboards rely on. Needs prometheus-client (`headrace[metrics]`).
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from headrace.errors import HeadraceError
from headrace.plane.stage import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client.core import Metric as Family

__all__ = ["ANSWER_S", "OTHER", "Figures", "Labels", "Metric", "asked", "renderer"]

ANSWER_S: Final = 2.0
"""A loop that is asked from another thread answers within this time, or the scrape fails."""

OTHER: Final = "other"
"""Names all that have no label of their own."""

_T = TypeVar("_T")

Kind = Literal["counter", "gauge", "histogram"]

_BUCKET_POWERS: Final = range(4, 26)
"""Upper bounds of latency buckets: 16 us to 34 s, each twice the one before."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a table of metrics."""

    name: str
    """As Prometheus has it: with its unit, and `_total` if it is a counter."""
    kind: Kind
    labels: tuple[str, ...]
    help: str


class Figures:
    """Figures of one scrape.

    Args:
        table: what may be told.
    """

    def __init__(self, table: Iterable[Metric]) -> None:
        self._table = {metric.name: metric for metric in table}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], tuple[list[int], float]]] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Tell a figure; of the same labels, figures are added up.

        Raises:
            KeyError: there is no such metric, or it has other labels.
        """
        key = self._key(name, labels)
        values = self._values.setdefault(name, {})
        values[key] = values.get(key, 0.0) + value

    def add_latencies(
        self, name: str, counts: Sequence[int], seconds: float, **labels: str
    ) -> None:
        """Tell a histogram.

        Args:
            name: of the metric.
            counts: as in `StageStats.latency_us`.
            seconds: all latencies added up.
            labels: of the metric.

        Raises:
            KeyError: there is no such metric, or it has other labels.
        """
        key = self._key(name, labels)
        histograms = self._histograms.setdefault(name, {})
        before, total = histograms.get(key, ([0] * LATENCY_BUCKETS, 0.0))
        added = [a + b for a, b in zip(before, counts, strict=True)]
        histograms[key] = (added, total + seconds)

    def _key(self, name: str, labels: dict[str, str]) -> tuple[str, ...]:
        metric = self._table[name]
        if set(labels) != set(metric.labels):
            raise KeyError(f"{name} has labels {metric.labels}, not {tuple(labels)}")
        return tuple(labels[label] for label in metric.labels)

    def families(self) -> Iterator[Family]:
        """As prometheus-client has them, those without any figure too: their names are known at once."""
        from prometheus_client import core

        for metric in self._table.values():
            if metric.kind == "histogram":
                histogram = core.HistogramMetricFamily(
                    metric.name, metric.help, labels=metric.labels
                )
                for key, (counts, total) in self._histograms.get(metric.name, {}).items():
                    histogram.add_metric(key, _cumulative(counts), total)
                yield histogram
                continue
            make = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
            family = make(metric.name, metric.help, labels=metric.labels)
            for key, value in self._values.get(metric.name, {}).items():
                family.add_metric(key, value)
            yield family


class Labels:
    """Which names have a label of their own: as many as there is room for, as long as they are there.

    Args:
        labels_max: at a time.
    """

    def __init__(self, labels_max: int) -> None:
        self._labels_max = labels_max
        self._labelled: set[str] = set()

    def update(self, names: Iterable[str]) -> None:
        """These are there now; whoever is not gives its label up."""
        there = dict.fromkeys(names)
        self._labelled &= there.keys()
        for name in there:
            if len(self._labelled) < self._labels_max and name != OTHER:
                self._labelled.add(name)

    def of(self, name: str) -> str:
        """The label of a name."""
        return name if name in self._labelled else OTHER


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: how many took no longer."""
    found: list[tuple[str, float]] = [
        (repr(2**power * 1e-6), float(sum(counts[: 2 * power]))) for power in _BUCKET_POWERS
    ]
    return [*found, ("+Inf", float(sum(counts)))]


def asked(call_soon: Callable[[Callable[[], None]], object], function: Callable[[], _T]) -> _T:
    """What a function gives in a loop's thread, asked from another.

    Args:
        call_soon: runs a function in the loop; thread-safe.
        function: gives it.

    Raises:
        TimeoutError: the loop did not answer within `ANSWER_S`.
    """
    answers: queue.SimpleQueue[_T] = queue.SimpleQueue()
    call_soon(lambda: answers.put(function()))
    try:
        return answers.get(timeout=ANSWER_S)
    except queue.Empty:
        raise TimeoutError(f"the loop did not answer within {ANSWER_S:g} s") from None


class _Collector:
    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Family]:
        return self._figures().families()


def renderer(figures: Callable[[], Figures]) -> Callable[[], bytes]:
    """What gives the metrics as text: these figures, and those of the process.

    Raises:
        HeadraceError: prometheus-client is not installed.
    """
    try:
        import prometheus_client
    except ModuleNotFoundError as e:
        raise HeadraceError(
            "metrics need the package prometheus-client, which is not installed.",
            next_step="pip install 'headrace[metrics]'",
        ) from e
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(figures))
    prometheus_client.ProcessCollector(registry=registry)
    return lambda: prometheus_client.generate_latest(registry)
