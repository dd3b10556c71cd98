"""The recorded demo: two hours of a cluster that is not there, to try the pages with.

`static/demo.npz` holds who had which GPUs of 1,000 nodes when, in a day and two hours, of some 10,000 jobs:
one array for each column, a row for each job, and the places of all jobs' GPUs one after the other. It was
made once by a seeded model; names, users and figures are nobody's. The player gives its last two hours as if
they were now, over and over, as what a real cluster has: a history, a layout of nodes, and what a controller
says. So the pages show it as they show any other. How long a job waits on the average is recorded; how that
changes from moment to moment is a wave of the job's own and one of its file system.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import cause_of
from headrace.telemetry.history import JobRecord
from headrace.web.source import RECENT_S, ClusterSource
from headrace.web.views import ClusterLayout, JobBox, NodeBox

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_FOLDER: Final = Path(__file__).parent / "static"
DAY_S: Final = 86400.0
PLAYED_S: Final = 2 * 3600.0
NEVER: Final = 0xFFFFFFFF  # the beginning of a job that has no GPUs within the recording
GPUS: Final = 8  # of each node

FIRST_ID: Final = 118_000
STATES: Final = 60  # of the controller, before the player begins
_TIERS: Final = {"ram": 0.3, "disk": 0.2, "peer": 0.1, "source": 0.4}
"""Where a job's bytes come from, by share."""


