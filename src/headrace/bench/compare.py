"""Compare: the named figures of a run, conditions on them (`au < -2%`), and two results side by side."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from headrace.bench.metrics import BY_HOST, Bound, Confidence, bounds_of, confidence
from headrace.bench.results import differences, number_at, number_of
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.bench.results import RunResult


class RunMeasure(NamedTuple):
    """A figure of a run."""

    name: str
    """In conditions and JSON."""
    title: str
    unit: str
    """Of its value; `%`, `s`, `B` or a word; empty for counts."""
    better: Literal["more", "less"] | None
    """Which way is good; None where neither is."""
    path: str
    """Where summary.json has it."""
    per: str = ""
    """Where summary.json has what it is divided by, for shares in percent."""
    scale: float = 1.0
    """What its number is multiplied by: DLIO's MB and GB are MiB and GiB, ours are powers of ten."""


_MB: Final = 2**20 / 10**6
_GB: Final = 2**30 / 10**9

MEASURES: Final = tuple(RunMeasure(*row) for row in (
    ("accelerators", "accelerators", "", None, "num_accelerators"),
    ("au", "AU", "%", "more", "metric.train_au_mean_percentage"),
    ("au_mlperf", "AU by MLPerf's formula", "%", "more", "headrace.au_mlperf_percent"),
    ("ceiling_au", "AU without storage", "%", "more", "headrace.ceiling_au_percent"),
    ("throughput", "throughput", "samples/s", "more", "metric.train_throughput_mean_samples_per_second"),
    ("io", "throughput, nominal sample size", "MB/s", "more", "metric.train_io_mean_MB_per_second",
     "", _MB),
    ("wait_share", "time waiting for data", "%", "less", "headrace.time.wait_s", "headrace.time.total_s"),
    ("barrier_share", "time at the barrier", "%", "less", "headrace.time.barrier_s", "headrace.time.total_s"),
    ("harness_share", "time lost by the harness", "%", "less",
     "headrace.time.harness_s", "headrace.time.total_s"),
    ("wait_p50", "wait of a step, median", "s", "less", "headrace.wait_s.p50"),
    ("wait_p99", "wait of a step, 99 %", "s", "less", "headrace.wait_s.p99"),
    ("wait_max", "wait of a step, longest", "s", "less", "headrace.wait_s.max"),
    ("batch_p50", "batch asked for until read, median", "s", "less", "headrace.batch_wait_s.p50"),
    ("batch_p99", "batch asked for until read, 99 %", "s", "less", "headrace.batch_wait_s.p99"),
    ("late_p99", "ends of steps noticed late, 99 %", "s", "less", "headrace.late_s.p99"),
    ("time_to_solution", "time to solution", "s", "less", "headrace.time_to_solution.total_s"),
    ("staging", "of it staging", "s", "less", "headrace.time_to_solution.staging_s"),
    ("training", "of it training", "s", "less", "headrace.time_to_solution.training_s"),
    ("evaluation", "of it evaluation", "s", "less", "headrace.time_to_solution.evaluation_s"),
    ("checkpointing", "of it checkpointing", "s", "less", "headrace.time_to_solution.checkpointing_s"),
    ("bytes", "bytes delivered, by all steps", "B", None, "headrace.bytes"),
    ("device_bytes", "bytes from the device", "B", None, "headrace.device_bytes"),
    ("cpu_s_per_gb", "CPU s/GB", "", "less", "headrace.cpu_s_per_gb"),
    ("eval_au", "AU of evaluation", "%", "more", "metric.eval_au_mean_percentage"),
    ("eval_throughput", "throughput of evaluation", "samples/s", "more",
     "metric.eval_throughput_mean_samples_per_second"),
    ("checkpoint_s", "a checkpoint's time", "s", "less", "metric.save_checkpoint_duration_mean_seconds"),
    ("checkpoint_rate", "a checkpoint's rate", "GB/s", "more", "metric.save_checkpoint_io_mean_GB_per_second",
     "", _GB),
    ("checkpoint_blocking", "training stood still for one", "s", "less", "headrace.checkpoint.blocking_s.mean"),
    ("checkpoint_size", "a checkpoint's size", "GB", None, "metric.checkpoint_size_GB", "", _GB),
    ("load_s", "reading a checkpoint back", "s", "less", "metric.load_checkpoint_duration_mean_seconds"),
    ("load_rate", "its rate", "GB/s", "more", "metric.load_checkpoint_io_mean_GB_per_second", "", _GB),
))  # fmt: skip
"""In the order of tables."""


_OF_COUNTED_STEPS: Final = {"au", "au_mlperf", "ceiling_au", "throughput", "io"}
_BY_MLCOMMONS: Final = "headrace.throughput_by_formula_samples_per_s.mlcommons"


