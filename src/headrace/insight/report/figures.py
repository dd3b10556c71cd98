"""Figures: a rank's steps as running sums, and all ranks of a run together: what the page and the text say.

Sums are kept at some moments and steps: as large for 100 steps as for 10^7. They stay exact where they are
kept: what happened between two moments is a difference, and a wait that spans several moments is shared out
among them. Beside the steps: what stages, tuner and machine reported over time, that is latencies of reads,
knobs and decisions. Ranks are read one after the other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from headrace.base.causes import WORTH_NAMING, Cause
from headrace.control.stalls import Evidence, verdict_of
from headrace.control.stalls.verdict import causes_by_step
from headrace.insight.report.starts import pauses_between, restart_text, steps_again
from headrace.plane.batch_trace import PHASES
from headrace.plane.stage import KNOBS, LATENCY_BUCKETS, TIER_WORDS, TIERS
from headrace.trace.format import finite
from headrace.trace.run import rank_traces, run_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from headrace.control.stalls import Verdict
    from headrace.trace import RankTrace


class Decision(NamedTuple):
    """A decision of the tuner; `change` is what it turned, in words, '' if nothing."""

    at_unix_s: float
    rank: int
    action: str
    change: str
    reason: str
    evidence: str


class Latencies(NamedTuple):
    """Reads that finished between two looks (Unix times), by how long they took: (`LATENCY_BUCKETS`,)."""

    from_s: float
    to_s: float
    counts: NDArray[np.float64]


def decisions_of(trace: RankTrace) -> Iterator[Decision]:
    """The tuner's decisions, in their order."""
    for event in trace.of_kind("decision"):
        before, after = _dict(event.get("before")), _dict(event.get("after"))
        turned = [
            f"{name} {finite(before.get(name)):,.0f} to {finite(after.get(name)):,.0f}"
            for name in KNOBS
            if before.get(name) != after.get(name)
        ]
        yield Decision(
            trace.unix_s(finite(event["at_s"])), trace.rank, _text(event.get("action")),
            ", ".join(turned), _text(event.get("reason")), _text(event.get("evidence")),
        )  # fmt: skip


def knobs_of(trace: RankTrace) -> dict[str, list[tuple[float, float]]]:
    """Where each knob stood over time: (Unix time, value), only those that there are."""
    values: dict[str, list[tuple[float, float]]] = {}
    for event in trace.of_kind("look"):
        knobs = _dict(event.get("knobs"))
        for name in KNOBS:
            if (value := finite(knobs.get(name))) > 0:
                values.setdefault(name, []).append((trace.unix_s(finite(event["at_s"])), value))
    return values


def latencies_of(trace: RankTrace) -> Iterator[Latencies]:
    """Reads between each two looks, of the stage that reads most."""
    looks = [
        (trace.unix_s(finite(event["at_s"])), _histogram(_dict(event.get("stages"))))
        for event in trace.of_kind("look")
    ]
    for (from_s, before), (at_s, counts) in pairwise(looks):
        if at_s > from_s:
            grown = counts - before
            yield Latencies(from_s, at_s, counts if np.any(grown < 0) else grown)  # it began anew


def _histogram(stages: Mapping[str, Any]) -> NDArray[np.float64]:
    histograms = [_dict(_dict(stage).get("latency_us")) for stage in stages.values()]
    most = max(histograms, key=lambda counts: sum(map(finite, counts.values())), default={})
    return np.array([max(0.0, finite(most.get(str(at)))) for at in range(LATENCY_BUCKETS)])


def evidence_of(trace: RankTrace) -> Evidence:
    """What was known of the run beside its steps, when it was last looked at."""
    last: Mapping[str, Any] = next(iter(reversed(trace.of_kind("evidence"))), {})
    written = _dict(last.get("found"))
    known = {each.name: written[each.name] for each in fields(Evidence) if each.name in written}
    return Evidence(**known).sane()


_TEXT_MAX: Final = 400


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:_TEXT_MAX] if isinstance(value, str) else ""


# -- curves ------------------------------------------------------------------------------------------

