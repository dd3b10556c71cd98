"""The demo's source: what a real cluster would give, out of a plan and a model. Says so on every page.

Time goes on from the plan's second day; after two hours it begins anew.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.telemetry.history import JobRecord
from headrace.web.demo.model import Model
from headrace.web.demo.schedule import DAY_S, DemoJob, plan
from headrace.web.demo.words import FILE_SYSTEMS, PARTITIONS, TIERS
from headrace.web.jobs import JobPage, mean
from headrace.web.picture import IDLE, Cluster, JobBox, NodeBox, levels
from headrace.web.storage import Flow, file_system

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["DemoSource"]

PLAYED_S: Final = 2 * 3600.0
STORAGE_S: Final = 1800.0
STORAGE_POINTS: Final = 60
JOB_POINTS: Final = 120
AWAY: Final = 0.008
"""Share of nodes that are drained or down."""

_REASONS: Final = (
    "drained: GPU 3 fell off the bus",
    "down: not responding",
    "drained: for maintenance",
)


class DemoSource:
    """A recorded demo.

    Args:
        nodes: of the cluster.
        jobs: of its last day.
        seed: the same gives the same.
        clock: Unix seconds.
    """

    label = "recorded demo"

    def __init__(
        self,
        nodes: int = 1000,
        jobs: int = 10_000,
        seed: int = 7,
        clock: Callable[[], float] = time.time,
        period_s: float = 2.0,
    ) -> None:
        self.period_s = period_s
        self._plan = plan(seed, nodes, 8, jobs)
        self._model = Model(seed, self._plan.jobs)
        self._clock = clock
        self._origin_s = clock()
        random = np.random.default_rng(seed + 2)
        used = {p // 8 for job in self._running(DAY_S) for p in self._places(job).tolist()}
        empty = [node for node in range(nodes) if node not in used]
        count = min(len(empty), round(AWAY * nodes))
        gone = random.choice(np.array(empty, np.int64), count, replace=False).tolist()
        self._away = {node: _REASONS[i % len(_REASONS)] for i, node in enumerate(gone)}
        self._boxes = tuple(
            NodeBox(name, PARTITIONS[number][0], 8, self._away.get(at, ""))
            for at, (name, number) in enumerate(
                zip(self._plan.names, self._plan.partition, strict=True)
            )
        )
        self._by_id = {job.job_id: job for job in self._plan.jobs}

    def close(self) -> None:
        """Nothing is held."""

    def now_s(self) -> float:
        """The plan's time."""
        return DAY_S + (self._clock() - self._origin_s) % PLAYED_S

    def _unix(self, plan_s: float) -> float:
        """The plan's time as if it were today."""
        rounds = (self._clock() - self._origin_s) // PLAYED_S
        return self._origin_s + rounds * PLAYED_S - DAY_S + plan_s

    def _running(self, at_s: float) -> list[DemoJob]:
        return [job for job in self._plan.jobs if job.began_s <= at_s < job.ended_s]

    @staticmethod
    def _places(job: DemoJob) -> np.ndarray[Any, np.dtype[np.int32]]:
        assert job.places is not None
        return job.places

    # -- what is asked ----------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """See `Source`."""
        now, model = self.now_s(), self._model
        jobs = self._running(now)
        numbers = np.array([job.number for job in jobs], np.int64)
        stalls = model.stall(numbers, np.array([now]))[:, 0]
        gpus = len(self._boxes) * 8
        holders = np.full(gpus, IDLE, np.int32)
        stall, busy = np.full(gpus, np.nan), np.full(gpus, np.nan)
        boxes = []
        for place, (job, share) in enumerate(zip(jobs, stalls.tolist(), strict=True)):
            places = self._places(job)
            ranks = model.on_ranks(job.number, share)
            holders[places], stall[places] = place, ranks
            busy[places] = model.use(np.array([job.number]), ranks)
            boxes.append(self._box(job))
        return Cluster(
            taken_s=self._clock(), nodes=self._boxes, jobs=boxes, holders=holders,
            stall=levels(stall), busy=levels(busy),
            waiting=sum(job.came_s <= now < job.began_s for job in self._plan.jobs),
        )  # fmt: skip

    def _box(self, job: DemoJob) -> JobBox:
        model, number = self._model, job.number
        blamed = int(model.blames[number])
        waits = model.base[number] >= 0.03
        return JobBox(
            job_id=job.job_id, name=job.name, user=job.user, account=f"proj-{job.user[:2]}",
            partition=PARTITIONS[job.partition][0], gpus=job.gpus, nodes=max(1, job.gpus // 8),
            cause=model.causes[number] if waits else "",
            file_system=FILE_SYSTEMS[blamed][0] if waits and blamed >= 0 else "",
            measured=bool(model.measured[number]), started_s=round(self._unix(job.began_s)),
        )  # fmt: skip

    def records(self) -> list[JobRecord]:
        """See `Source`."""
        now = self.now_s()
        seen = [
            job for job in self._plan.jobs
            if job.places is not None and job.began_s < now and job.ended_s > now - DAY_S
        ]  # fmt: skip
        return [self._record(job, now) for job in seen]

    def _record(self, job: DemoJob, now: float) -> JobRecord:
        model, number = self._model, job.number
        box = self._box(job)
        seconds = min(now, job.ended_s) - max(job.began_s, now - DAY_S)
        share = float(model.base[number]) * (0.7 if model.tuned[number] else 1.05)
        gpu_s, lost_s = job.gpus * seconds, min(0.95, share) * job.gpus * seconds
        measured = bool(model.measured[number])
        parts = {("other", ""): 0.1 if box.cause else 1.0}
        if box.cause:
            parts = {(box.cause, box.file_system): 0.9, **parts}
        figures = {
            ("seconds", "", ""): box.nodes * seconds,
            ("gpu_s", "", ""): gpu_s,
            ("gpu_watched_s", "", ""): gpu_s,
            ("gpu_busy_s", "", ""): (gpu_s - lost_s) * float(model.good[number]),
            ("cpu_s", "", ""): gpu_s * 1.7,
            ("worked_s", "", ""): (gpu_s - lost_s) if measured else 0.0,
        }
        waited, lost = ("stall_s", "lost_gpu_s") if measured else ("inferred_s", "inferred_gpu_s")
        for (name, system), part in parts.items():
            figures[waited, name, system] = (
                part * lost_s / (1.0 if measured else job.gpus / box.nodes)
            )
            figures[lost, name, system] = part * lost_s
        return JobRecord(
            job_id=job.job_id, name=job.name, user=job.user, account=box.account,
            nodes=tuple(self._plan.names[n] for n in sorted(set((self._places(job) // 8).tolist()))),
            first_s=self._unix(job.began_s), last_s=self._unix(min(now, job.ended_s)),
            measured=measured, figures=figures,
        )  # fmt: skip

    def storage(self) -> list[dict[str, Any]]:
        """See `Source`."""
        now = self.now_s()
        step = STORAGE_S / STORAGE_POINTS
        times = (now - STORAGE_S + step * np.arange(1, STORAGE_POINTS + 1)).astype(np.float64)
        jobs = [j for j in self._plan.jobs if j.began_s <= now and j.ended_s > times[0]]
        numbers = np.array([job.number for job in jobs], np.int64)
        stall = self._model.stall(numbers, times, smooth=True)
        flow = self._model.tiers(numbers, times, stall)[-1]
        began = np.array([job.began_s for job in jobs])[:, None]
        ended = np.array([job.ended_s for job in jobs])[:, None]
        flow = np.where((times >= began) & (times < ended), flow, 0.0)
        blamed = self._model.blames[numbers]
        lost = stall * self._model.gpus[numbers][:, None] * (flow > 0)
        found = []
        for at, (name, _, capacity) in enumerate(FILE_SYSTEMS):
            mine = np.flatnonzero(self._model.system[numbers] == at)
            flows = [
                Flow(jobs[i].job_id, jobs[i].name, jobs[i].user, flow[i].tolist()) for i in mine
            ]
            load = flow[mine].sum(axis=0) / (capacity * len(self._boxes) / 1000)
            waiting = lost[mine][blamed[mine] == at].sum(axis=0)
            found.append(
                file_system(
                    name,
                    [self._unix(t) for t in times.tolist()],
                    flows,
                    capacity=capacity * len(self._boxes) / 1000,
                    latency_s=(0.0015 + 0.03 * load**3 + 0.0002 * waiting).tolist(),
                    waiting_gpus=waiting.tolist(),
                )
            )
        return found

    def job(self, job_id: str) -> dict[str, Any] | None:
        """See `Source`."""
        job = self._by_id.get(job_id)
        now = self.now_s()
        if job is None or job.began_s > now:
            return None
        model = self._model
        until_s = min(now, job.ended_s)
        since_s = max(job.began_s, until_s - 2 * 3600.0)
        times = np.linspace(since_s, until_s, JOB_POINTS).astype(np.float64)
        number = np.array([job.number])
        stall = model.stall(number, times, smooth=True)
        tiers = model.tiers(number, times, stall)[:, 0, :]
        ranks = model.on_ranks(job.number, float(stall[0, -1]))
        page = JobPage(
            record=self._record(job, now),
            times=[self._unix(t) for t in times.tolist()],
            use=model.use(number, stall)[0].tolist(),
            stall=stall[0].tolist(),
            tiers={name: tiers[i].tolist() for i, name in enumerate(TIERS)},
            events=[
                {**event, "at_s": self._unix(event["at_s"])}
                for event in model.events(job) if since_s <= event["at_s"] <= until_s
            ],
            ranks=[
                (rank, f"{self._plan.names[place // 8]}:{place % 8}", share)
                for rank, (place, share) in enumerate(
                    zip(self._places(job).tolist(), ranks.tolist(), strict=True)
                )
            ],
            running=now < job.ended_s,
            partition=PARTITIONS[job.partition][0],
            gpus=job.gpus,
            now=mean(stall[0, -3:].tolist()),
        )  # fmt: skip
        return page.as_dict()
