"""Top: rates, shares and causes out of what a node daemon says now and said before.

Plain functions of its reports (`headrace node status --json`): nothing here asks a daemon, sleeps or
draws. What clients tell, they tell once a second; rates are taken over several.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import cause_of
from headrace.plane.stage import latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    State = Mapping[str, Any]

__all__ = ["Board", "DataRow", "JobRow", "Watch"]

WINDOW_S: Final = 6.0
"""Rates are taken over so long."""

RATES_KEPT: Final = 60

STALL_SHOWN: Final = 0.01
"""Who waits for less than this share of its time has no cause worth a name."""

BUSY_SHARE: Final = 0.05
"""Who waits for more than this share of its time starves."""


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
            told = ", ".join(
                f"{job.name} waits {job.stall:.0%} of its time ({cause_of(job.cause).phrase})"
                for job in starving[:3]
            )
            more = len(starving) - 3
            return f"{told}, and {more} more" if more > 0 else told
        if not self.jobs:
            return "no job uses it"
        if all(job.stall is None for job in self.jobs):
            return "no training step was seen lately"
        return "nobody starves"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "answer": self.answer}


@dataclass(slots=True)
class Watch:
    """Remembers what is needed for rates.

    Feed it a report and the time, as often as you like; it gives the board.
    """

    _seen: deque[tuple[float, State]] = field(default_factory=deque)
    _rates: dict[str, deque[float]] = field(default_factory=dict)

    def look(self, state: State, now_s: float) -> Board:
        """The board at this moment.

        Args:
            state: what the daemon says.
            now_s: monotonic.
        """
        if self._seen and self._seen[-1][1]["pid"] != state["pid"]:  # another daemon
            self._seen.clear()
            self._rates.clear()
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        self._seen.append((now_s, state))
        then_s, before = self._seen[0]
        seconds = now_s - then_s
        jobs = [self._job(job, before, seconds) for job in state["jobs"] if job["totals"]]
        known = {job.name for job in jobs}
        self._rates = {name: rates for name, rates in self._rates.items() if name in known}
        old = {_key(data): data for data in before["datasets"]}
        datasets = [_data_row(d, old.get(_key(d), d), seconds) for d in state["datasets"]]
        tiers: dict[str, float] = {}
        for data in datasets:
            for tier, rate in data.tiers.items():
                tiers[tier] = tiers.get(tier, 0.0) + rate
        return Board(
            pid=state["pid"],
            folder=state["folder"],
            uptime_s=state["uptime_s"],
            seconds=seconds,
            ram_bytes=state["ram_bytes"],
            held_bytes=state["held_bytes"],
            clients=sum(job.clients for job in jobs),
            refused=state["refused"],
            protocol_errors=state["protocol_errors"],
            tiers=tiers,
            jobs=tuple(sorted(jobs, key=lambda j: (-(j.stall or 0.0), j.name))),
            datasets=tuple(sorted(datasets, key=lambda d: (-d.bytes_per_s, d.name))),
        )

    def _job(self, job: State, before: State, seconds: float) -> JobRow:
        now = job["totals"]
        then = next((j["totals"] for j in before["jobs"] if j["name"] == job["name"]), None)
        if then is None:  # it came meanwhile; of a job that came back, the figures go on
            then = before["labels"].get(job["name"]) or _zeros(now)
        grown = {
            key: max(0.0, now[key] - then[key]) for key in now if isinstance(now[key], int | float)
        }
        waited = {c: max(0.0, s - then["stall_s"][c]) for c, s in now["stall_s"].items()}
        waited_s = sum(waited.values())
        known_s = waited_s + grown["worked_s"]
        stall = waited_s / known_s if known_s else None
        rate = grown["consumed_samples"] / seconds if seconds else 0.0
        rates = self._rates.setdefault(job["name"], deque(maxlen=RATES_KEPT))
        if seconds:
            rates.append(rate)
        return JobRow(
            name=job["name"],
            clients=job["sessions"],
            samples_per_s=rate,
            bytes_per_s=grown["consumed_bytes"] / seconds if seconds else 0.0,
            stall=stall,
            cause=max(waited, key=lambda c: waited[c]) if (stall or 0.0) > STALL_SHOWN else "",
            stall_s=dict(now["stall_s"]),
            ram=grown["ram_bytes"] / grown["bytes"] if grown["bytes"] else None,
            direct=grown["direct_batches"] / seconds if seconds else 0.0,
            busy=grown["busy"] / seconds if seconds else 0.0,
            leases=job["leases"],
            waiting=job["waiting"],
            held_bytes=job["held_bytes"],
            window_bytes=job["window_bytes"],
            rates=tuple(rates),
        )


def _zeros(totals: State) -> State:
    return {**dict.fromkeys(totals, 0), "stall_s": dict.fromkeys(totals["stall_s"], 0.0)}


def _key(data: State) -> tuple[Any, ...]:
    return (data["fingerprint"], *data["parts"])


def _data_row(data: State, before: State, seconds: float) -> DataRow:
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
        name=data["name"],
        path=data["path"],
        clients=sum(data["jobs"].values()),
        samples=data["samples"],
        held_samples=data["held_samples"],
        held_bytes=data["held_bytes"],
        quota_bytes=data["quota_bytes"],
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
