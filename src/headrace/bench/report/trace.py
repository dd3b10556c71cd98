"""Trace: the slowest steps for trace viewers (chrome://tracing, Perfetto), with DFTracer's names of events.

A process of the trace is an accelerator. Names and categories are those that DFTracer's conventions for AI
give and DLIO uses: `fetch.iter` of `dataloader`, `compute`, `barrier` of `comm`, and `epoch.block`, `train`,
`evaluate` of `pipeline`; so DFTracer's analysis finds what it looks for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.bench.report.steps import phases_of, slowest_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.report.result import RankBlock, RunResult
    from headrace.bench.report.steps import Phase

__all__ = ["trace_events", "trace_text"]


def trace_events(
    result: RunResult, blocks: Sequence[RankBlock], count: int
) -> list[dict[str, Any]]:
    """The events of the `count` slowest steps on all accelerators, and of the epochs that they are in.

    Times are microseconds since 1970, or since the epoch's begin where the run's files do not tell.
    """
    phases = phases_of(blocks, barrier=str(result.provenance.get("barrier", "step")))
    chosen: dict[int, tuple[Phase, set[int]]] = {}
    for slow in slowest_steps(phases, count):
        chosen.setdefault(id(slow.phase), (slow.phase, set()))[1].add(slow.step)
    found = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0,
         "args": {"name": f"accelerator {rank}"}}
        for rank in sorted({block.rank for phase, _ in chosen.values() for block in phase.blocks})
    ]  # fmt: skip
    for phase, steps in chosen.values():
        for row in range(len(phase.blocks)):
            found += _of_accelerator(phase, row, sorted(steps))
    return [{"id": number, **event} for number, event in enumerate(found)]


def _of_accelerator(phase: Phase, row: int, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
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
        "otherData": {"note": "This is not an MLPerf result."},
    }) + "\n"  # fmt: skip
