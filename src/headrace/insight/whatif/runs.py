"""Runs: the figures of a traced run (`trace=`, `HEADRACE_TRACE`): steps are exact, files are not known."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from headrace.insight.record.rhythm import compute_and_wait
from headrace.insight.whatif.figures import JobFigures
from headrace.insight.whatif.storage import Storage
from headrace.io.simulation import Simulation

if TYPE_CHECKING:
    from headrace.trace import Run


def figures_of_run(run: Run) -> tuple[JobFigures, Storage | None]:
    """A run's figures, and the storage that it met.

    Args:
        run: as `headrace.trace.read_run` reads it.

    Returns:
        The storage is None where no read was counted.

    Raises:
        ValueError: the run has too few steps.
    """
    traces = [trace for trace in run.ranks if len(trace.steps) > 1]
    if not traces:
        raise ValueError(f"{run.path}: the run has no two steps: there is nothing to predict from")
    one = max(traces, key=lambda trace: len(trace.steps))
    compute, wait = compute_and_wait(one)
    samples = np.maximum(one.steps["samples"].astype(np.int64), 1)
    nbytes = one.steps["bytes"].sum(axis=1).astype(np.int64)
    work = one.steps["work_s"].astype(float) / samples
    hosts = max(1, len({trace.host for trace in traces}))
    figures = JobFigures(
        sample_bytes=np.maximum(np.repeat(nbytes // samples, samples), 1), opens=False,
        batch=max(1, int(one.batch_size or np.median(samples))), workers=0,
        ranks=max(1, len({trace.rank for trace in traces}) // hosts),
        processors=len(os.sched_getaffinity(0)), compute_s=compute, wait_s=wait,
        decode_s=work if work.any() else np.zeros(0),
    )  # fmt: skip
    return figures, _storage(one.steps["reads"], one.steps["read_s"], nbytes)


def _storage(
    reads: np.ndarray[tuple[int], np.dtype[np.uint32]],
    read_s: np.ndarray[tuple[int], np.dtype[np.float32]],
    nbytes: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Storage | None:
    """Each read as long as those of a step were on average."""
    some = (reads > 0) & (read_s > 0)
    if not some.any():
        return None
    return Storage(
        name="as recorded", figures=Simulation(name="recorded"),
        read_s=(read_s[some] / reads[some]).astype(np.float32),
        read_bytes=np.maximum(nbytes[some] // reads[some], 1).astype(np.int64),
    )  # fmt: skip
