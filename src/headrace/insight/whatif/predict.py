"""Predict: one scenario's steps and stall, how much the draws spread, and how far the model is off at home."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.insight.whatif.figures import Scenario
from headrace.insight.whatif.pipeline import simulate

if TYPE_CHECKING:
    from headrace.insight.whatif.figures import JobFigures, Loader
    from headrace.insight.whatif.storage import Storage

_EVENTS_MOST: Final = 400_000
_STEPS: Final = 24, 400
_SEEDS: Final = 3
_NODES_MOST: Final = 8
_FULL: Final = 0.9
_MOSTLY: Final = 0.5
_NO_STALL: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What would be.

    Attributes:
        step_s: of a step, on average, once it runs.
        step_spread_s: half the range over several seeds.
        wait_s: of it for data.
        stall: share of the time that is waited.
        samples_per_s: of all training processes.
        bytes_per_s: that they read.
        bound: compute, link, servers, processors, workers or latency: what a faster one of would help most.
        notes: what was simplified.
    """

    scenario: Scenario
    step_s: float
    step_spread_s: float
    wait_s: float
    stall: float
    samples_per_s: float
    bytes_per_s: float
    bound: str
    busy: dict[str, float]
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        s = self.scenario
        return {
            "storage": s.storage.name, "nodes": s.nodes, "batch": s.batch, "workers": s.workers,
            "gpu_speed": s.gpu_speed, "processors": s.processors, "loader": s.loader,
            "step_s": self.step_s, "step_spread_s": self.step_spread_s, "wait_s": self.wait_s,
            "stall": self.stall, "samples_per_s": self.samples_per_s,
            "bytes_per_s": self.bytes_per_s, "bound": self.bound, "busy": self.busy,
            "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """The model on the record itself.

    Attributes:
        error: predicted step time against the recorded, as a share of it.
        stall_points: predicted stall less the recorded, in points of a hundred.
    """

    predicted_s: float
    recorded_s: float
    error: float
    stall_points: float


def scenario_as_recorded(job: JobFigures, storage: Storage, loader: Loader = "torch") -> Scenario:
    """The job as it was, on a storage."""
    return Scenario(
        storage=storage, nodes=1, batch=job.batch, workers=job.workers, gpu_speed=1.0,
        processors=job.processors, loader=loader,
    )  # fmt: skip


def predict(job: JobFigures, scenario: Scenario, seed: int = 0) -> Prediction:
    """Predict a scenario.

    Args:
        job: what is known of the job.
        scenario: what it would run on.
        seed: of the draws.
    """
    notes: list[str] = []
    run = _fitting(scenario, notes)
    parts = 3 + min(32, float(job.sample_bytes.mean()) / scenario.storage.request_bytes)
    per_step = run.nodes * job.ranks * run.batch * parts
    steps = int(np.clip(_EVENTS_MOST // _SEEDS // per_step, *_STEPS))
    found = [simulate(job, run, steps + 2, seed + i) for i in range(_SEEDS)]
    means = [float(one.step_s[2:].mean()) for one in found]
    step_s = float(np.mean(means))
    wait_s = float(np.mean([one.wait_s[2:].mean() for one in found]))
    busy = {key: float(np.mean([one.busy[key] for one in found])) for key in found[0].busy}
    samples_per_s = scenario.nodes * job.ranks * scenario.batch / step_s
    if scenario.batch != job.batch:
        notes.append("computing time is taken to grow with the batch")
    return Prediction(
        scenario=scenario, step_s=step_s, step_spread_s=(max(means) - min(means)) / 2,
        wait_s=wait_s, stall=wait_s / step_s, samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * float(job.sample_bytes.mean()),
        bound=_bound(wait_s / step_s, busy), busy=busy, notes=tuple(notes),
    )  # fmt: skip


def _fitting(scenario: Scenario, notes: list[str]) -> Scenario:
    """Fewer nodes with their share of what all share, where there are too many to simulate each."""
    if scenario.nodes <= _NODES_MOST:
        return scenario
    share = _NODES_MOST / scenario.nodes
    storage, figures = scenario.storage, scenario.storage.figures
    if storage.shared != "none" and figures.parallelism:
        figures = replace(figures, parallelism=max(1, round(figures.parallelism * share)))
    if storage.shared == "all":
        figures = replace(figures, bandwidth_bytes_per_s=figures.bandwidth_bytes_per_s * share)
    notes.append(f"{_NODES_MOST} of {scenario.nodes} nodes are simulated, with their share of it")
    made = replace(storage, figures=figures)
    return replace(scenario, nodes=_NODES_MOST, storage=made)


def _bound(stall: float, busy: dict[str, float]) -> str:
    if stall < _NO_STALL:
        return "compute"
    shared = ("link", "servers", "processors")
    full = {key: busy[key] for key in shared if busy[key] >= _FULL}
    if full:
        return max(full, key=lambda key: full[key])
    # What a worker does not decode, it waits for reads.
    return "workers" if busy["workers"] >= _MOSTLY else "latency"


def check_of(job: JobFigures, storage: Storage, loader: Loader = "torch") -> Check | None:
    """Predict the record from itself; None: it has no recorded step times.

    Args:
        job: of the record.
        storage: `recorded_storage` of it.
        loader: what read it.
    """
    if job.step_s is None or job.stall is None:
        return None
    found = predict(job, scenario_as_recorded(job, storage, loader))
    return Check(
        found.step_s, job.step_s, found.step_s / job.step_s - 1, 100 * (found.stall - job.stall)
    )
