"""Jobs: a job as the model needs it, from a record or a traced run, and the scenario that it is asked about."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.insight.record.rhythm import compute_and_wait
from headrace.insight.whatif.storage import Storage
from headrace.io.simulation import Simulation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.recorded import Recorded
    from headrace.trace import Run

Loader = Literal["torch", "headrace"]


def _none() -> NDArray[np.float64]:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """What is known of a job.

    Attributes:
        sample_bytes: int64 (reads,): of the samples in the order in which they are read.
        opens: whether each sample's file is opened for it.
        batch: samples of a step of a training process.
        workers: processes that read for each; 0: it reads by itself.
        prefetch: batches that each worker is given ahead.
        compute_s: float64: of a step with `batch` samples; one or many.
        decode_s: float64: of a sample; one or many; empty: none.
        collate_s: of a batch, besides its samples.
        hand_s: from a batch's arrival until training has its tensors; it counts as waiting.
        wait_s: float64 (steps,): recorded; empty: not known.

    Raises:
        ValueError: there is nothing to predict from.
    """

    sample_bytes: NDArray[np.int64]
    opens: bool
    batch: int
    workers: int
    prefetch: int = 2
    ranks: int = 1
    processors: int = 1
    compute_s: NDArray[np.float64]
    decode_s: NDArray[np.float64] = field(default_factory=_none)
    collate_s: float = 0.0
    hand_s: float = 0.0
    wait_s: NDArray[np.float64] = field(default_factory=_none)

    def __post_init__(self) -> None:
        if not len(self.sample_bytes):
            raise ValueError("the job has no samples")
        if not len(self.compute_s):
            raise ValueError("the job's computing time is not known: set train.computation_time")
        if self.batch < 1:
            raise ValueError("the job's batch is not known: set reader.batch_size")

    @property
    def step_s(self) -> float | None:
        """Of a step as it was recorded."""
        if not len(self.wait_s):
            return None
        return float(self.compute_s.mean() + self.wait_s.mean())

    @property
    def stall(self) -> float | None:
        """Share of time that was waited, as recorded."""
        step_s = self.step_s
        return None if not step_s else float(self.wait_s.mean()) / step_s


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the job would run on.

    Attributes:
        nodes: with as many training processes each as the job has.
        batch: of a training process; its computing time grows with it.
        gpu_speed: how much faster a step computes.
        processors: of a node.
        loader: what reads: torch's workers, one sample after the other, or headrace's reader.
        reads_in_flight: of headrace's reader, for each training process.
        ahead: batches that headrace reads ahead.

    Raises:
        ValueError: a value makes no sense.
    """

    storage: Storage
    nodes: int
    batch: int
    workers: int
    gpu_speed: float
    processors: int
    loader: Loader = "torch"
    reads_in_flight: int = 16
    ahead: int = 4

    def __post_init__(self) -> None:
        for name, least in (
            ("nodes", 1), ("batch", 1), ("workers", 0), ("processors", 1), ("reads_in_flight", 1),
            ("ahead", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if not 1e-6 <= self.gpu_speed <= 1e6:
            raise ValueError(f"gpu_speed is {self.gpu_speed}, expected more than 0")
        if self.loader not in {"torch", "headrace"}:
            raise ValueError(f"loader is {self.loader!r}, expected torch or headrace")


def figures_of(recorded: Recorded) -> JobFigures:
    """The figures of a record.

    Raises:
        ValueError: its batch or its computing time is not known.
    """
    opens = bool((recorded.open_s > 0).mean() > 0.5) if len(recorded.open_s) else True
    return JobFigures(
        sample_bytes=recorded.sample_bytes[recorded.order], opens=opens, batch=recorded.batch,
        workers=recorded.workers, ranks=recorded.ranks, processors=recorded.processors,
        compute_s=recorded.compute_s.astype(float), decode_s=recorded.decode_s.astype(float),
        collate_s=recorded.collate_s, hand_s=recorded.hand_s, wait_s=recorded.wait_s.astype(float),
    )  # fmt: skip


def figures_of_run(run: Run) -> tuple[JobFigures, Storage | None]:
    """The figures of a traced run (`trace=`, `HEADRACE_TRACE`), and its storage: files are not known.

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
    reads, read_s = one.steps["reads"], one.steps["read_s"]
    some = (reads > 0) & (read_s > 0)
    if not some.any():
        return figures, None
    # Each read as long as those of a step were on average.
    return figures, Storage(
        name="as recorded", figures=Simulation(name="recorded"),
        read_s=(read_s[some] / reads[some]).astype(np.float32),
        read_bytes=np.maximum(nbytes[some] // reads[some], 1).astype(np.int64),
    )  # fmt: skip
