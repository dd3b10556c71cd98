"""Metrics: figures from recorded timelines. Pure functions: no clock, no file, no thread.

DLIO has two throughput formulas. Upstream counts `len(steps) - 2` steps whatever the window is, so that four
steps of an epoch report a third less than was done and one step reports less than nothing; MLCommons' fork
counts the window. Both are here, named, because both are compared with results that exist. AU by MLPerf
Storage's rules is a third thing. Our own figures say where the time went, how it was spread, whether it was
steady, how sure we are, and whether the result is about the storage at all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from headrace.machine.host import CpuUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """What an accelerator's steps took."""

    load_s: NDArray[np.float64]
    """(steps,) the wait for each batch."""
    compute_s: NDArray[np.float64]
    """(steps,) the time each step computed."""

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.compute_s)

    @property
    def process_s(self) -> NDArray[np.float64]:
        """(steps,) DLIO's `proc`: wait and compute."""
        return self.load_s + self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block(StepTimes):
    """One accelerator's steps of an epoch, or of the part of one between two checkpoints."""

    epoch: int
    """From 1, as DLIO counts."""
    accelerator: int
    kind: Literal["train", "eval"] = "train"
    number: int = 1
    """Of its epoch's, from 1: checkpoints part an epoch into blocks."""
    start_s: float
    end_s: float
    harness_s: NDArray[np.float64]
    """(steps,) that the harness itself held the step up: it asked late for the batch, the processor or the
    whole process was taken from it, or another accelerator was held up so, and this one waited for it."""
    late_s: NDArray[np.float64]
    """(steps,) how late the end of each step was noticed."""

    @property
    def duration_s(self) -> float:
        """From its begin to its end."""
        return self.end_s - self.start_s


class CheckpointTimes(NamedTuple):
    """A checkpoint that was written or read back: by a process, or by all of them."""

    epoch: int
    number: int
    """Of its epoch, from 1."""
    start_s: float
    """Seconds since 1970."""
    duration_s: float
    """Until its bytes were where the writer promises them, or in memory."""
    nbytes: int
    blocking_s: float = 0.0
    """That training stood still for writing it."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps that count: without the first and the last few."""

    exclude_start: int = 1
    exclude_end: int = 0

    def bounds(self, steps: int) -> slice:
        """The steps that count, of `steps`."""
        return slice(self.exclude_start, max(self.exclude_start, steps - self.exclude_end))


Formula = Literal["upstream", "mlcommons"]


def _counted_time_s(block: Block, window: StepWindow) -> float:
    """The block's time without what the steps outside of the window took."""
    counted = window.bounds(block.steps)
    steps = block.process_s + block.harness_s
    return float(block.duration_s - steps[: counted.start].sum() - steps[counted.stop :].sum())


def block_au(block: Block, window: StepWindow) -> float:
    """DLIO's AU of a block in percent: compute of the window by its time; 0 without steps."""
    compute = float(block.compute_s[window.bounds(block.steps)].sum())
    time = _counted_time_s(block, window)
    # A clock's last digits must not make more than all of it.
    return min(100.0, 100 * compute / time) if compute > 0 and time > 0 else 0.0


def block_throughput(block: Block, batch: int, window: StepWindow, formula: Formula) -> float:
    """Samples per second of a block; of evaluation: all its steps by all its time, as DLIO does."""
    if block.kind == "eval":
        return block.steps / block.duration_s * batch if block.duration_s > 0 else 0.0
    time = _counted_time_s(block, window)
    if time <= 0:
        return 0.0
    counted = window.bounds(block.steps)
    steps = block.steps - 2 if formula == "upstream" else len(block.compute_s[counted])
    return steps / time * batch


class PhaseFigures(NamedTuple):
    """Training's or evaluation's figures, an entry an epoch; DLIO's statistics over them.

    Deviations are the population's.
    """

    au_percent: tuple[float, ...]
    """The mean of all accelerators."""
    au_mean_percent: float
    au_stdev_percent: float
    throughput: tuple[float, ...]
    """Samples/s, the sum of all accelerators."""
    throughput_mean: float
    throughput_stdev: float


