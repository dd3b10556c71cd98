"""Top: what `headrace top` shows of a node daemon, and of a controller: rates, shares, causes and limits.

Plain functions of their reports (`headrace node status --json`, `headrace control status --json`): nothing
here asks a daemon, sleeps or draws. Clients report once a second; rates are taken over several.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import cause_of
from headrace.plane.stage import latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    Report = Mapping[str, Any]

WINDOW_S: Final = 6.0
"""Rates are taken over so long."""

RATES_KEPT: Final = 60

STALL_SHOWN: Final = 0.01
"""Who waits for less than this share of its time has no cause worth a name."""

BUSY_SHARE: Final = 0.05
"""Who waits for more than this share of its time starves."""


# What a report says already, under the same name.
_OF_DAEMON: Final = (
    "pid", "folder", "uptime_s", "ram_bytes", "held_bytes", "refused", "protocol_errors",
)  # fmt: skip
_OF_JOB: Final = ("name", "leases", "waiting", "held_bytes", "window_bytes")
_OF_DATA: Final = ("name", "path", "samples", "held_samples", "held_bytes", "quota_bytes")
_OF_CONTROLLER: Final = ("epoch", "policy_version", "degraded", "decide_s")
_OF_PLANE: Final = ("name", "user", "pid", "lease_left_s", "held_bytes", "ram_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job: how its training fares, and what it has of the daemon."""

    name: str
    clients: int
    samples_per_s: float
    """Delivered to its training steps."""
    bytes_per_s: float
    stall: float | None
    """Share of their time that steps waited; None: no step was seen."""
    cause: str
    """What they waited for most; '' where they hardly waited."""
    stall_s: dict[str, float]
    """Seconds waited since the job began, by cause."""
    ram: float | None
    """Share of the delivered bytes that was in memory; None: nothing was delivered."""
    direct: float
    """Batches per second that its clients read by themselves."""
    busy: float
    """Batches per second refused for want of room."""
    leases: int
    waiting: int
    held_bytes: int
    window_bytes: int
    rates: tuple[float, ...]
    """Samples per second at the last looks, the newest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A data set: where its bytes come from."""

    name: str
    path: str
    clients: int
    samples: int
    held_samples: int
    held_bytes: int
    quota_bytes: int
    cached_samples: int | None
    """On the local disk; None: there is no cache."""
    bytes_per_s: float
    """Delivered."""
    tiers: dict[str, float]
    """Bytes per second, by where they came from."""
    reads_in_flight: int
    reads_in_flight_max: int
    latency_s_p50: float
    latency_s_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All that is shown."""

    pid: int
    folder: str
    uptime_s: float
    seconds: float
    """Over how long rates are taken; 0: this is the first look."""
    ram_bytes: int
    held_bytes: int
    clients: int
    refused: int
    protocol_errors: int
    tiers: dict[str, float]
    """Bytes per second, by where they came from, of all data sets."""
    jobs: tuple[JobRow, ...]
    """Who loses most first."""
    datasets: tuple[DataRow, ...]

    @property
    def answer(self) -> str:
        """The one thing to know."""
        if not self.seconds:
            return "looking"
        starving = [job for job in self.jobs if job.stall is not None and job.stall > BUSY_SHARE]
        if starving:
            waits = ", ".join(
                f"{job.name} waits {job.stall:.0%} of its time ({cause_of(job.cause).phrase})"
                for job in starving[:3]
            )
            more = len(starving) - 3
            return f"{waits}, and {more} more" if more > 0 else waits
        if not self.jobs:
            return "no job uses it"
        if all(job.stall is None for job in self.jobs):
            return "no training step was seen lately"
        return "nobody starves"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "answer": self.answer}


class _Window:
    """Reports of the last seconds, that rates are taken over."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Report]] = deque()

    def _add(self, report: Report, now_s: float) -> tuple[Report, float]:
        """Add a report; returns the oldest one of the window, and how many seconds ago it came."""
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        self._seen.append((now_s, report))
        then_s, before = self._seen[0]
        return before, now_s - then_s


