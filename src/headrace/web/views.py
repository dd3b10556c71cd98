"""Views: what pages draw: one job over time, a file system, the rows of the leaderboard. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.telemetry.report import JobReport, hint_of
from headrace.web.cluster import plain, plainly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.insight.usage import Starving, StarvingGroup, StarvingJob
    from headrace.telemetry.history import JobRecord

RANKS_MAX = 4096
NODES_MAX = 256


def job_page(
    record: JobRecord,
    times: Sequence[float],
    *,
    use: Sequence[float | None],
    stall: Sequence[float | None],
    tiers: Mapping[str, Sequence[float]],
    ranks: Sequence[tuple[int, str, float]],
    running: bool,
    gpus: int,
    now: float | None,
    partition: str = "",
    events: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """What is known of a job, as plain values, every name as it may be shown.

    Args:
        record: its figures in all.
        times: Unix seconds of the moments below.
        use: GPUs' share of time at work; None where nobody looked.
        stall: steps' share of time that was waited; None where nothing is known.
        tiers: bytes per second, by where they came from.
        ranks: number, place and stall now of each.
        running: it has not ended.
        gpus: that it has.
        now: its stall now; None: not known.
        partition: of the scheduler; ''.
        events: what its tuner did: `at_s`, `knob`, `before`, `after`, `why`, `kept`.
    """
    report = JobReport(record).as_dict()
    facts = plainly(report | {"nodes": report["nodes"][:NODES_MAX], "partition": partition})
    return {
        "facts": facts | {"hint": report["hint"], "node_count": len(record.nodes), "gpus": gpus},
        "running": running,
        "now": now,
        "times": [round(t, 3) for t in times],
        "use": [_share(value) for value in use],
        "stall": [_share(value) for value in stall],
        "tiers": {plain(name): _short(row) for name, row in tiers.items()},
        "events": [plainly(event) for event in events],
        "ranks": [[rank, plain(place), _share(s)] for rank, place, s in ranks[:RANKS_MAX]],
    }


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


TOP: Final = 7
"""Jobs that have a band of their own; as many as there are colours to tell apart."""


class JobFlow(NamedTuple):
    """A job on a file system: what it took at each moment."""

    job_id: str
    name: str
    user: str
    values: Sequence[float]


def file_system(
    name: str,
    times: Sequence[float],
    flows: Sequence[JobFlow],
    *,
    unit: str = "B/s",
    capacity: float | None = None,
    latency_s: Sequence[float] = (),
    waiting_gpus: Sequence[float] = (),
) -> dict[str, Any]:
    """A file system as plain values: the largest jobs one by one, the rest together.

    Args:
        name: of the file system.
        times: Unix seconds of the moments.
        flows: of all jobs.
        unit: of the flows.
        capacity: what it can give; None: not known.
        latency_s: of reads at each moment; empty: not known.
        waiting_gpus: GPUs' worth of waiting for it at each moment; empty: not known.
    """
    ranked = sorted(flows, key=lambda flow: (-sum(flow.values), flow.job_id))
    rest = [sum(column) for column in zip(*(f.values for f in ranked[TOP:]), strict=True)]
    total = [sum(column) for column in zip(*(f.values for f in ranked), strict=True)]
    most = sum(total)
    return {
        "name": plain(name),
        "unit": unit,
        "times": [round(t, 1) for t in times],
        "capacity": capacity,
        "now": total[-1] if total else 0.0,
        "jobs": len(ranked),
        "top": [
            {
                **{key: plain(getattr(flow, key)) for key in ("job_id", "name", "user")},
                "share": sum(flow.values) / most if most else 0.0,
                "values": _short(flow.values),
            }
            for flow in ranked[:TOP]
        ],
        "rest": _short(rest),
        "latency_s": [round(value, 6) for value in latency_s],
        "waiting_gpus": [round(value, 2) for value in waiting_gpus],
    }


def _short(values: Sequence[float]) -> list[float]:
    """Four digits are enough for a picture."""
    return [float(f"{value:.4g}") for value in values]


ROWS_MAX: Final = 200
GROUPS: Final = 8

_SORTS: Final = {
    "lost": lambda job: (-job.lost_gpu_hours, -job.waited_s),
    "hours": lambda job: (-job.gpu_hours,),
    "stall": lambda job: (-job.stall,),
    "waited": lambda job: (-job.waited_s,),
    "job": lambda job: (job.job_id,),
    "name": lambda job: (job.name,),
    "user": lambda job: (job.user,),
    "cause": lambda job: (job.cause,),
    "on": lambda job: (job.file_system,),
}


def rows(
    starving: Starving, records: Mapping[str, JobRecord], given: Mapping[str, str]
) -> dict[str, Any]:
    """The leaderboard as an address asks for it, as plain values.

    Raises ValueError if the order or the limit is none.
    """
    sort, limit = given.get("sort", "lost"), given.get("limit", "50")
    if sort not in _SORTS:
        raise ValueError(f"sort is {sort!r}, expected one of {', '.join(_SORTS)}")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= ROWS_MAX):
        raise ValueError(f"limit is {limit!r}, expected 1 to {ROWS_MAX}")
    text = given.get("job", "").lower()
    user, cause, on = (given.get(name, "") for name in ("user", "cause", "on"))
    wanted = [
        job for job in starving.jobs
        if user in ("", job.user) and cause in ("", job.cause) and on in ("", job.file_system)
        and (text in job.job_id.lower() or text in job.name.lower())
    ]  # fmt: skip
    wanted.sort(key=_SORTS[sort], reverse=given.get("reverse") == "1")
    return {
        "answer": _sentence(starving.answer),
        "since_s": starving.since_s,
        "until_s": starving.until_s,
        "gpu_hours": starving.gpu_hours,
        "lost_gpu_hours": starving.lost_gpu_hours,
        "jobs": [_row(job, records.get(job.job_id)) for job in wanted[: int(limit)]],
        "of": len(wanted),
        "all": len(starving.jobs),
        "lost_shown": sum(job.lost_gpu_hours for job in wanted),
        "users": _groups(starving.users),
        "file_systems": _groups(starving.file_systems),
        "causes": _groups(starving.causes),
        "every_user": sorted({plain(group.name) for group in starving.users})[:2000],
    }


def _sentence(text: str) -> str:
    """A sentence; longer than a name may be."""
    return "".join(plain(c) for c in text[:2000])


def _row(job: StarvingJob, record: JobRecord | None) -> Any:
    row = {
        "job_id": job.job_id, "name": job.name, "user": job.user, "account": job.account,
        "nodes": job.nodes, "gpu_hours": job.gpu_hours, "lost": job.lost_gpu_hours,
        "waited_s": job.waited_s, "stall": job.stall, "cause": job.cause, "on": job.file_system,
        "measured": job.quality == "measured",
    }  # fmt: skip
    return plainly(row) | {"hint": "" if record is None else _sentence(hint_of(record))}


def _groups(groups: tuple[StarvingGroup, ...]) -> list[dict[str, Any]]:
    return [
        {"name": plain(g.name), "jobs": g.jobs, "lost": g.lost_gpu_hours, "waited_s": g.waited_s}
        for g in groups[:GROUPS]
    ]