def phase_figures(
    blocks: Sequence[Block], batch: int, window: StepWindow, formula: Formula
) -> PhaseFigures:
    """Figures of blocks of one kind, of any number of accelerators and epochs.

    An accelerator's epoch is the mean of its blocks, weighted by their steps. A block that has no step in the
    window, as a last step after a checkpoint, says nothing and does not count; DLIO counts it as an AU of 0.
    """
    au, rate = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    of_rank = defaultdict[tuple[int, int], list[Block]](list)
    for block in blocks:
        of_rank[block.epoch, block.accelerator].append(block)
    for (epoch, _), parts in sorted(of_rank.items()):
        weights = [p.steps if len(p.compute_s[window.bounds(p.steps)]) else 0 for p in parts]
        if sum(weights) == 0:
            weights = [1] * len(parts)
        aus = [block_au(part, window) for part in parts]
        rates = [block_throughput(part, batch, window, formula) for part in parts]
        au[epoch].append(float(np.average(aus, weights=weights)))
        rate[epoch].append(float(np.average(rates, weights=weights)))
    if not au:
        return PhaseFigures((), 0.0, 0.0, (), 0.0, 0.0)
    means = tuple(float(np.mean(of_epoch)) for of_epoch in au.values())
    sums = tuple(float(np.sum(of_epoch)) for of_epoch in rate.values())
    return PhaseFigures(
        means, float(np.mean(means)), float(np.std(means)),
        sums, float(np.mean(sums)), float(np.std(sums)),
    )  # fmt: skip


def mlperf_au(blocks: Sequence[Block], step_s: float) -> float:
    """AU in percent of training's blocks.

    Args:
        blocks: training's, of all accelerators. Running time is the sum of all epochs, each from its first
            accelerator's begin to its last one's end, without the longest first wait of the run.
        step_s: the compute time of a step that the workload asks for, its mean.

    Returns:
        0 without steps.
    """
    train = [block for block in blocks if block.kind == "train" and block.steps]
    if not train:
        return 0.0
    accelerators = len({block.accelerator for block in train})
    compute_s = sum(block.steps for block in train) / accelerators * step_s
    epochs = sorted({block.epoch for block in train})
    running_s = 0.0
    for epoch in epochs:
        of_epoch = [block for block in train if block.epoch == epoch]
        running_s += max(b.end_s for b in of_epoch) - min(b.start_s for b in of_epoch)
    begin = min(block.start_s for block in train if block.epoch == epochs[0])
    first = [float(b.load_s[0]) for b in train if b.epoch == epochs[0] and b.start_s == begin]
    running_s -= max(first)
    return 100 * compute_s / running_s if running_s > 0 else 0.0


_STUDENT_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
    2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; above, the normal's is near."""


class TimeShares(NamedTuple):
    """Where the counted time of all accelerators went, in seconds; they add up to `total_s`."""

    total_s: float
    compute_s: float
    wait_s: float
    harness_s: float
    barrier_s: float
    """Waiting for slower accelerators."""

    def of(self, name: str) -> float:
        """A part as a fraction of the total."""
        return float(getattr(self, f"{name}_s") / self.total_s) if self.total_s > 0 else 0.0


def shares_of(blocks: Sequence[Block], window: StepWindow) -> TimeShares:
    """Sum up training's blocks within the window.

    What an accelerator's own steps do not explain is the barrier, as far as the slowest of each step explain
    it; what it took beyond that to meet is the harness's. A block without a step in the window has no part.
    """
    total = compute = wait = harness = barrier = 0.0
    together = defaultdict[tuple[int, int], list[Block]](list)
    for block in blocks:
        if len(block.compute_s[window.bounds(block.steps)]):
            together[block.epoch, block.number].append(block)
    for parts in together.values():
        steps = np.array([block.process_s + block.harness_s for block in parts])
        behind = steps.max(axis=0).sum() - steps.sum(axis=1)
        for block, most in zip(parts, behind.tolist(), strict=True):
            counted, time = window.bounds(block.steps), _counted_time_s(block, window)
            spent = [
                float(each[counted].sum())
                for each in (block.compute_s, block.load_s, block.harness_s)
            ]
            left = max(0.0, time - sum(spent))
            total, compute, wait = total + time, compute + spent[0], wait + spent[1]
            barrier += min(left, most)
            harness += spent[2] + max(0.0, left - most)
    return TimeShares(total, compute, wait, harness, barrier)


class UncountedTime(NamedTuple):
    """Training's time outside of the window, in seconds of an accelerator."""

    all_s: float
    """Of all steps."""
    uncounted_s: float
    wait_s: float
    """For data, within `uncounted_s`."""


def uncounted_of(blocks: Sequence[Block], window: StepWindow) -> UncountedTime:
    """What the steps that do not count took, of all accelerators' mean."""
    accelerators = max(1, len({block.accelerator for block in blocks}))
    time = uncounted = wait = 0.0
    for block in blocks:
        counted = window.bounds(block.steps)
        time += block.duration_s
        uncounted += block.duration_s - _counted_time_s(block, window)
        wait += float(block.load_s.sum() - block.load_s[counted].sum())
    return UncountedTime(time / accelerators, uncounted / accelerators, wait / accelerators)