class DemoHistory:
    """The recording, asked as a Prometheus's history is: records of jobs in a stretch of Unix time.

    Of so many of its nodes; jobs that had others too are left out.
    """

    def __init__(self, nodes: int, clock: Callable[[], float]) -> None:
        self.clock, self._origin_s = clock, clock()
        with np.load(_FOLDER / "demo.npz") as file:
            self._columns = c = {name: file[name] for name in file.files}
        chosen = np.arange(len(c["nodes"]))[:: len(c["nodes"]) // nodes][:nodes]
        number = np.full(len(c["nodes"]), -1)
        number[chosen] = np.arange(len(chosen))
        began = c["began_s"] != NEVER
        places = c["places"].astype(np.int64)
        places = number[places // GPUS] * GPUS + places % GPUS
        self._places = np.split(places, np.cumsum(np.where(began, c["gpus"], 0))[:-1])
        inside = np.array([bool((each >= 0).all()) for each in self._places])
        # Of jobs that only wait, as large a part as of the nodes.
        self._shown = inside & (began | (np.arange(len(began)) % 1000 < nodes))
        self._submitted, self._began, self._ended = (
            c[name].astype(np.float64) for name in ("came_s", "began_s", "ended_s")
        )
        named = ("name", "user", "partition", "cause", "file_system")
        self._names: dict[str, list[str]] = {name: c[f"{name}s"].tolist() for name in named}
        of_nodes = (c[name][chosen] for name in ("nodes", "node_partition", "away"))
        self.nodes = tuple(
            NodeBox(str(name), str(c["partitions"][place]), GPUS, str(away))
            for name, place, away in zip(*of_nodes, strict=True)
        )

    def _shift_s(self) -> float:
        """From the recording's time to Unix time."""
        rounds = (self.clock() - self._origin_s) // PLAYED_S
        return self._origin_s + rounds * PLAYED_S - DAY_S

    def _named(self, column: str, job: int) -> str:
        """A job's cause, user and so on: a column has its number, another one the names."""
        return self._names[column][int(self._columns[column][job])]

    def _running(self, since_s: float, until_s: float) -> list[int]:
        """Jobs that ran in a stretch of the recording's time."""
        jobs = self._shown & (self._began < until_s) & (self._ended > since_s)
        return np.flatnonzero(jobs).tolist()

    def _stalls(self, jobs: list[int], at_s: float) -> NDArray[np.float64]:
        """Share of their time that steps of jobs wait, shape (jobs,)."""
        c, number = self._columns, np.array(jobs) * 0.618034
        own = np.sin(2 * np.pi * (at_s / (3.0 + 27.0 * (number % 1.0)) + number))
        system = np.maximum(0.0, np.sin(at_s / 90.0 + 2.0 * c["file_system"][jobs])) ** 8
        felt = 1.0 + 0.4 * own + c["on_file_system"][jobs] * system
        stalls: NDArray[np.float64] = (c["stall"][jobs] / 1e4 * felt).clip(0.0, 0.97)
        return stalls

    def _rates(self, jobs: list[int], stalls: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes per second of jobs, shape (jobs,)."""
        c = self._columns
        rates: NDArray[np.float64] = 1e6 * c["rate"][jobs] * c["gpus"][jobs] * (1.0 - stalls)
        return rates

    def records(self, since_s: float, until_s: float, job_id: str = "") -> list[JobRecord]:
        """Jobs of a stretch of Unix time, with their figures in it; of one job, where it is named."""
        shift_s = self._shift_s()
        since_s, until_s = since_s - shift_s, min(until_s, self.clock()) - shift_s
        jobs = self._running(since_s, until_s)
        if job_id:
            jobs = [job for job in jobs if str(FIRST_ID + job) == job_id]
        stalls = self._stalls(jobs, max(since_s, until_s - 30.0))
        each = zip(jobs, stalls.tolist(), self._rates(jobs, stalls).tolist(), strict=True)
        return [self._record(*one, (since_s, until_s), shift_s) for one in each]

    def parts(
        self, since_s: float, until_s: float, job_id: str = ""
    ) -> list[tuple[str, JobRecord]]:
        """The same; of a job that is named, node by node."""
        records = self.records(since_s, until_s, job_id)
        if not job_id:
            return [("", record) for record in records]
        return [(node, record) for record in records for node in record.nodes]

    @functools.cache  # noqa: B019 - one history a process
    def _nodes_of(self, job: int) -> tuple[str, ...]:
        return tuple(self.nodes[at].name for at in np.unique(self._places[job] // GPUS).tolist())

    def _record(
        self, job: int, stall: float, rate: float, stretch: tuple[float, float], shift_s: float
    ) -> JobRecord:
        c, nodes, gpus = self._columns, self._nodes_of(job), int(self._columns["gpus"][job])
        since_s, until_s = max(self._began[job], stretch[0]), min(self._ended[job], stretch[1])
        seconds, measured = float(until_s - since_s), bool(c["measured"][job])
        gpu_s = gpus * seconds
        amounts = {
            "seconds": len(nodes) * seconds, "gpu_s": gpu_s, "gpu_watched_s": gpu_s, "gpus": float(gpus),
            "gpu_busy_s": (1.0 - stall) * gpu_s * (0.8 + 0.19 * (job * 0.618034 % 1.0)),
            "cpu_s": 1.7 * gpu_s, "worked_s": (1.0 - stall) * gpu_s * measured,
        }  # fmt: skip
        figures = {(name, "", ""): amount for name, amount in amounts.items()}
        figures |= {("tier_bytes", t, ""): part * rate * seconds for t, part in _TIERS.items()}
        waited, lost = ("stall_s", "lost_gpu_s") if measured else ("inferred_s", "inferred_gpu_s")
        cause = cause_of(self._named("cause", job)).value
        system = self._named("file_system", job) if c["on_file_system"][job] else ""
        for name, where, part in ((cause, system, 0.9), ("other", "", 0.1)):
            figures[lost, name, where] = part * stall * gpu_s
            figures[waited, name, where] = (
                part * stall * (gpu_s if measured else len(nodes) * seconds)
            )
        user = self._named("user", job)
        return JobRecord(
            job_id=str(FIRST_ID + job), name=self._named("name", job), user=user,
            account=f"proj-{user[:2]}", nodes=nodes,
            first_s=float(shift_s + self._began[job]), last_s=float(shift_s + until_s), measured=measured,
            figures=figures,
        )  # fmt: skip

    def layout(self) -> ClusterLayout:
        """Nodes, who is on them now, and who waits."""
        shift_s = self._shift_s()
        now = self.clock() - shift_s
        holders = [[""] * GPUS for _ in self.nodes]
        boxes = {}
        for job in self._running(now - 1e-6, now):
            name = str(FIRST_ID + job)
            places = self._places[job].tolist()
            for place in places:
                holders[place // GPUS][place % GPUS] = name
            boxes[name] = JobBox(
                job_id=name, gpus=len(places), nodes=len(self._nodes_of(job)),
                partition=self._named("partition", job), started_s=round(shift_s + self._began[job]),
            )  # fmt: skip
        waiting = self._shown & (self._submitted <= now) & (now < self._began)
        return ClusterLayout(self.nodes, holders, boxes, int(waiting.sum()))

    def state(self, at_s: float) -> dict[str, Any]:
        """What a controller would say of file systems at a moment of Unix time."""
        c, at_s = self._columns, at_s - self._shift_s()
        jobs = self._running(at_s - 1.0, at_s)
        rates = _TIERS["source"] * self._rates(jobs, self._stalls(jobs, at_s))
        planes = [
            {"user": self._named("user", job), "flows": [{
                "job": str(FIRST_ID + job), "file_system": self._named("file_system", job),
                "used": {"bytes_per_s": rate},
            }]}
            for job, rate in zip(jobs, rates.tolist(), strict=True)
        ]  # fmt: skip
        # What each can give to a thousand nodes.
        capacities = (c["capacities"] * len(self.nodes) / 1000).tolist()
        systems = [
            {"name": name, "capacity": {"bytes_per_s": capacity}}
            for name, capacity in zip(self._names["file_system"], capacities, strict=True)
        ]
        return {"planes": planes, "file_systems": systems}


class DemoSource(ClusterSource):
    """Plays the recording; `nodes` as `DemoHistory` has it."""

    label = "recorded demo"

    def __init__(
        self, nodes: int = 1000, clock: Callable[[], float] = time.time, period_s: float = 2.0
    ) -> None:
        history = DemoHistory(nodes, clock)
        super().__init__(
            history, lambda: history.state(history.clock()), history.layout, clock, period_s
        )
        self.kept_s |= {"history": 0.0, "layout": 0.0}
        for at_s in np.linspace(clock() - RECENT_S, clock(), STATES, endpoint=False).tolist():
            self._states.append((at_s, history.state(at_s)))
