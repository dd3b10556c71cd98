"""Exact: the rhythm of a job whose loader is headrace's own: it tells, so nothing is inferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.errors import TraceError
from headrace.insight.record.rhythm import Rhythm
from headrace.trace import read_run

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.trace import RankTrace

__all__ = ["compute_and_wait", "exact_rhythm"]

_STEPS_LEAST: Final = 2


def exact_rhythm(folder: Path) -> tuple[Rhythm | None, str]:
    """The rhythm that loaders told.

    Args:
        folder: of a run's traces; need not be there.

    Returns:
        It, and what is wrong with the traces; None and '' where there are none.
    """
    if not folder.is_dir():
        return None, ""
    try:
        traces = [trace for trace in read_run(folder).ranks if len(trace.steps) >= _STEPS_LEAST]
    except (TraceError, OSError) as e:
        return None, f"what headrace's loader told is left out: {e}"
    if not traces:
        return None, ""
    one = max(traces, key=lambda trace: len(trace.steps))
    compute, wait = compute_and_wait(one)
    samples = np.maximum(one.steps["samples"].astype(float), 1)
    work = one.steps["work_s"].astype(float) / samples
    return (
        Rhythm(
            source="trace", batch=max(1, int(one.batch_size or np.median(samples))), batch_fits=1.0,
            workers=0, threads=1, ranks=len({trace.rank for trace in traces}), compute_s=compute,
            wait_s=wait, decode_s=work if work.any() else np.zeros(0), collate_s=0.0,
            waits_seen=True, trained=frozenset(trace.pid for trace in traces if trace.pid),
        ),
        "",
    )  # fmt: skip


def compute_and_wait(trace: RankTrace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each step computed and waited, in seconds, without an epoch's last: nobody sees it end."""
    steps = trace.steps
    computed = steps["asked_s"][1:] - steps["delivered_s"][:-1]
    waited = steps["delivered_s"] - steps["asked_s"]
    kept = (steps["epoch"][1:] == steps["epoch"][:-1]) & (computed >= 0) & (waited[:-1] >= 0)
    return computed[kept].astype(float), waited[:-1][kept].astype(float)
