"""Timeline: a run's steps placed in time, and its slowest for trace viewers (chrome://tracing, Perfetto).

Files of results say how long steps waited and computed, not when they began. All
begin together, when the slowest has ended the one before; what then still lacks to the block's end was
the barrier between processes, and is given to all steps alike.

Names and categories of a trace are those that DFTracer's conventions for AI give and DLIO uses: `fetch.iter`
of `dataloader`, `compute`, `barrier` of `comm`, and `epoch.block`, `train`, `evaluate` of `pipeline`; so
DFTracer's analysis finds what it looks for. A process of the trace is an accelerator. Runs with DFTRACER_ENABLE
write a trace of every step, each accelerator its own, as DLIO does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.summary import NOT_MLPERF

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.bench.metrics import CheckpointTimes
    from headrace.bench.results import RankBlock


@dataclass(frozen=True, slots=True, eq=False)
class StepPhase:
    """The same block on all accelerators: an epoch's training or evaluation.

    Attributes:
        blocks: one for each accelerator, with as many steps each.
        begin_s: (accelerators, steps) when each step began, from the phase's own begin.
        end_s: (accelerators, steps) when it was over, with the barrier behind it.
    """

    blocks: tuple[RankBlock, ...]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """Of each accelerator."""
        return self.blocks[0].steps

    @property
    def waits_s(self) -> NDArray[np.float64]:
        """(accelerators, steps) the waits for data."""
        return np.array([block.load_s for block in self.blocks])


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took long."""

    phase: StepPhase
    step: int
    rank: int
    duration_s: float
    wait_s: float
    compute_s: float


def phases_of(blocks: Sequence[RankBlock]) -> list[StepPhase]:
    """Place all steps of all accelerators in time; of those of one phase the steps that all have."""
    grouped: dict[tuple[int, bool, str], list[RankBlock]] = defaultdict(list)
    for block in blocks:
        grouped[block.epoch, block.kind == "eval", block.name].append(block)
    phases = [_phase(grouped[key]) for key in sorted(grouped)]
    return [phase for phase in phases if phase is not None]


def _phase(parts: Sequence[RankBlock]) -> StepPhase | None:
    steps = min(block.steps for block in parts)
    if not steps:
        return None
    even = [replace(b, load_s=b.load_s[:steps], compute_s=b.compute_s[:steps]) for b in parts]
    process = np.array([block.process_s for block in even])
    ends = np.cumsum(np.broadcast_to(process.max(axis=0), process.shape), axis=1)
    starts = [block.start_s for block in even if block.start_s is not None]
    over = [block.end_s for block in even if block.end_s is not None]
    if starts and over:
        slack = max(0.0, max(over) - min(starts) - float(ends[0, -1])) / steps
        ends = ends + slack * np.arange(1, steps + 1)
    begins = np.hstack([np.zeros((len(even), 1)), ends[:, :-1]])
    return StepPhase(tuple(even), begins, ends)


def slowest_steps(phases: Sequence[StepPhase], count: int) -> list[SlowStep]:
    """The steps that took longest on any accelerator, the longest first."""
    slow = []
    for phase in phases:
        process = np.array([block.process_s for block in phase.blocks], np.float64)
        longest, slowest = process.max(axis=0), process.argmax(axis=0)
        for step in np.argsort(-longest, kind="stable")[:count].tolist():
            block = phase.blocks[slowest[step]]
            seconds = map(float, (longest[step], block.load_s[step], block.compute_s[step]))
            slow.append(SlowStep(phase, step, block.rank, *seconds))
    return sorted(slow, key=lambda each: -each.duration_s)[:count]


def trace_events(blocks: Sequence[RankBlock], count: int) -> list[dict[str, Any]]:
    """The events of the `count` slowest steps on all accelerators, and of the epochs that they are in.

    Times are microseconds since 1970, or since the epoch's begin where the run's files do not tell.
    """
    phases = phases_of(blocks)
    chosen: dict[int, tuple[StepPhase, set[int]]] = {}
    for slow in slowest_steps(phases, count):
        chosen.setdefault(id(slow.phase), (slow.phase, set()))[1].add(slow.step)
    events = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0,
         "args": {"name": f"accelerator {rank}"}}
        for rank in sorted({block.rank for phase, _ in chosen.values() for block in phase.blocks})
    ]  # fmt: skip
    for phase, steps in chosen.values():
        for row in range(len(phase.blocks)):
            events += _of_steps(phase, row, sorted(steps))
    for parts in _by_epoch(phase for phase, _ in chosen.values()):
        for row in range(len(parts[0].blocks)):
            events += _of_epoch(parts, row)
    return [{"id": number, **event} for number, event in enumerate(events)]


