"""Measures: the figures of a run that have a name, for tables and for conditions."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal

from headrace.bench.metrics.own import Confidence, confidence
from headrace.bench.report.result import number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.report.result import RunResult

__all__ = ["MEASURES", "Measure", "measure_named", "measured", "value_of"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a run.

    Attributes:
        name: in conditions and JSON.
        title: in tables.
        unit: of its value; `%`, `s`, `B` or a word; empty for counts.
        better: which way is good; None where neither is.
        path: where summary.json has it.
        per: where summary.json has what it is divided by, for shares in percent.
    """

    name: str
    title: str
    unit: str
    better: Literal["more", "less"] | None
    path: str
    per: str = ""


MEASURES: Final = (
    Measure("accelerators", "accelerators", "", None, "num_accelerators"),
    Measure("au", "AU", "%", "more", "metric.train_au_mean_percentage"),
    Measure("au_mlperf", "AU by MLPerf's formula", "%", "more", "headrace.au_mlperf_percent"),
    Measure("ceiling_au", "AU without storage", "%", "more", "headrace.ceiling_au_percent"),
    Measure("throughput", "throughput", "samples/s", "more",
            "metric.train_throughput_mean_samples_per_second"),
    Measure("io", "throughput in bytes (nominal)", "MiB/s", "more",
            "metric.train_io_mean_MB_per_second"),
    Measure("wait_share", "time waiting for data", "%", "less", "headrace.time.wait_s",
            "headrace.time.total_s"),
    Measure("barrier_share", "time at the barrier", "%", "less", "headrace.time.barrier_s",
            "headrace.time.total_s"),
    Measure("harness_share", "time lost by the harness", "%", "less", "headrace.time.harness_s",
            "headrace.time.total_s"),
    Measure("wait_p50", "wait of a step, median", "s", "less", "headrace.wait_s.p50"),
    Measure("wait_p99", "wait of a step, 99 %", "s", "less", "headrace.wait_s.p99"),
    Measure("wait_max", "wait of a step, longest", "s", "less", "headrace.wait_s.max"),
    Measure("batch_p50", "read of a batch, median", "s", "less", "headrace.batch_wait_s.p50"),
    Measure("batch_p99", "read of a batch, 99 %", "s", "less", "headrace.batch_wait_s.p99"),
    Measure("late_p99", "ends of steps noticed late, 99 %", "s", "less", "headrace.late_s.p99"),
    Measure("time_to_solution", "time to solution", "s", "less",
            "headrace.time_to_solution.total_s"),
    Measure("staging", "of it staging", "s", "less", "headrace.time_to_solution.staging_s"),
    Measure("training", "of it training", "s", "less", "headrace.time_to_solution.training_s"),
    Measure("evaluation", "of it evaluation", "s", "less",
            "headrace.time_to_solution.evaluation_s"),
    Measure("checkpointing", "of it checkpointing", "s", "less",
            "headrace.time_to_solution.checkpointing_s"),
    Measure("bytes", "bytes delivered", "B", None, "headrace.bytes"),
    Measure("device_bytes", "bytes from the device", "B", None, "headrace.device_bytes"),
    Measure("cpu_s_per_gb", "CPU s/GB", "", "less", "headrace.cpu_s_per_gb"),
    Measure("eval_au", "AU of evaluation", "%", "more", "metric.eval_au_mean_percentage"),
    Measure("eval_throughput", "throughput of evaluation", "samples/s", "more",
            "metric.eval_throughput_mean_samples_per_second"),
    Measure("checkpoint_s", "a checkpoint's time", "s", "less",
            "metric.save_checkpoint_duration_mean_seconds"),
    Measure("checkpoint_rate", "a checkpoint's rate", "GiB/s", "more",
            "metric.save_checkpoint_io_mean_GB_per_second"),
    Measure("checkpoint_blocking", "training stood still for one", "s", "less",
            "headrace.checkpoint.blocking_s.mean"),
    Measure("checkpoint_size", "a checkpoint's size", "GiB", None, "metric.checkpoint_size_GB"),
    Measure("load_s", "reading a checkpoint back", "s", "less",
            "metric.load_checkpoint_duration_mean_seconds"),
    Measure("load_rate", "its rate", "GiB/s", "more",
            "metric.load_checkpoint_io_mean_GB_per_second"),
)  # fmt: skip
"""In the order of tables."""


def measure_named(name: str) -> Measure:
    """The measure of that name.

    Raises:
        ValueError: there is none; the nearest is named.
    """
    names = {measure.name: measure for measure in MEASURES}
    if name in names:
        return names[name]
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"no measure is called {name!r}: {hint}There are {', '.join(names)}")


def value_of(summary: dict[str, Any], measure: Measure) -> float | None:
    """The measure's value in a summary.json, or None where it has none."""
    value = _at(summary, measure.path)
    if value is None or not measure.per:
        return value
    whole = _at(summary, measure.per)
    return 100 * value / whole if whole else None


def _at(document: Any, path: str) -> float | None:
    for key in path.split("."):
        if not isinstance(document, dict):
            return None
        document = document.get(key)
    return number_of(document)


def measured(runs: Sequence[RunResult], measure: Measure) -> Confidence | None:
    """The measure over repeats: several folders, or, for AU, the repeats of one run.

    Returns:
        None unless every run has it.
    """
    values = [value_of(run.summary, measure) for run in runs]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    repeats = runs[0].own.get("au_percent")
    if len(runs) == 1 and measure.name == "au" and isinstance(repeats, dict):
        mean, half = number_of(repeats.get("mean")), number_of(repeats.get("confidence_95"))
        if mean is not None and half is not None:
            return Confidence(mean, half, int(number_of(repeats.get("runs")) or 2))
    return confidence(known)