CAUSES: Final = {cause: f"for_{cause.value}" for cause in Cause}
"""The column of each cause. A slower rank is not seen in one rank's steps: its column stays 0."""

COLUMNS: Final = ("worked_s", "waited_s", "samples", "steps", *PHASES, *TIERS, *CAUSES.values())
"""What is added up."""

_AT_ONCE: Final = 1 << 16
"""Steps whose causes are found together: what that takes is many times as large as they are."""

POINTS: Final = 512

SLOWEST: Final = 12


def columns_of(sums: NDArray[np.float64], *names: str) -> NDArray[np.float64]:
    """Some columns of sums, by name, along the last axis."""
    return sums[..., [COLUMNS.index(name) for name in names]]


def stall_of(sums: NDArray[np.float64]) -> float:
    """Share of the time that was waited, of sums by `COLUMNS`."""
    worked, waited = columns_of(sums, "worked_s", "waited_s")
    return float(waited / (worked + waited)) if worked + waited > 0 else 0.0


class EpochSum(NamedTuple):
    """One epoch, on a rank or on all: its sums by `COLUMNS`, and when it was gone through, in Unix time.

    `first` and `last` are the positions at which its first and its last step begin.
    """

    epoch: int
    sums: NDArray[np.float64]
    began_s: float
    ended_s: float
    first: float = 0.0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        """From its first request to its last delivery, on whichever rank."""
        return self.ended_s - self.began_s

    @property
    def stall(self) -> float:
        """Share of the ranks' time."""
        return stall_of(self.sums)

    def of(self, name: str) -> float:
        """One column."""
        return float(self.sums[COLUMNS.index(name)])


@dataclass(frozen=True, slots=True)
class Curves:
    """One trace, of bounded size."""

    rank: int
    world_size: int
    process: str  # see `RankTrace`, as for `origin`
    origin: str
    times: NDArray[np.float64]  # Unix seconds, shape (points,)
    over_time: NDArray[np.float64]  # sums up to these, shape (points, columns)
    ordinals: NDArray[np.float64]  # steps of this trace, shape (points,)
    over_steps: NDArray[np.float64]
    epochs: list[EpochSum]
    slowest: NDArray[np.void]  # the longest waits, dtype `STEP`
    total: NDArray[np.float64]  # of all steps


def curves_of(trace: RankTrace, evidence: Evidence) -> Curves:
    """Add a trace's steps up; `evidence` is what else is known of them."""
    steps = trace.steps
    sums = np.zeros((len(steps) + 1, len(COLUMNS)))
    amounts = sums[1:]
    worked_s = _add_amounts(amounts, steps, evidence)
    looks = [finite(one["from_peers"]) for one in trace.of_kind("look") if "from_peers" in one]
    at = [COLUMNS.index(name) for name in ("source", "peer")]
    served = amounts[:, at[0]] * min(1.0, max(0.0, looks[-1] if looks else 0.0))
    amounts[:, at] += np.stack([-served, served], axis=1)  # a step knows not who served it
    epochs = _epochs(steps, amounts, trace.began_unix_s - trace.began_s)
    for column in range(len(COLUMNS)):  # in place: of a long run they take gigabytes
        amounts[:, column] = np.cumsum(amounts[:, column])
    ordinals = np.linspace(0, len(steps), min(POINTS, len(steps)) + 1).round()
    times, over_time = _over_time(steps, sums, worked_s)
    slowest = np.argsort(steps["asked_s"] - steps["delivered_s"], kind="stable")[:SLOWEST]
    return Curves(
        rank=trace.rank, world_size=trace.world_size, process=trace.process or trace.path,
        origin=trace.origin,
        times=times + (trace.began_unix_s - trace.began_s),
        over_time=over_time, ordinals=ordinals, over_steps=sums[ordinals.astype(np.int64)],
        epochs=epochs, slowest=steps[slowest], total=sums[-1],
    )  # fmt: skip