def rank_trace(
    blocks: Sequence[RankBlock], run: tuple[int, float, float], data_format: str,
    checkpoints: Mapping[str, Sequence[CheckpointTimes]], between_s: float | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """All events of an accelerator's run, as DLIO has them with DFTracer: one `item` for each batch.

    Args:
        blocks: the accelerator's own.
        run: its number, and when its run began and ended in seconds since 1970.
        data_format: tfrecord's samples are not seen one by one, and synthetic ones need no preprocessing.
        checkpoints: those of its process: `capture` and `restart`.
        between_s: what is computed before each of them; None: nothing.
    """
    rank, began_s, ended_s = run
    yield _event(rank, "ai_root", "ai_root", began_s, ended_s)
    for parts in _by_epoch(phases_of(blocks)):
        yield from _of_epoch(parts, 0)
        for phase in parts:
            for event in _of_steps(phase, 0, range(phase.steps)):
                yield event
                if event["name"] == "fetch.iter":
                    yield from _of_batch(event, data_format)
    for name, each in checkpoints.items():
        for one in each:
            if one.nbytes:
                end_s = one.start_s + one.duration_s
                yield _event(rank, name, "checkpoint", one.start_s, end_s, epoch=one.epoch)
            if one.nbytes and between_s is not None:
                yield _event(rank, "compute", "compute", one.start_s - between_s, one.start_s)


def _of_batch(fetched: dict[str, Any], data_format: str) -> Iterator[dict[str, Any]]:
    if data_format == "tfrecord":
        return
    yield fetched | {"name": "item", "cat": "data"}
    if data_format != "synthetic":
        over = {"ts": fetched["ts"] + fetched["dur"], "dur": 0}
        yield fetched | {"name": "preprocess", "cat": "data"} | over


def _event(
    rank: int, name: str, category: str, begin_s: float, end_s: float, **more: int
) -> dict[str, Any]:
    return {
        "name": name, "cat": category, "ph": "X", "pid": rank, "tid": 0, "ts": round(begin_s * 1e6),
        "dur": max(0, round((end_s - begin_s) * 1e6)), "args": more,
    }  # fmt: skip


def _origin_s(phase: StepPhase) -> float:
    return min((b.start_s for b in phase.blocks if b.start_s is not None), default=0.0)


def _by_epoch(phases: Iterable[StepPhase]) -> Iterable[list[StepPhase]]:
    """The phases of each epoch's training, and of its evaluation: checkpoints part them."""
    of_epoch: dict[tuple[int, bool], list[StepPhase]] = defaultdict(list)
    for phase in phases:
        of_epoch[phase.blocks[0].epoch, phase.blocks[0].kind == "eval"].append(phase)
    return of_epoch.values()


def _of_epoch(parts: Sequence[StepPhase], row: int) -> Iterator[dict[str, Any]]:
    """Of an epoch's training, or of its evaluation."""
    block = parts[0].blocks[row]
    begin_s = min(_origin_s(phase) for phase in parts)
    end_s = max(_origin_s(phase) + float(phase.end_s[row, -1]) for phase in parts)
    names = ("evaluate",) if block.kind == "eval" else ("epoch.block", "train")
    for name in names:
        yield _event(block.rank, name, "pipeline", begin_s, end_s, epoch=block.epoch)


def _of_steps(phase: StepPhase, row: int, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    block, origin_s = phase.blocks[row], _origin_s(phase)
    for step in steps:
        begin_s = origin_s + float(phase.begin_s[row, step])
        there_s = begin_s + float(block.load_s[step])
        done_s = there_s + float(block.compute_s[step])
        end_s = origin_s + float(phase.end_s[row, step])
        of_step = {"epoch": block.epoch, "step": step}
        yield _event(block.rank, "fetch.iter", "dataloader", begin_s, there_s, **of_step)
        yield _event(block.rank, "compute", "compute", there_s, done_s, **of_step)
        if end_s - done_s >= 1e-6:
            yield _event(block.rank, "barrier", "comm", done_s, end_s, **of_step)


def trace_text(events: Iterable[dict[str, Any]], *, lines: bool) -> str:
    """The file's text.

    Args:
        events: of `trace_events`.
        lines: one event a line after `[`, as DFTracer's .pfw files; else one JSON document.
    """
    if lines:
        compact = (json.dumps(event, separators=(",", ":")) for event in events)
        return "\n".join(["[", *compact, "]", ""])
    return json.dumps({
        "traceEvents": list(events), "displayTimeUnit": "ms",
        "otherData": {"note": NOT_MLPERF},
    }) + "\n"  # fmt: skip
