"""Together: the figures of several repeats of a run as those of one: what summary.json says of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.results.summary import Figures

__all__ = ["together"]


def together(runs: Sequence[Figures]) -> Figures:
    """One run of all epochs, counted on from repeat to repeat.

    Bytes and CPU are sums, the phases' times means; page cache and provenance are the first's.
    """
    first, last = runs[0], runs[-1]
    if len(runs) == 1:
        return first
    blocks, before = [], 0
    for run in runs:
        blocks += [replace(block, epoch=block.epoch + before) for block in run.blocks]
        before = max((block.epoch for block in blocks), default=before)
    return replace(
        first,
        end_s=last.end_s,
        blocks=blocks,
        repeats=len(runs),
        nbytes=sum(run.nbytes for run in runs),
        device_bytes=sum(run.device_bytes for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
        batch_waits_s=[wait for run in runs for wait in run.batch_waits_s],
        checkpoints=[each for run in runs for each in run.checkpoints],
        restores=[each for run in runs for each in run.restores],
        blocking_s=[each for run in runs for each in run.blocking_s],
        phases_s={
            phase: sum(run.phases_s[phase] for run in runs) / len(runs) for phase in first.phases_s
        },
    )