class DaemonWatch(_Window):
    """Remembers what is needed for rates: feed it a report and the time, and it gives the board."""

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[str, deque[float]] = {}

    def look(self, state: Report, now_s: float) -> Board:
        """The board at this moment, by what was reported then; the clock is monotonic."""
        if self._seen and self._seen[-1][1]["pid"] != state["pid"]:  # another daemon
            self._seen.clear()
            self._rates.clear()
        before, seconds = self._add(state, now_s)
        jobs = [self._job(job, before, seconds) for job in state["jobs"] if job["totals"]]
        known = {job.name for job in jobs}
        self._rates = {name: rates for name, rates in self._rates.items() if name in known}
        old = {_key(data): data for data in before["datasets"]}
        datasets = [_data_row(d, old.get(_key(d), d), seconds) for d in state["datasets"]]
        tiers: dict[str, float] = {}
        for tier, rate in (item for data in datasets for item in data.tiers.items()):
            tiers[tier] = tiers.get(tier, 0.0) + rate
        return Board(
            **{key: state[key] for key in _OF_DAEMON},
            seconds=seconds,
            clients=sum(job.clients for job in jobs),
            tiers=tiers,
            jobs=tuple(sorted(jobs, key=lambda j: (-(j.stall or 0.0), j.name))),
            datasets=tuple(sorted(datasets, key=lambda d: (-d.bytes_per_s, d.name))),
        )

    def _job(self, job: Report, before: Report, seconds: float) -> JobRow:
        now = job["totals"]
        then = next((j["totals"] for j in before["jobs"] if j["name"] == job["name"]), None)
        if then is None:  # it came meanwhile; of a job that came back, the figures go on
            then = before["labels"].get(job["name"]) or {"stall_s": {}}
        grown = {
            key: max(0.0, now[key] - then.get(key, 0))
            for key in now
            if isinstance(now[key], int | float)
        }
        waited = {c: max(0.0, s - then["stall_s"].get(c, 0.0)) for c, s in now["stall_s"].items()}
        waited_s = sum(waited.values())
        known_s = waited_s + grown["worked_s"]
        stall = waited_s / known_s if known_s else None
        per_s = {key: count / seconds if seconds else 0.0 for key, count in grown.items()}
        rates = self._rates.setdefault(job["name"], deque(maxlen=RATES_KEPT))
        if seconds:
            rates.append(per_s["consumed_samples"])
        return JobRow(
            **{key: job[key] for key in _OF_JOB},
            clients=job["sessions"],
            samples_per_s=per_s["consumed_samples"],
            bytes_per_s=per_s["consumed_bytes"],
            stall=stall,
            cause=max(waited, key=lambda c: waited[c]) if (stall or 0.0) > STALL_SHOWN else "",
            stall_s=dict(now["stall_s"]),
            ram=grown["ram_bytes"] / grown["bytes"] if grown["bytes"] else None,
            direct=per_s["direct_batches"],
            busy=per_s["busy"],
            rates=tuple(rates),
        )


def _key(data: Report) -> tuple[Any, ...]:
    return (data["fingerprint"], *data["parts"])


def _data_row(data: Report, before: Report, seconds: float) -> DataRow:
    counts = [
        now - then
        for now, then in zip(
            data["reads"]["latency_us"], before["reads"]["latency_us"], strict=True
        )
    ]
    if min(counts) < 0:  # it was closed and opened again
        counts = data["reads"]["latency_us"]

    def rate(now: float, then: float) -> float:
        return max(0.0, now - then) / seconds if seconds else 0.0

    return DataRow(
        **{key: data[key] for key in _OF_DATA},
        clients=sum(data["jobs"].values()),
        cached_samples=data["cache"]["samples"] if data["cache"] else None,
        bytes_per_s=rate(data["delivered_bytes"], before["delivered_bytes"]),
        tiers={
            tier: rate(count, before["bytes_by_tier"].get(tier, 0))
            for tier, count in data["bytes_by_tier"].items()
        },
        reads_in_flight=data["reads"]["in_flight"],
        reads_in_flight_max=data["reads"]["in_flight_max"],
        latency_s_p50=latency_percentile_s(counts, 0.5),
        latency_s_p99=latency_percentile_s(counts, 0.99),
    )


# -- planes ------------------------------------------------------------------------------------------