def measure_named(name: str, of: Sequence[RunMeasure] = MEASURES) -> RunMeasure:
    """The measure of that name among those `of` a run, or others.

    Raises:
        ValueError: there is none; the nearest is named.
    """
    names = {measure.name: measure for measure in of}
    if name in names:
        return names[name]
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"no measure is called {name!r}: {hint}There are {', '.join(names)}")


def value_of(summary: dict[str, Any], measure: RunMeasure) -> float | None:
    """The measure's value in a summary.json, or None where it has none.

    DLIO writes an AU of 0 where no step counted: that is no value.
    """
    own = summary.get("headrace")
    unknown = isinstance(own, dict) and own.get("bound") == "unknown"
    if unknown and measure.name in _OF_COUNTED_STEPS:
        return None
    value = number_at(summary, measure.path)
    if value is None or not measure.per:
        return None if value is None else value * measure.scale
    whole = number_at(summary, measure.per)
    return 100 * value / whole if whole else None


def measured(runs: Sequence[RunResult], measure: RunMeasure) -> Confidence | None:
    """The measure over repeats: several folders, or, for AU, the repeats of one run.

    Returns:
        None unless every run has it.
    """
    values = [value_of(run.summary, measure) for run in runs]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if measure.name == "accelerators":  # a setting, which repeats have in common
        return Confidence(known[0], None, len(known))
    repeats = runs[0].own.get("au_percent")
    if len(runs) == 1 and measure.name == "au" and isinstance(repeats, dict):
        mean, half = number_of(repeats.get("mean")), number_of(repeats.get("confidence_95"))
        if mean is not None and half is not None:
            return Confidence(mean, half, int(number_of(repeats.get("runs")) or 2))
    return confidence(known)


_FORM: Final = re.compile(
    r"\s*(?P<name>[a-z]\w*)\s*(?P<sign><=|>=|<|>)\s*"
    r"(?P<bound>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)\s*"
)
_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Condition(NamedTuple):
    """A measure, and what it is held against."""

    measure: RunMeasure
    sign: str
    bound: float
    """In the measure's unit; of a change: as a fraction."""
    change: bool
    """It is about the change from one result to another."""
    written: str

    @property
    def reading(self) -> str:
        """How its bound is read, where that is not what is written: 0.9 of a percentage is 90 %."""
        match = None if self.change else _FORM.fullmatch(self.written)
        return f" ({self.bound:g} %)" if match and float(match["bound"]) != self.bound else ""

    def holds(self, value: float) -> bool:
        """Whether the value, or the change, is as the condition says."""
        return _SIGNS[self.sign](value, self.bound)


def condition_of(text: str, *, changes: bool, of: Sequence[RunMeasure] = MEASURES) -> Condition:
    """Read a condition: a measure's name, one of < <= > >=, a number, perhaps %.

    Args:
        text: `au < -2%`.
        changes: a percentage is a change from one result to another; else a value.
        of: what may be named.

    A bound of a percentage without % is a fraction up to 1, as DLIO has `metric.au`, and percent above.

    Raises:
        ValueError: it is no condition, or no measure has that name.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        expected = f"a measure, one of < <= > >=, and a number: {of[-1].name} < 0.9"
        if of is MEASURES:
            expected = "a measure, one of < <= > >=, and a number: au < -2%"
        raise ValueError(f"{text!r} is no condition, expected {expected}")
    measure = measure_named(match["name"], of)
    bound, percent = float(match["bound"]), bool(match["percent"])
    change = changes and percent
    if change:
        bound /= 100
    elif percent and measure.unit != "%":
        raise ValueError(f"{text!r}: {measure.name} is in {measure.unit or 'numbers'}, not in %")
    elif measure.unit == "%" and not percent and abs(bound) <= 1:
        bound *= 100
    return Condition(measure, match["sign"], bound, change, text.strip())


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One measure of two results."""

    measure: RunMeasure
    a: Confidence
    b: Confidence

    @property
    def change(self) -> float | None:
        """From a to b, as a fraction of a; None where a is 0 and b is not."""
        if self.a.mean == self.b.mean:
            return 0.0
        return self.b.mean / self.a.mean - 1 if self.a.mean else None

    @property
    def change_half_width(self) -> float | None:
        """Half of the change's 95 % interval, about; None without repeats on either side.

        Both sides' half widths are added as squares, which is Welch's interval but for its degrees of
        freedom; a side without repeats adds nothing that is known.
        """
        widths = [side.half_width for side in (self.a, self.b) if side.half_width is not None]
        if not widths or not self.a.mean:
            return None
        return math.hypot(*widths) / abs(self.a.mean)

    @property
    def clear(self) -> bool | None:
        """Whether the change is more than its interval; None where repeats on one side cannot tell."""
        widths = [side.half_width for side in (self.a, self.b) if side.half_width is not None]
        if widths and abs(self.b.mean - self.a.mean) <= math.hypot(*widths):
            return False
        return True if len(widths) == 2 else None

    @property
    def worse(self) -> bool | None:
        """Whether b is on the bad side of a; None where no side is, or where both print the same."""
        least = 0.005 if self.measure.unit == "%" else 0.0  # two digits are printed
        same = math.isclose(self.a.mean, self.b.mean, rel_tol=1e-6, abs_tol=least)
        if self.measure.better is None or same:
            return None
        return (self.b.mean < self.a.mean) == (self.measure.better == "more")

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "measure": self.measure.name, "title": self.measure.title, "unit": self.measure.unit,
            "a": self.a.document(), "b": self.b.document(), "change": self.change,
            "change_confidence_95": self.change_half_width, "clear": self.clear,
            "worse": self.worse,
        }  # fmt: skip


