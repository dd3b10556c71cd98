"""Top: what `headrace top` shows of a node daemon, and of a controller: rates, shares, causes and limits.

Plain functions of their reports (`headrace node status --json`, `headrace control status --json`): nothing
here asks a daemon, sleeps or draws. Clients report once a second; rates are taken over several. A row is the
report's own record of a job, data set or node, as far as it is shown, with what is computed beside it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import cause_of
from headrace.plane.stage import latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    Report = Mapping[str, Any]
    Row = dict[str, Any]

WINDOW_S: Final = 6.0  # rates are taken over so long

RATES_KEPT: Final = 60

STALL_SHOWN: Final = 0.01
"""Who waits for less than this share of its time has no cause worth a name."""

BUSY_SHARE: Final = 0.05  # who waits for more than this share of its time starves
SILENT_REPORTS: Final = 3.0  # a plane that has missed so many reports is silent
LIMITED_SHARE: Final = 0.9  # who uses more than this of what it may is limited by it

# What a report says already, under the same name.
_OF_DAEMON: Final = (
    "pid", "folder", "uptime_s", "ram_bytes", "held_bytes", "refused", "protocol_errors",
)  # fmt: skip
_OF_JOB: Final = ("name", "leases", "waiting", "held_bytes", "window_bytes")
_OF_DATA: Final = ("name", "path", "samples", "held_samples", "held_bytes", "quota_bytes")
_OF_CONTROLLER: Final = ("epoch", "policy_version", "degraded", "decide_s")
_OF_PLANE: Final = ("name", "user", "pid", "lease_left_s", "held_bytes", "ram_bytes")


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

    def look(self, state: Report, now_s: float) -> Row:
        """The board at this moment, by what was reported then; the clock is monotonic.

        Returns:
            The daemon's figures, over how many `seconds` rates are taken (0: this is the first look),
            `clients`, bytes per second of all data sets by `tiers`, the `jobs` (who loses most first), the
            `datasets`, and the `answer`: the one thing to know.
        """
        if self._seen and self._seen[-1][1]["pid"] != state["pid"]:  # another daemon
            self._seen.clear()
            self._rates.clear()
        before, seconds = self._add(state, now_s)
        jobs = [self._job(job, before, seconds) for job in state["jobs"] if job["totals"]]
        jobs.sort(key=lambda job: (-(job["stall"] or 0.0), job["name"]))
        known = {job["name"] for job in jobs}
        self._rates = {name: rates for name, rates in self._rates.items() if name in known}
        old = {_data_key(data): data for data in before["datasets"]}
        datasets = [_data(d, old.get(_data_key(d), d), seconds) for d in state["datasets"]]
        datasets.sort(key=lambda data: (-data["bytes_per_s"], data["name"]))
        tiers: dict[str, float] = {}
        for tier, rate in (item for data in datasets for item in data["tiers"].items()):
            tiers[tier] = tiers.get(tier, 0.0) + rate
        return {
            **{key: state[key] for key in _OF_DAEMON},
            "seconds": seconds, "clients": sum(job["clients"] for job in jobs), "tiers": tiers,
            "jobs": jobs, "datasets": datasets, "answer": _answer(jobs, seconds),
        }  # fmt: skip

    def _job(self, job: Report, before: Report, seconds: float) -> Row:
        """A job: how its training fares, and what it has of the daemon.

        `stall` is the share of their time that steps waited, None if no step was seen, and `cause` what they
        waited for most; `ram` is the share of the bytes delivered that was in memory; `direct` and `busy` are
        batches per second that clients read by themselves, and that were refused for want of room.
        """
        now = job["totals"]
        then = next((j["totals"] for j in before["jobs"] if j["name"] == job["name"]), None)
        if then is None:  # it came meanwhile; of a job that came back, the figures go on
            then = before["labels"].get(job["name"]) or {"stall_s": {}}
        numbers = {key: value for key, value in now.items() if isinstance(value, int | float)}
        grown = {key: max(0.0, value - then.get(key, 0)) for key, value in numbers.items()}
        waited = {c: max(0.0, s - then["stall_s"].get(c, 0.0)) for c, s in now["stall_s"].items()}
        waited_s = sum(waited.values())
        known_s = waited_s + grown["worked_s"]
        stall = waited_s / known_s if known_s else None
        per_s = {key: count / seconds if seconds else 0.0 for key, count in grown.items()}
        rates = self._rates.setdefault(job["name"], deque(maxlen=RATES_KEPT))
        if seconds:
            rates.append(per_s["consumed_samples"])
        return {
            **{key: job[key] for key in _OF_JOB},
            "clients": job["sessions"],
            "samples_per_s": per_s["consumed_samples"],
            "bytes_per_s": per_s["consumed_bytes"],
            "stall": stall,
            "cause": max(waited, key=lambda c: waited[c]) if (stall or 0.0) > STALL_SHOWN else "",
            "stall_s": dict(now["stall_s"]),
            "ram": grown["ram_bytes"] / grown["bytes"] if grown["bytes"] else None,
            "direct": per_s["direct_batches"],
            "busy": per_s["busy"],
            "rates": list(rates),
        }


_NO_JOB: Final = (
    "no job uses it. Shown are loaders that read through it: plane='node', or HEADRACE_PLANE=node; "
    "HEADRACE_VERDICT=1 lets others say in their own output what they wait for"
)


def _answer(jobs: list[Row], seconds: float) -> str:
    if not seconds:
        return "looking"
    starving = [job for job in jobs if (job["stall"] or 0.0) > BUSY_SHARE]
    if starving:
        whys = [cause_of(job["cause"]).phrase for job in starving[:3]]
        waits = ", ".join(
            f"{job['name']} waits {job['stall']:.0%} of its time ({why})"
            for job, why in zip(starving, whys, strict=False)
        )
        return f"{waits}, and {len(starving) - 3} more" if len(starving) > 3 else waits
    if not jobs:
        return _NO_JOB
    if all(job["stall"] is None for job in jobs):
        return "no training step was seen lately"
    return "nobody starves"


def _data_key(data: Report) -> tuple[Any, ...]:
    return (data["fingerprint"], *data["parts"])


def _data(data: Report, before: Report, seconds: float) -> Row:
    """A data set: where its bytes come from; `cached_samples` is None without a cache on the local disk."""
    reads, reads_before = data["reads"]["latency_us"], before["reads"]["latency_us"]
    counts = [now - then for now, then in zip(reads, reads_before, strict=True)]
    if min(counts) < 0:  # it was closed and opened again
        counts = reads

    def rate(now: float, then: float) -> float:
        return max(0.0, now - then) / seconds if seconds else 0.0

    return {
        **{key: data[key] for key in _OF_DATA},
        "clients": sum(data["jobs"].values()),
        "cached_samples": data["cache"]["samples"] if data["cache"] else None,
        "bytes_per_s": rate(data["delivered_bytes"], before["delivered_bytes"]),
        "tiers": {
            tier: rate(count, before["bytes_by_tier"].get(tier, 0))
            for tier, count in data["bytes_by_tier"].items()
        },
        "reads_in_flight": data["reads"]["in_flight"],
        "reads_in_flight_max": data["reads"]["in_flight_max"],
        "latency_s_p50": latency_percentile_s(counts, 0.5),
        "latency_s_p99": latency_percentile_s(counts, 0.99),
    }


# -- planes ------------------------------------------------------------------------------------------


class PlanesWatch(_Window):
    """Remembers what is needed for rates; feed it a state and the time."""

    def look(self, state: Report, now_s: float) -> Row:
        """The controller's board at this moment: `planes`, where most is lost first, and `flows`."""
        before, seconds = self._add(state, now_s)
        old = {_plane_key(plane): plane for plane in before["planes"]}
        silent_s = SILENT_REPORTS * state["report_s"]
        planes = [_plane(p, old.get(_plane_key(p)), seconds, silent_s) for p in state["planes"]]
        planes.sort(key=lambda plane: (-plane["stalled"], plane["name"], plane["pid"]))
        shown = {key: state[key] for key in _OF_CONTROLLER}
        return {**shown, "planes": planes, "flows": _flows(state["planes"])}