SILENT_REPORTS: Final = 3.0
"""A plane that has missed so many reports is silent."""

LIMITED_SHARE: Final = 0.9
"""Who uses more than this of what it may is limited by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRow:
    """A node daemon."""

    name: str
    user: str
    pid: int
    clients: int
    silent: bool
    """It does not report."""
    lease_left_s: float
    held_bytes: float
    ram_bytes: float
    stalled: float
    """Training processes that wait, on average: seconds waited in all, per second."""
    cause: str
    """What they waited for most; ''."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRow:
    """A job on a file system, on all nodes together."""

    job: str
    file_system: str
    planes: int
    bytes_per_s: float
    granted_bytes_per_s: float | None
    """None: no limit."""
    reads_per_s: float
    granted_reads_per_s: float | None

    @property
    def limited(self) -> bool:
        """Whether it uses what it may."""
        pairs = (
            (self.bytes_per_s, self.granted_bytes_per_s),
            (self.reads_per_s, self.granted_reads_per_s),
        )
        return any(most is not None and used >= LIMITED_SHARE * most > 0 for used, most in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanesBoard:
    """All that is shown of a controller."""

    epoch: int
    policy_version: int
    degraded: str
    """Why it cannot write its database; ''."""
    decide_s: float
    planes: tuple[PlaneRow, ...]
    """Where most is lost first."""
    flows: tuple[FlowRow, ...]
    """Who reads most first."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        flows = [{**asdict(flow), "limited": flow.limited} for flow in self.flows]
        return {**asdict(self), "flows": flows}


class PlanesWatch(_Window):
    """Remembers what is needed for rates; feed it a state and the time."""

    def look(self, state: Report, now_s: float) -> PlanesBoard:
        """The board at this moment, by what was reported then; the clock is monotonic."""
        before, seconds = self._add(state, now_s)
        old = {_plane_key(plane): plane for plane in before["planes"]}
        silent_s = SILENT_REPORTS * state["report_s"]
        planes = [
            _plane(plane, old.get(_plane_key(plane)), seconds, silent_s)
            for plane in state["planes"]
        ]
        return PlanesBoard(
            **{key: state[key] for key in _OF_CONTROLLER},
            planes=tuple(sorted(planes, key=lambda p: (-p.stalled, p.name, p.pid))),
            flows=_flows(state["planes"]),
        )


def _plane_key(plane: Report) -> tuple[Any, ...]:
    return plane["name"], plane["user"], plane["pid"]


def _plane(plane: Report, before: Report | None, seconds: float, silent_s: float) -> PlaneRow:
    then = {} if before is None else before["stall_s"]
    waited = {
        cause: max(0.0, total - then.get(cause, total)) for cause, total in plane["stall_s"].items()
    }
    most = max(waited, key=lambda cause: waited[cause], default="")
    return PlaneRow(
        **{key: plane[key] for key in _OF_PLANE},
        clients=sum(plane["sessions"].values()),
        silent=plane["silent_s"] > silent_s,
        stalled=sum(waited.values()) / seconds if seconds else 0.0,
        cause=cause_of(most, by_node=True) if waited.get(most) else "",
    )


def _flows(planes: list[Report]) -> tuple[FlowRow, ...]:
    together: dict[tuple[str, str], list[Report]] = {}
    for plane in planes:
        for flow in plane["flows"]:
            together.setdefault((flow["job"], flow["file_system"]), []).append(flow)
    rows = [
        FlowRow(
            job=job,
            file_system=system,
            planes=len(flows),
            bytes_per_s=sum(flow["used"]["bytes_per_s"] for flow in flows),
            granted_bytes_per_s=_granted(flows, "bytes_per_s"),
            reads_per_s=sum(flow["used"]["reads_per_s"] for flow in flows),
            granted_reads_per_s=_granted(flows, "reads_per_s"),
        )
        for (job, system), flows in together.items()
    ]
    return tuple(sorted(rows, key=lambda r: (-r.bytes_per_s, r.job, r.file_system)))


def _granted(flows: list[Report], resource: str) -> float | None:
    """What all may use together; None: one of them without limit."""
    granted = [flow["granted"][resource] for flow in flows]
    return None if None in granted else float(sum(granted))
