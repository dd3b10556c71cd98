"""The recorded demo: two hours of a cluster that is not there, and a store of pictures, to try the pages with.

`static/demo.npz` holds who had which GPUs of 1,000 nodes when, in a day and two hours, of some 10,000 jobs:
one array for each column, a row for each job, and the places of all jobs' GPUs one after the other. It was
made once by a seeded model; names, users and figures are nobody's. The player shows its last two hours as if
they were now, over and over. How long a job waits on the average is recorded; how that changes from moment to
moment is computed from bursts on the file systems and a wave of each job's own.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import cause_of
from headrace.control.policy import changes, parse_policy, policy_document, policy_yaml
from headrace.telemetry.history import JobRecord
from headrace.web.views import (
    IDLE,
    ClusterMoment,
    JobBox,
    JobFlow,
    NodeBox,
    file_system,
    job_page,
    levels,
    plainly,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

RECORDING: Final = Path(__file__).parent / "static/demo.npz"
PICTURES: Final = Path(__file__).parent / "static/pictures.npz"
POLICY: Final = Path(__file__).parent / "static/demo.yaml"
DAY_S: Final = 86400.0
PLAYED_S: Final = 2 * 3600.0
NEVER: Final = 0xFFFFFFFF
"""The beginning of a job that has no GPUs within the recording."""

GPUS: Final = 8
"""Of each node."""

STORAGE_S: Final = 1800.0
STORAGE_POINTS: Final = 60
JOB_POINTS: Final = 120
TIERS: Final = ("ram", "disk", "peer", "source")

_BURSTS: Final = ((660.0, 55.0, 1.2), (430.0, 30.0, 0.7), (910.0, 80.0, 0.5), (370.0, 20.0, 0.9))
"""Of each file system: how often it is overrun, for how long, and how much longer jobs wait then."""


class DemoSource:
    """Plays the recording.

    Args:
        nodes: so many of the cluster, of each partition its part; jobs that had others too are left out.
        clock: Unix seconds.
        period_s: between two looks.
    """

    label = "recorded demo"

    def __init__(
        self, nodes: int = 1000, clock: Callable[[], float] = time.time, period_s: float = 2.0
    ) -> None:
        self.period_s = period_s
        self._clock = clock
        self._origin_s = clock()
        with np.load(RECORDING) as file:
            columns = {name: file[name] for name in file.files}
        partition = columns["node_partition"]
        place_in = np.array([(partition[:i] == own).sum() for i, own in enumerate(partition)])
        share_in = place_in / np.bincount(partition)[partition]
        chosen = np.sort(np.argsort(share_in, kind="stable")[:nodes])
        number = np.full(len(partition), -1)
        number[chosen] = np.arange(len(chosen))
        ends = np.cumsum(np.where(columns["began_s"] == NEVER, 0, columns["gpus"]))
        recorded = np.split(columns["places"].astype(np.int64), ends[:-1])
        self._places = [number[places // GPUS] * GPUS + places % GPUS for places in recorded]
        inside = [bool((places >= 0).all()) for places in self._places]
        # Of jobs that only wait, as large a part as of the nodes.
        began = columns["began_s"] != NEVER
        self._shown = np.array(inside) & (began | (np.arange(len(began)) % 1000 < nodes))
        self._columns = columns
        self._submitted, self._began, self._ended = (
            columns[name].astype(np.float64) for name in ("came_s", "began_s", "ended_s")
        )
        self._gpus = columns["gpus"].astype(np.int64)
        self._stalls = columns["stall"] / 1e4
        of_nodes = (columns[name][chosen] for name in ("nodes", "node_partition", "away"))
        self._nodes = tuple(
            NodeBox(str(name), str(columns["partitions"][place]), GPUS, str(away))
            for name, place, away in zip(*of_nodes, strict=True)
        )

    def close(self) -> None:
        """Nothing is held."""

    def now_s(self) -> float:
        """The recording's time."""
        return DAY_S + (self._clock() - self._origin_s) % PLAYED_S

    def _unix(self, recorded_s: float) -> float:
        """The recording's time as if it were today."""
        rounds = (self._clock() - self._origin_s) // PLAYED_S
        return self._origin_s + rounds * PLAYED_S - DAY_S + float(recorded_s)

    # -- a moment ---------------------------------------------------------------------------------

    def _stall(self, jobs: NDArray[np.int64], at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """[jobs, times] share of their time that steps wait."""
        columns, t = self._columns, at_s[None, :]
        number = jobs[:, None] * 0.618034  # each job's own
        every, seconds, height = (
            np.array(column)[:, None] for column in zip(*_BURSTS, strict=True)
        )
        load = height * np.exp(-((((t + every / 3) % every - every / 2) / seconds) ** 2))
        on_file_system = columns["on_file_system"][jobs][:, None]
        felt = np.where(on_file_system, load[columns["file_system"][jobs]], 0.0)
        wave = np.sin(2 * np.pi * (t / (90.0 + 610.0 * (number % 1.0)) + number))
        stall: NDArray[np.float64] = self._stalls[jobs][:, None] * (1.0 + 0.2 * wave + felt)
        return stall.clip(0.0, 0.97)

    def _on_ranks(self, job: int, stall: float) -> NDArray[np.float64]:
        """The stall of each rank."""
        own = np.sin(job + 2.4 * np.arange(int(self._gpus[job]), dtype=np.float64))
        return (stall * (1 + 0.1 * own)).clip(0, 0.98)

    def _tiers(
        self, jobs: NDArray[np.int64], at_s: NDArray[np.float64], stall: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[tiers, jobs, times] bytes per second, by where they came from."""
        own = jobs[:, None] * 0.754878 % 1.0
        age = np.maximum(0.0, at_s[None, :] - self._began[jobs][:, None])
        near = np.where(own < 0.6, 0.3 + own, 0.02) * np.clip(age / (300 + 2700 * own), 0.0, 1.0)
        rate = 1e6 * self._columns["rate"][jobs].astype(np.float64) * self._gpus[jobs]
        flow = rate[:, None] * (1.0 - stall)
        wide = (self._gpus[jobs] > GPUS)[:, None]  # only jobs of several nodes have peers
        disk, peer = np.where(wide, 0.33, 0.55), np.where(wide, 0.22, 0.0)
        return np.stack([flow * near * part for part in (0.45, disk, peer)] + [flow * (1.0 - near)])

    # -- what is asked ----------------------------------------------------------------------------

    def _named(self, column: str, job: int) -> str:
        """A job's cause, user and so on: a column has its number, another one the names."""
        return str(self._columns[f"{column}s"][self._columns[column][job]])

    def _box(self, job: int) -> JobBox:
        waits, gpus = self._stalls[job] >= 0.03, int(self._gpus[job])
        user = self._named("user", job)
        on_file_system = waits and self._columns["on_file_system"][job]
        return JobBox(
            job_id=str(118_000 + job), name=self._named("name", job), user=user,
            account=f"proj-{user[:2]}", gpus=gpus, nodes=max(1, gpus // GPUS),
            partition=self._named("partition", job),
            cause=cause_of(self._named("cause", job)).value if waits else "",
            file_system=self._named("file_system", job) if on_file_system else "",
            measured=bool(self._columns["measured"][job]), started_s=round(self._unix(self._began[job])),
        )  # fmt: skip

    def cluster(self) -> ClusterMoment:
        """Nodes, GPUs and running jobs at this moment of the recording."""
        now = self.now_s()
        running = np.flatnonzero(self._shown & (self._began <= now) & (now < self._ended))
        stalls = self._stall(running, np.array([now]))[:, 0]
        gpus = len(self._nodes) * GPUS
        holders = np.full(gpus, IDLE, np.int32)
        stall, busy = np.full(gpus, np.nan), np.full(gpus, np.nan)
        for place, (job, share) in enumerate(zip(running.tolist(), stalls.tolist(), strict=True)):
            ranks, places = self._on_ranks(job, share), self._places[job]
            holders[places], stall[places] = place, ranks
            busy[places] = (1.0 - ranks) * _use(job)
        waiting = self._shown & (self._submitted <= now) & (now < self._began)
        return ClusterMoment(
            taken_s=self._clock(), nodes=self._nodes,
            jobs=[self._box(job) for job in running.tolist()],
            holders=holders, stall=levels(stall), busy=levels(busy), waiting=int(waiting.sum()),
        )  # fmt: skip

    def records(self) -> list[JobRecord]:
        """Jobs of the last day."""
        now = self.now_s()
        seen = self._shown & (self._began < now) & (self._ended > now - DAY_S)
        return [self._record(job, now) for job in np.flatnonzero(seen).tolist()]

    def _record(self, job: int, now: float) -> JobRecord:
        box, began_s, ended_s = self._box(job), self._began[job], min(now, self._ended[job])
        seconds = float(ended_s - max(began_s, now - DAY_S))
        gpu_s = box.gpus * seconds
        lost_s = float(min(0.95, self._stalls[job])) * gpu_s
        figures = {
            ("seconds", "", ""): box.nodes * seconds,
            ("gpu_s", "", ""): gpu_s,
            ("gpu_watched_s", "", ""): gpu_s,
            ("gpu_busy_s", "", ""): (gpu_s - lost_s) * _use(job),
            ("cpu_s", "", ""): gpu_s * 1.7,
            ("worked_s", "", ""): (gpu_s - lost_s) if box.measured else 0.0,
        }
        names = ("stall_s", "lost_gpu_s") if box.measured else ("inferred_s", "inferred_gpu_s")
        waited, lost = names
        on = 1.0 if box.measured else box.gpus / box.nodes
        causes = [("other", "", 1.0)]
        if box.cause:
            causes = [(box.cause, box.file_system, 0.9), ("other", "", 0.1)]
        for cause, system, part in causes:
            figures[waited, cause, system] = part * lost_s / on
            figures[lost, cause, system] = part * lost_s
        nodes = sorted({place // GPUS for place in self._places[job].tolist()})
        return JobRecord(
            job_id=box.job_id, name=box.name, user=box.user, account=box.account,
            nodes=tuple(self._nodes[node].name for node in nodes),
            first_s=self._unix(began_s), last_s=self._unix(ended_s),
            measured=box.measured, figures=figures,
        )  # fmt: skip

    def storage(self) -> list[dict[str, Any]]:
        """File systems, what weighs on them over time and the jobs behind it."""
        now = self.now_s()
        moments = np.arange(1, STORAGE_POINTS + 1, dtype=np.float64)
        times = now - STORAGE_S + moments * (STORAGE_S / STORAGE_POINTS)
        jobs = np.flatnonzero(self._shown & (self._began <= now) & (self._ended > times[0]))
        stall = self._stall(jobs, times)
        here = (times >= self._began[jobs][:, None]) & (times < self._ended[jobs][:, None])
        flow = np.where(here, self._tiers(jobs, times, stall)[-1], 0.0)
        flows: list[list[JobFlow]] = [[] for _ in self._columns["file_systems"]]
        for job, values in zip(jobs.tolist(), flow.tolist(), strict=True):
            box = self._box(job)
            own = flows[self._columns["file_system"][job]]
            own.append(JobFlow(box.job_id, box.name, box.user, values))
        # What each can give to a thousand nodes.
        capacities = self._columns["capacities"] * len(self._nodes) / 1000
        shown = [self._unix(t) for t in times.tolist()]
        names = self._columns["file_systems"].tolist()
        return [
            file_system(name, shown, own, capacity=capacity)
            for name, own, capacity in zip(names, flows, capacities.tolist(), strict=True)
        ]

    def job(self, job_id: str) -> dict[str, Any] | None:
        """A job over time; None: nothing is known of it."""
        now = self.now_s()
        job = int(job_id) - 118_000 if job_id.isascii() and job_id.isdecimal() else -1
        if not (0 <= job < len(self._began) and self._shown[job] and self._began[job] <= now):
            return None
        box, jobs = self._box(job), np.array([job])
        until_s = min(now, self._ended[job])
        since_s = max(self._began[job], until_s - PLAYED_S)
        times = np.linspace(since_s, until_s, JOB_POINTS, dtype=np.float64)
        stall = self._stall(jobs, times)
        tiers = self._tiers(jobs, times, stall)[:, 0, :]
        places = [
            f"{self._nodes[place // GPUS].name}:{place % GPUS}"
            for place in self._places[job].tolist()
        ]
        ranks = self._on_ranks(job, float(stall[0, -1])).tolist()
        return job_page(
            self._record(job, now),
            [self._unix(t) for t in times.tolist()],
            use=((1.0 - stall[0]) * _use(job)).tolist(),
            stall=stall[0].tolist(),
            tiers={name: line.tolist() for name, line in zip(TIERS, tiers, strict=True)},
            ranks=list(zip(range(box.gpus), places, ranks, strict=True)),
            running=bool(now < self._ended[job]),
            partition=box.partition,
            gpus=box.gpus,
            now=float(stall[0, -3:].mean()),
        )


# -- what goes with it ------------------------------------------------------------------------------


class DemoPolicies:
    """A policy that nobody goes by; asked as `ControllerPolicies` is."""

    where = "in the recorded demo"

    def __init__(self) -> None:
        self._policy = parse_policy(POLICY.read_text(encoding="utf-8"))
        self._version = 7
        self._lock = threading.Lock()

    def current(self) -> dict[str, Any]:
        """`version` and `text`."""
        with self._lock:
            text = policy_yaml(policy_document(self._policy), ascii_only=True)
            return {"version": self._version, "text": text}

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """What a policy changes."""
        policy = parse_policy(text)
        with self._lock:
            differences = [asdict(change) for change in changes(self._policy, policy)]
            applied = bool(differences) and not dry_run
            if applied:
                self._policy, self._version = policy, self._version + 1
            return {
                "version": self._version, "applied": applied, "changes": plainly(differences),
                "unknown": [],
            }  # fmt: skip

    def close(self) -> None:
        """Nothing is held."""


def _use(job: int) -> float:
    """Share of the time in which its GPUs work, of that in which it does not wait."""
    return 0.8 + 0.19 * (job * 0.618034 % 1.0)


def demo_store(path: Path) -> Path:
    """Pack a small store of pictures, which were drawn by formulas: nobody's data are shown."""
    from headrace import pack

    with np.load(PICTURES) as pictures:
        samples = [
            {"name": name, "data": pictures[name].tobytes(), "label": label}
            for label, kind in enumerate(("dunes", "petals", "ripples"))
            for name in pictures.files
            if name.startswith(kind)
        ]
    pack(samples, path)
    return path
