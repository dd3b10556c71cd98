"""Trace: when each step was, and the slowest of them for trace viewers (chrome://tracing, Perfetto).

Files of results say how long steps waited and computed, not when they began. With a barrier at every step
all begin together, when the slowest has ended the one before; what then still lacks to the block's end was
the barrier between processes, and is given to all steps alike.

Names and categories are those that DFTracer's conventions for AI give and DLIO uses: `fetch.iter` of
`dataloader`, `compute`, `barrier` of `comm`, and `epoch.block`, `train`, `evaluate` of `pipeline`; so
DFTracer's analysis finds what it looks for. A process of the trace is an accelerator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.summary import NOT_MLPERF

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from headrace.bench.results import RankBlock, RunResult


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


def phases_of(blocks: Sequence[RankBlock], *, barrier: str = "step") -> list[StepPhase]:
    """Place all steps in time.

    Args:
        blocks: of all accelerators. Of those of one phase the steps that all have are taken.
        barrier: where accelerators met: `step` or `epoch`.
    """
    grouped: dict[tuple[int, bool, str], list[RankBlock]] = {}
    for block in blocks:
        grouped.setdefault((block.epoch, block.kind == "eval", block.name), []).append(block)
    return [
        phase
        for _, parts in sorted(grouped.items(), key=lambda pair: pair[0])
        if (phase := _phase(parts, barrier)) is not None
    ]


def _phase(parts: Sequence[RankBlock], barrier: str) -> StepPhase | None:
    steps = min(block.steps for block in parts)
    if not steps:
        return None
    even = [
        replace(block, load_s=block.load_s[:steps], compute_s=block.compute_s[:steps])
        for block in parts
    ]
    process = np.array([block.process_s for block in even])
    taken = np.broadcast_to(process.max(axis=0), process.shape) if barrier == "step" else process
    ends = np.cumsum(taken, axis=1)
    starts = [block.start_s for block in even if block.start_s is not None]
    over = [block.end_s for block in even if block.end_s is not None]
    if starts and over and barrier == "step":
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


def trace_events(
    result: RunResult, blocks: Sequence[RankBlock], count: int
) -> list[dict[str, Any]]:
    """The events of the `count` slowest steps on all accelerators, and of the epochs that they are in.

    Times are microseconds since 1970, or since the epoch's begin where the run's files do not tell.
    """
    phases = phases_of(blocks, barrier=str(result.provenance.get("barrier", "step")))
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
            events += _of_accelerator(phase, row, sorted(steps))
    return [{"id": number, **event} for number, event in enumerate(events)]


def _of_accelerator(phase: StepPhase, row: int, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    block = phase.blocks[row]
    origin_s = min((b.start_s for b in phase.blocks if b.start_s is not None), default=0.0)

    def event(
        name: str, category: str, begin_s: float, end_s: float, **more: int
    ) -> dict[str, Any]:
        return {
            "name": name, "cat": category, "ph": "X", "pid": block.rank, "tid": 0,
            "ts": round((origin_s + begin_s) * 1e6), "dur": max(0, round((end_s - begin_s) * 1e6)),
            "args": {"epoch": block.epoch, **more},
        }  # fmt: skip

    over_s = float(phase.end_s[row, -1])
    yield event("epoch.block", "pipeline", 0.0, over_s)
    yield event("train" if block.kind == "train" else "evaluate", "pipeline", 0.0, over_s)
    for step in steps:
        begin_s, end_s = float(phase.begin_s[row, step]), float(phase.end_s[row, step])
        there_s = begin_s + float(block.load_s[step])
        done_s = there_s + float(block.compute_s[step])
        yield event("fetch.iter", "dataloader", begin_s, there_s, step=step)
        yield event("compute", "compute", there_s, done_s, step=step)
        if end_s - done_s >= 1e-6:
            yield event("barrier", "comm", done_s, end_s, step=step)


def trace_text(events: Sequence[dict[str, Any]], *, lines: bool) -> str:
    """The file's text.

    Args:
        events: of `trace_events`.
        lines: one event a line after `[`, as DFTracer's .pfw files; else one JSON document.
    """
    if lines:
        return "\n".join(["[", *(json.dumps(event) for event in events), "]", ""])
    return json.dumps({
        "traceEvents": list(events), "displayTimeUnit": "ms",
        "otherData": {"note": NOT_MLPERF},
    }) + "\n"  # fmt: skip