def percentiles(values_s: ArrayLike) -> dict[str, float]:
    """p50, p90, p99, p99.9, the greatest and the mean; empty without values."""
    values = np.asarray(values_s, np.float64)
    if not len(values):
        return {}
    figures = {f"p{q:g}": float(np.percentile(values, q)) for q in (50.0, 90.0, 99.0, 99.9)}
    return figures | {"max": float(values.max()), "mean": float(values.mean())}


class Confidence(NamedTuple):
    """A mean over repeats and its 95 % confidence interval."""

    mean: float
    half_width: float | None
    """None with a single run."""
    runs: int

    def document(self) -> Mapping[str, float | int | None]:
        """For JSON."""
        return {"mean": self.mean, "confidence_95": self.half_width, "runs": self.runs}


def confidence(values: Sequence[float]) -> Confidence:
    """Student's interval of the mean.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("values is empty, expected at least one run")
    count = len(values)
    mean = float(np.mean(values))
    if count == 1:
        return Confidence(mean, None, 1)
    quantile = _STUDENT_95[count - 2] if count - 2 < len(_STUDENT_95) else 1.96
    return Confidence(mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(count), count)


_MOSTLY: Final = 0.5
"""Of what was lost: who explains more of it bounds the run; who explains less is a doubt, told beside it."""

_DOUBT_LEAST: Final = 0.1
"""Of what was lost: less of it without any storage is not worth a word."""

_LOSS_LEAST = 1.0
"""Percent of AU below which nothing is worth a verdict."""


class BoundVerdict(NamedTuple):
    """What bounds a run, and why, with figures."""

    bound: Literal["compute", "storage", "page cache", "processors", "harness", "unknown"]
    reason: str


class Bound(NamedTuple):
    """What bounds some of the runs of a result."""

    bound: str
    reason: str
    """The first such run's."""
    runs: int
    of_runs: int

    @property
    def name(self) -> str:
        """With the number of runs, where there are several."""
        if self.of_runs == 1:
            return self.bound
        return f"{self.bound} ({self.runs} of {self.of_runs} runs)"

    @property
    def line(self) -> str:
        """For people."""
        first = ", the first of these" * (self.runs > 1)
        return f"bound by {self.name}{first}: {self.reason}"


def bounds_of(results: Sequence[Mapping[str, Any]]) -> list[Bound]:
    """What bounds a run or repeats, the most frequent first; none where, as in DLIO's results, nobody says so.

    Args:
        results: what each run's summary.json has below `headrace`.
    """
    each: list[Mapping[str, Any]] = []
    for own in results:
        repeats = own.get("bound_of_repeats")
        each += (
            [own] if not isinstance(repeats, list) else [r for r in repeats if isinstance(r, dict)]
        )
    known = [(str(own["bound"]), str(own.get("bound_reason"))) for own in each if own.get("bound")]
    reasons = dict(reversed(known))
    counts = Counter(bound for bound, _ in known).most_common()
    return [Bound(bound, reasons[bound], runs, len(each)) for bound, runs in counts]


BY_HOST: Final = frozenset({"harness", "processors"})
"""Bounds of the host that emulates: a figure then says nothing about the storage."""
_HARNESS: Final = "the harness (this host, which was late with emulating accelerators)"
_SAYS_NOTHING: Final = "; the figure says nothing about the storage: "
_NOT_THE_STORAGE: Final = (
    f"{_SAYS_NOTHING}give this host less to do besides, fewer accelerators or longer steps"
)
_NOT_COLD: Final = (
    f"{_SAYS_NOTHING}read more data than this host's memory holds, or put them out of it and read them once "
    "(headrace bench run --cold ++workload.train.epochs=1)"
)
_NO_STEP: Final = (
    "no step counted (as in DLIO the first of an epoch does not), so AU and throughput say nothing: give each "
    "accelerator more steps, by more files, fewer accelerators or a smaller batch"
)
_UNKNOWN: Final = CpuUse()
_LATE_LEAST: Final = 0.05
"""Of a step: whose end is noticed so late, and `_LATE_LEAST_S`, was late."""
_LATE_LEAST_S: Final = 0.001
_BUSY_LEAST: Final = 0.9
"""Of the processors: with more of them busy, what waits may wait for one."""
CACHED_LEAST: Final = 0.5
"""Of a run's bytes: with more from the page cache it is that which was measured."""


def cached_share(
    nbytes: int, device_bytes: int, resident: float | None, epochs: int
) -> float | None:
    """The share of a run's bytes that came from the page cache; None where that cannot be known.

    Args:
        nbytes: that were read.
        device_bytes: that the kernel counted as read from devices. Not every file system does: where it counted
            fewer than what was not in memory before, its count is worth nothing.
        resident: the share of the data in the page cache before.
        epochs: how often the data were read.
    """
    if not nbytes or resident is None:
        return None
    counted = device_bytes / nbytes
    if counted < (1 - resident) / max(1, epochs) / 2:
        return None
    return max(0.0, 1 - counted)