class RunComparison(NamedTuple):
    """Two results: the measures that both have, and how they were run otherwise."""

    rows: list[ComparisonRow]
    differences: tuple[tuple[str, str, str], ...]
    """(what, in a, in b): with these, figures may differ for another reason than the one looked for."""
    bounds: tuple[list[Bound], list[Bound]]
    """What bounds a, and b."""

    @property
    def values(self) -> dict[str, tuple[float, float | None]]:
        """What conditions are about: by a measure's name, b's value and the change to it."""
        return {row.measure.name: (row.b.mean, row.change) for row in self.rows}

    def judge(self, conditions: Sequence[Condition]) -> list[ConditionResult]:
        """Which conditions hold, and which of them say nothing about the storage. Raises as `judge` does."""
        results = judge(self.values, conditions)
        return [each._replace(doubt=self._doubt(each.condition)) for each in results]

    def _doubt(self, condition: Condition) -> str | None:
        sides = list(zip("AB", self.bounds, strict=True))[0 if condition.change else 1 :]
        by_host = [
            f"{name} was bound by {bound.name}"
            for name, bounds in sides
            for bound in bounds
            if bound.bound in BY_HOST
        ]
        if not by_host or condition.measure.better is None:
            return None
        return f"{', '.join(by_host)}: that says nothing about the storage"


class ConditionResult(NamedTuple):
    """A condition and whether it holds."""

    condition: Condition
    value: float
    holds: bool
    doubt: str | None = None
    """Why it says nothing about the storage; None where that is not known."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "condition": self.condition.written, "found": self.value, "holds": self.holds,
            "doubt": self.doubt,
        }  # fmt: skip


def compare(a: Sequence[RunResult], b: Sequence[RunResult]) -> RunComparison:
    """Compare two results, each of one run or of repeats.

    Throughputs by different formulas are no change of anything: they are computed anew by MLCommons', and left
    out where a result, as DLIO's own, does not say what that is.
    """
    measures = list(MEASURES)
    if len({run.own.get("throughput_formula") for run in (*a, *b)}) > 1:
        throughput = measure_named("throughput")
        title = f"{throughput.title}, MLCommons' formula"
        by_formula = throughput._replace(path=_BY_MLCOMMONS, title=title)
        measures[measures.index(throughput)] = by_formula
        measures.remove(measure_named("io"))
    rows = [
        ComparisonRow(measure, left, right)
        for measure in measures
        if (left := measured(a, measure)) and (right := measured(b, measure))
    ]
    bounds_a, bounds_b = (bounds_of([run.own for run in runs]) for runs in (a, b))
    return RunComparison(rows, tuple(differences(a[0], b[0])), (bounds_a, bounds_b))


def judge(
    values: Mapping[str, tuple[float, float | None]], conditions: Sequence[Condition]
) -> list[ConditionResult]:
    """Which conditions hold; `values`: by a measure's name the second result's, and the change to it.

    Raises:
        BenchError: one cannot be told: a gate that finds nothing to look at must not be open.
    """
    results = []
    for condition in conditions:
        name, untold = condition.measure.name, f"{condition.written!r} cannot be told"
        if name not in values:
            raise BenchError(
                f"{untold}: not both results have {name} ({condition.measure.title}).",
                next_step=f"Both have {', '.join(values) or 'nothing in common'}.",
            )
        result, change = values[name]
        value = change if condition.change else result
        if value is None:
            now = f"is {result:g}: no percentage says how much that is"
            raise BenchError(
                f"{untold}: {name} was 0 before, and {now}.",
                next_step="Give a bound without %: it is held against the second result itself.",
            )
        results.append(ConditionResult(condition, value, condition.holds(value)))
    return results