def _plane_key(plane: Report) -> tuple[Any, ...]:
    return plane["name"], plane["user"], plane["pid"]


def _plane(plane: Report, before: Report | None, seconds: float, silent_s: float) -> Row:
    """A node daemon; `stalled` is how many training processes wait, on average."""
    now, then = plane["stall_s"], {} if before is None else before["stall_s"]
    waited = {cause: max(0.0, total - then.get(cause, total)) for cause, total in now.items()}
    most = max(waited, key=lambda cause: waited[cause], default="")
    return {
        **{key: plane[key] for key in _OF_PLANE},
        "clients": sum(plane["sessions"].values()),
        "silent": plane["silent_s"] > silent_s,
        "stalled": sum(waited.values()) / seconds if seconds else 0.0,
        "cause": cause_of(most, by_node=True) if waited.get(most) else "",
    }


def _flows(planes: list[Report]) -> list[Row]:
    """Each job on each file system, on all nodes together; who reads most first. No limit is None."""
    together: dict[tuple[str, str], list[Report]] = {}
    for plane in planes:
        for flow in plane["flows"]:
            together.setdefault((flow["job"], flow["file_system"]), []).append(flow)
    rows: list[Row] = []
    for (job, system), flows in together.items():
        row: Row = {"job": job, "file_system": system, "planes": len(flows), "limited": False}
        for rate in ("bytes_per_s", "reads_per_s"):
            granted = [flow["granted"][rate] for flow in flows]
            most = None if None in granted else float(sum(granted))
            row[rate] = used = sum(flow["used"][rate] for flow in flows)
            row[f"granted_{rate}"] = most
            row["limited"] |= most is not None and used >= LIMITED_SHARE * most > 0
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["bytes_per_s"], row["job"], row["file_system"]))