def verdict_of(  # noqa: C901, PLR0911, PLR0917 - all that is known
    au: float, ceiling_au: float | None, shares: TimeShares, late_s: Mapping[str, float], step_s: float,
    accelerators: int = 1, cached: float | None = None, cpu_use: CpuUse = _UNKNOWN, cpus: int = 0,
) -> BoundVerdict:  # fmt: skip
    """Decide what lost the accelerators' time; of the bytes `cached` is the page cache's share, if known.

    The harness bounds a run of which it explains the most: by what it took, by how late the ends of steps were
    noticed on the whole (`late_s`, percentiles and the mean), or by what it loses without any storage. Where
    all `cpus` of the hosts were busy, nobody can tell waiting for data from waiting for a processor.
    """
    source: Literal["storage", "page cache"] = "storage"
    instead = beside = ""
    if cached is not None and cached >= CACHED_LEAST:
        source, instead = "page cache", f": {cached:.0%} of the bytes came from there{_NOT_COLD}"
        beside = f"; {cached:.0%} of the bytes came from the page cache{_NOT_COLD}"
    lost, wait, harness = 100 - au, shares.of("wait"), shares.of("harness")
    barrier = shares.of("barrier")
    if not shares.total_s:
        return BoundVerdict("unknown", _NO_STEP)
    if lost <= _LOSS_LEAST:
        return BoundVerdict("compute", f"AU is {au:.2f} %: the {source} keeps up{instead}")
    late, doubt = _lateness(late_s, step_s, shares)
    if late > _MOSTLY:
        reason = f"{doubt}; {harness:.1%} of the time went to {_HARNESS}"
        return BoundVerdict("harness", f"{reason}{_NOT_THE_STORAGE}")
    alone = 0.0 if ceiling_au is None else (100 - ceiling_au) / lost
    if alone > _MOSTLY:
        reason = f"without any storage AU is {ceiling_au:.2f} %, with it {au:.2f} %: "
        reason += f"{_HARNESS} alone loses {alone:.0%} of what is lost"
        return BoundVerdict("harness", f"{reason}{_NOT_THE_STORAGE}")
    if harness > wait + barrier:
        reason = f"{harness:.1%} of the time went to {_HARNESS}, {wait:.1%} to waiting for data, "
        reason += f"{barrier:.1%} to waiting at the barrier"
        return BoundVerdict("harness", f"{reason}{_NOT_THE_STORAGE}")
    if barrier > accelerators * (wait + harness):  # more than one can hold up all others
        longer = "at the barrier for accelerators that computed longer"
        return BoundVerdict("compute", f"{barrier:.1%} of the time was waiting {longer}")
    waited = f"{wait:.1%} of the time was waiting for data, {harness:.1%} went to the harness"
    if barrier >= 0.0005:  # else it prints as 0
        did = " that did" * (barrier > wait)
        waited += f", {barrier:.1%} to waiting at the barrier for others{did}"
    if ceiling_au is not None:
        waited += f"; without storage AU is {ceiling_au:.2f} %"
        waited += f", {alone:.0%} of what was lost" * (alone >= _DOUBT_LEAST)
    if busy := sum(cpu_use) >= _BUSY_LEAST * cpus:
        waited += f", while this run had {cpu_use.own:.1f} of {cpus} processors and other programs "
        waited += f"{cpu_use.others:.1f}"
    waited += f"; {doubt}" * bool(doubt)
    if busy:
        return BoundVerdict("processors", f"{waited}{_NOT_THE_STORAGE}{beside}")
    return BoundVerdict(source, f"{waited}{instead}")


def _lateness(late_s: Mapping[str, float], step_s: float, shares: TimeShares) -> tuple[float, str]:
    """The share of what was lost that late ends of steps can explain at most, and, where any were late, so."""
    p99_s = late_s.get("p99", 0.0)
    lost_s = shares.total_s - shares.compute_s
    if step_s <= 0 or lost_s <= 0 or p99_s <= max(_LATE_LEAST_S, _LATE_LEAST * step_s):
        return 0.0, ""
    explained = min(1.0, late_s["mean"] / step_s * shares.compute_s / lost_s)
    return explained, (
        f"ends of steps were noticed up to {p99_s * 1e3:.2f} ms late (p99; steps take {step_s * 1e3:.2f} ms), "
        f"which explains at most {explained:.1%} of what was lost"
    )