def _add_amounts(
    amounts: NDArray[np.float64], steps: NDArray[np.void], evidence: Evidence
) -> NDArray[np.float64]:
    """Fill in what each step adds, shape (steps, columns); return how long its consumer worked before it."""
    waited_s = steps["delivered_s"] - steps["asked_s"]
    worked_s = np.zeros(len(steps))
    if len(steps):
        # Between two passes nobody worked on a batch: validation, a checkpoint, or a resume.
        epoch, step = (np.diff(steps[name].astype(np.int64)) for name in ("epoch", "step"))
        same = (epoch == 0) & (step > 0)
        between = steps["asked_s"][1:] - steps["delivered_s"][:-1]
        worked_s[1:] = np.where(same & (between > 0), between, 0.0)
    amounts[:, :4] = np.stack(
        [worked_s, waited_s, steps["samples"] - steps["left_out"], np.ones(len(steps))], axis=1
    )
    phases = steps["waited_s"].astype(np.float64)
    # They add up to the wait, but for rounding; what a foreign trace does not say is `read`.
    total = phases.sum(axis=1)
    scale = np.divide(waited_s, total, out=np.zeros_like(total), where=total > 0)
    phases *= scale[:, None]
    phases[total <= 0, PHASES.index("read")] = waited_s[total <= 0]
    first = 4 + len(PHASES)
    amounts[:, 4:first] = phases
    amounts[:, first : first + len(TIERS)] = steps["bytes"]
    for at in range(0, len(steps), _AT_ONCE):
        rows = slice(at, at + _AT_ONCE)
        amounts[rows, first + len(TIERS) :] = causes_by_step(steps[rows], evidence)
    return worked_s


def _over_time(
    steps: NDArray[np.void], sums: NDArray[np.float64], worked_s: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums at even moments: a step's work grows until the next batch is asked for, then all else does."""
    if not len(steps):
        return np.zeros(1), np.zeros((1, len(COLUMNS)))
    asked, delivered = steps["asked_s"], np.maximum.accumulate(steps["delivered_s"])
    times = np.linspace(asked[0] - worked_s[0], delivered[-1], POINTS)
    at = np.minimum(np.searchsorted(delivered, times), len(steps) - 1)
    before, after = sums[at], sums[at + 1]
    waited = _share(times - asked[at], delivered[at] - asked[at])
    over_time = before + (after - before) * waited[:, None]
    worked = _share(times - asked[at] + worked_s[at], worked_s[at])
    over_time[:, 0] = before[:, 0] + (after - before)[:, 0] * worked
    return times, over_time


def _share(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far something has come, 0 to 1; what takes no time is done as soon as it has begun."""
    done = np.where(part >= 0, 1.0, 0.0)
    return np.clip(np.divide(part, whole, out=done, where=whole > 0), 0.0, 1.0)


def _epochs(
    steps: NDArray[np.void], amounts: NDArray[np.float64], offset_s: float
) -> list[EpochSum]:
    if not len(steps):
        return []
    order = np.argsort(steps["epoch"], kind="stable")
    if np.all(np.diff(order) == 1):  # without a copy: of a long run they take gigabytes
        order = slice(None)  # type: ignore[assignment]
    numbers, begins = np.unique(steps["epoch"][order], return_index=True)
    sums = np.add.reduceat(amounts[order], begins, axis=0)
    began = np.minimum.reduceat(steps["asked_s"][order], begins) + offset_s
    ended = np.maximum.reduceat(steps["delivered_s"][order], begins) + offset_s
    first = np.minimum.reduceat(steps["position"][order], begins).astype(float)
    last = np.maximum.reduceat(steps["position"][order], begins).astype(float)
    spans = (each.tolist() for each in (began, ended, first, last))
    each = zip(numbers.tolist(), sums, *spans, strict=True)
    return [EpochSum(*one) for one in islice(each, _EPOCHS_MAX)]


_EPOCHS_MAX: Final = 4096


PHASE_WORDS: Final = {
    "start": "starting the epoch",
    "hold": "held back",
    "open": "opening files",
    "read": "reading",
    "queue": "waiting for a decoder",
    "decode": "decoding",
    "collate": "collating",
    "transfer": "copying to the device",
    "hand": "handing over",
}

TIER_COLOURS: Final = {"ram": "c5", "page_cache": "c3", "disk": "c1", "peer": "c6", "source": "c2"}

_CAUSE_COLOURS: Final = ("c1", "c2", "c3", "c5", "c6", "c7", "c8")


def cause_word(cause: Cause) -> str:
    """`slow rank`."""
    return cause.value.replace("_", " ")


def cause_colours(causes: Iterable[Cause]) -> dict[Cause, str]:
    """The class of each cause's colour on one page.

    There are more causes than colours that all eyes tell apart: the largest have one each, in their order;
    the rest, and what nothing explains, are grey.
    """
    known = [cause for cause in causes if cause is not Cause.OTHER]
    return dict.fromkeys(Cause, "c4") | dict(zip(known, _CAUSE_COLOURS, strict=False))


assert set(PHASE_WORDS) == set(PHASES)
assert set(TIER_WORDS) == set(TIER_COLOURS) == set(TIERS)


# -- figures -----------------------------------------------------------------------------------------

_JUDGED_RANKS: Final = 8
_JUDGED_STEPS: Final = 4000
"""The verdict looks at the last steps of the ranks that waited most: it goes through them one by one."""

_DECISIONS_MOST: Final = 2000
_KNOBS_OF_RANK: Final = 1  # knobs are drawn of one rank: those of the others go much the same way


@dataclass(slots=True)
class TraceGroup:
    """Traces together: of a rank, over all its loaders and attempts, or of a loader, on all ranks."""

    about: RankTrace  # the first of them, without its steps
    curves: list[Curves] = field(default_factory=list)

    @property
    def total(self) -> NDArray[np.float64]:
        """By `COLUMNS`."""
        return sum((curve.total for curve in self.curves), np.zeros(len(COLUMNS)))

    def epochs(self) -> list[EpochSum]:
        """Each epoch over all ranks."""
        epochs: dict[int, EpochSum] = {}
        for one in (one for curve in self.curves for one in curve.epochs):
            other = epochs.get(one.epoch, one)
            began_s, ended_s = min(one.began_s, other.began_s), max(one.ended_s, other.ended_s)
            sums = one.sums if other is one else one.sums + other.sums
            epochs[one.epoch] = EpochSum(one.epoch, sums, began_s, ended_s)
        return [epochs[number] for number in sorted(epochs)]

    def by_step(self, bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Where bins of a rank's steps begin and end, and sums over all ranks, shape (bins, columns)."""
        # A rank's attempts lie one behind the other.
        lines: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for curve in self.curves:
            start = np.zeros(1), np.zeros((1, len(COLUMNS)))
            steps, values = lines.get(curve.rank, start)
            lines[curve.rank] = (
                np.concatenate([steps, steps[-1] + curve.ordinals[1:]]),
                np.concatenate([values, values[-1] + curve.over_steps[1:]]),
            )
        longest = max((float(steps[-1]) for steps, _ in lines.values()), default=0.0)
        edges = np.linspace(0, longest, max(1, min(bins, int(longest))) + 1).round()
        sums = np.zeros((len(edges), len(COLUMNS)))
        for steps, values in lines.values():
            for column in range(len(COLUMNS)):
                sums[:, column] += np.interp(edges, steps, values[:, column])
        return edges, np.diff(sums, axis=0)


@dataclass(slots=True)
class TraceFigures:
    """A run."""

    path: str
    facts: Mapping[str, Any]  # run.json
    loaders: list[TraceGroup] = field(default_factory=list)  # the one with the most time first
    ranks: list[TraceGroup] = field(default_factory=list)  # by rank
    decisions: list[Decision] = field(default_factory=list)
    knobs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Of one rank over time: name to (Unix time, value)."""
    latencies: list[Latencies] = field(default_factory=list)  # of reads, over time, all ranks
    causes: dict[Cause, float] = field(default_factory=dict)
    """Seconds of all ranks by cause, the largest first: they add up to what was waited."""
    slower_s: float = 0.0
    """For so long, about, ranks that had their data waited for slower ones; no part of what was waited."""
    verdict: Verdict | None = None  # of the rank that waited most; None: no steps
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Unix times between which no rank had a step, since the run was started again."""
    again: int = 0  # steps that came again in a later start
    notes: list[str] = field(default_factory=list)  # what is not as it should be with the traces
    hosts: int = 0
    traces: int = 0

    @property
    def main(self) -> TraceGroup | None:
        """The loader with the most time; None: no step was written."""
        return self.loaders[0] if self.loaders else None

    @property
    def total(self) -> NDArray[np.float64]:
        """By `COLUMNS`, of all ranks and loaders."""
        return sum((loader.total for loader in self.loaders), np.zeros(len(COLUMNS)))

    @property
    def span_s(self) -> tuple[float, float]:
        """Unix times of the first step and the last."""
        curves = [curve for rank in self.ranks for curve in rank.curves]
        first = min((float(curve.times[0]) for curve in curves), default=0.0)
        return first, max((float(curve.times[-1]) for curve in curves), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        first, last = self.span_s
        return last - first

    @property
    def slower(self) -> float:
        """Share of the ranks' time that was waited for slower ranks, about."""
        worked_s = self.of("worked_s")
        return min(self.slower_s, worked_s) / ((self.of("waited_s") + worked_s) or 1.0)

    @property
    def names_causes(self) -> bool:
        """Whether ranks waited enough for it to be worth naming: for their data, or for ranks that had none."""
        return max(stall_of(self.total), self.slower) >= WORTH_NAMING

    @property
    def restart(self) -> str:
        """What is to be said of starts after the first; "" if there were none."""
        return restart_text(self.pauses, self.again, self.span_s[0], ranks=len(self.ranks))

    def of(self, name: str) -> float:
        """A column of the total."""
        return float(self.total[COLUMNS.index(name)])

    def over_time(self, bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Unix times where bins begin and end, and sums of each rank in them, shape (ranks, bins, columns)."""
        first, last = self.span_s
        edges = np.linspace(first, last, bins + 1)
        grown = np.zeros((len(self.ranks), bins, len(COLUMNS)))
        for row, rank in enumerate(self.ranks):
            for curve in rank.curves:
                for column in range(len(COLUMNS)):
                    sums = np.interp(edges, curve.times, curve.over_time[:, column])
                    grown[row, :, column] += np.diff(sums)
        return edges, grown

    def latency_map(self, bins: int) -> NDArray[np.float64]:
        """Reads by bin of time and bucket of latency, shape (bins, buckets)."""
        first, last = self.span_s
        reads = np.zeros((bins, LATENCY_BUCKETS))
        width = (last - first) / bins if last > first else 1.0
        for one in self.latencies:
            low = int(np.clip((one.from_s - first) // width, 0, bins - 1))
            high = int(np.clip((one.to_s - first) // width, low, bins - 1))
            reads[low : high + 1] += one.counts / (high - low + 1)
        return reads


def run_figures(folder: str) -> TraceFigures:
    """Add a run up; raises TraceError if the folder is no run's, or damaged."""
    run = TraceFigures(folder, run_facts(folder))
    loaders: dict[tuple[str, ...], TraceGroup] = {}
    ranks: dict[int, TraceGroup] = {}
    judged: dict[tuple[str, ...], list[_JudgedTrace]] = {}
    notes = Counter[str]()
    for trace in rank_traces(folder):
        run.traces += 1
        _note(trace, notes)
        if not len(trace.steps):
            continue
        alike = (trace.fingerprint, trace.order_digest, trace.source, trace.framework)
        about = replace(trace, steps=trace.steps[:0])
        evidence = evidence_of(trace)
        curves = curves_of(trace, evidence)
        loaders.setdefault(alike, TraceGroup(about)).curves.append(curves)
        ranks.setdefault(trace.rank, TraceGroup(about)).curves.append(curves)
        # The last steps of the ranks that waited most, for the verdict. A trace's number breaks ties.
        waited_s = float(columns_of(curves.total, "waited_s")[0])
        most = judged.setdefault(alike, [])
        last = trace.steps[-_JUDGED_STEPS:].copy()
        one = _JudgedTrace(waited_s, -run.traces, curves, last, evidence)
        (heapq.heappush if len(most) < _JUDGED_RANKS else heapq.heappushpop)(most, one)
        run.decisions += decisions_of(trace)
        run.latencies += latencies_of(trace)
        if len(ranks) <= _KNOBS_OF_RANK and not run.knobs:
            run.knobs = knobs_of(trace)
    seconds = {
        a: columns_of(each.total, "worked_s", "waited_s").sum() for a, each in loaders.items()
    }
    by_seconds = sorted(loaders, reverse=True, key=seconds.__getitem__)
    run.loaders = [loaders[alike] for alike in by_seconds]
    run.ranks = [ranks[rank] for rank in sorted(ranks)]
    run.pauses = pauses_between([curve for rank in run.ranks for curve in rank.curves])
    run.again = sum(steps_again(loader.curves) for loader in run.loaders)
    run.hosts = len({rank.about.host for rank in run.ranks})
    run.decisions = sorted(run.decisions, key=lambda one: one.at_unix_s)[:_DECISIONS_MOST]
    run.notes = [f"{what}: {count} of {run.traces} traces" for what, count in notes.most_common(20)]
    if by_seconds:
        run.causes = {cause: s for cause, s in causes_of(run.total).items() if s > 0}
        _judge(run, judged[by_seconds[0]])
    return run


class _JudgedTrace(NamedTuple):
    waited_s: float
    order: int  # less its number: breaks ties
    curves: Curves
    steps: NDArray[np.void]  # its last
    evidence: Evidence


def _note(trace: RankTrace, notes: Counter[str]) -> None:
    if trace.cut:
        notes[trace.cut.partition(": the last")[0]] += 1
    if trace.lost:
        notes["some steps came faster than they were written"] += 1
    evidence = trace.of_kind("evidence")[-1:]
    if trace.steps["left_out"].any() or any(finite(e.get("skipped")) > 0 for e in evidence):
        notes["samples were left out"] += 1


def _judge(run: TraceFigures, judged: list[_JudgedTrace]) -> None:
    """Why the rank that waited most waited, and how long ranks waited for slower ones.

    Each step says why it waited itself. That a rank waited for a slower one is seen only where ranks are
    compared: over the last steps of some.
    """
    slower_s = steps = 0.0
    for one in sorted(judged, key=lambda one: one[:2], reverse=True):
        # Steps of another start of the run have the same numbers: the trace that ran beside this one counts.
        beside = [(_together_s(one.curves, each.curves), each) for each in judged]
        others = {
            each.curves.rank: each.steps
            for seconds, each in sorted(beside, key=lambda pair: pair[0])
            if seconds > 0 and each.curves.rank != one.curves.rank
        }
        verdict = verdict_of(one.steps, one.evidence, others)
        run.verdict = run.verdict or verdict
        slower_s += verdict.causes.get(Cause.SLOW_RANK, 0.0)
        steps += len(one.steps)
    run.slower_s = slower_s * run.of("steps") / steps


def _together_s(one: Curves, other: Curves) -> float:
    """For how long both delivered; less than 0: never."""
    return float(min(one.times[-1], other.times[-1]) - max(one.times[0], other.times[0]))


def _by_name(
    names: Iterable[_Key], columns: Iterable[str], sums: NDArray[np.float64]
) -> dict[_Key, float]:
    """Amounts by name, the largest first."""
    amounts = zip(names, columns_of(sums, *columns).tolist(), strict=True)
    return dict(sorted(amounts, key=lambda item: -item[1]))


_Key = TypeVar("_Key")


def causes_of(sums: NDArray[np.float64]) -> dict[Cause, float]:
    """Seconds by cause, of sums by `COLUMNS`; the largest first."""
    return _by_name(CAUSES, CAUSES.values(), sums)


def phases_of(sums: NDArray[np.float64]) -> dict[str, float]:
    """Seconds by phase, of sums by `COLUMNS`; the largest first."""
    return _by_name(PHASES, PHASES, sums)


def tiers_of(sums: NDArray[np.float64]) -> dict[str, float]:
    """Bytes by tier, of sums by `COLUMNS`, only those that are not 0."""
    counts = zip(TIERS, columns_of(sums, *TIERS).tolist(), strict=True)
    return {tier: count for tier, count in counts if count > 0}
