"""Starving: jobs ranked by the GPU-hours that they lost to waiting for data; users, file systems, causes.

Plain functions of records (`headrace.telemetry.history`). Where a job has no GPU it is ranked by the time
that its steps waited. What is inferred is called so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.telemetry.report import hours_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.telemetry.history import JobRecord

__all__ = ["Group", "Starving", "StarvingJob", "starving_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StarvingJob:
    """A job."""

    job_id: str
    name: str
    user: str
    account: str
    nodes: int
    gpu_hours: float
    lost_gpu_hours: float
    waited_s: float
    stall: float
    """Share of its steps' time."""
    cause: str
    """What they waited for most."""
    file_system: str
    """On which most was lost; ''."""
    quality: str
    """`measured` or `inferred`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs together: of a user, on a file system, for a cause."""

    name: str
    jobs: int
    gpu_hours: float
    """That the jobs had; 0 for causes and file systems, where a job may be in several."""
    lost_gpu_hours: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Starving:
    """Who starves."""

    since_s: float
    until_s: float
    jobs: tuple[StarvingJob, ...]
    """Who lost most, first."""
    users: tuple[Group, ...]
    file_systems: tuple[Group, ...]
    causes: tuple[Group, ...]
    gpu_hours: float
    """That all jobs had, also those that did not starve."""
    lost_gpu_hours: float

    @property
    def answer(self) -> str:
        """The one thing to know."""
        if not self.jobs:
            return "nobody starved: no job is known to have waited for data"
        first = self.jobs[0]
        share = self.lost_gpu_hours / self.gpu_hours if self.gpu_hours else 0.0
        if self.lost_gpu_hours <= 0.0:
            return (
                f"job {first.job_id} waited longest, {first.waited_s:,.0f} s; no GPU was lost by it"
            )
        return (
            f"{hours_text(self.lost_gpu_hours)} of {hours_text(self.gpu_hours)} GPU-hours ({share:.0%}) "
            f"were lost to waiting for data, most by job {first.job_id} "
            f"({hours_text(first.lost_gpu_hours)}, {first.cause})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "answer": self.answer}


def starving_of(
    records: Iterable[JobRecord], since_s: float, until_s: float, least: float = 0.01
) -> Starving:
    """Rank jobs.

    Args:
        records: of the stretch of time.
        since_s: of the stretch, in Unix seconds.
        until_s: likewise.
        least: jobs that waited for less than this share of their time do not starve.
    """
    every = list(records)
    hungry = [record for record in every if (record.stall or 0.0) >= least]
    jobs = sorted(
        (_job(record) for record in hungry),
        key=lambda job: (-job.lost_gpu_hours, -job.waited_s, job.job_id),
    )
    users: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    systems: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    causes: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for record in hungry:
        lost_s, waited_s = sum(record.lost.values()), sum(record.waited.values())
        users[record.user].append((record.gpu_hours, lost_s, waited_s))
        waited_on = record.by_file_system("stall_s" if record.measured else "inferred_s")
        _spread(systems, record.lost_by_file_system, waited_on)
        _spread(causes, record.lost, record.waited)
    return Starving(
        since_s=since_s,
        until_s=until_s,
        jobs=tuple(jobs),
        users=_groups(users),
        file_systems=_groups(systems),
        causes=_groups(causes),
        gpu_hours=sum(record.gpu_hours for record in every),
        lost_gpu_hours=sum(job.lost_gpu_hours for job in jobs),
    )


def _job(record: JobRecord) -> StarvingJob:
    by_system = record.lost_by_file_system or record.by_file_system(
        "stall_s" if record.measured else "inferred_s"
    )
    return StarvingJob(
        job_id=record.shown_id,
        name=record.name,
        user=record.user,
        account=record.account,
        nodes=len(record.nodes),
        gpu_hours=record.gpu_hours,
        lost_gpu_hours=sum(record.lost.values()) / 3600,
        waited_s=sum(record.waited.values()),
        stall=record.stall or 0.0,
        cause=next(iter(record.waited), ""),
        file_system=next(iter(by_system), ""),
        quality=record.quality,
    )


_Name = TypeVar("_Name", bound=str)


def _spread(
    groups: dict[str, list[tuple[float, float, float]]],
    lost: Mapping[_Name, float],
    waited: Mapping[_Name, float],
) -> None:
    for name in {**lost, **waited}:
        groups[str(name)].append((0.0, lost.get(name, 0.0), waited.get(name, 0.0)))


def _groups(found: Mapping[str, list[tuple[float, float, float]]]) -> tuple[Group, ...]:
    groups = (
        Group(
            name=name,
            jobs=len(rows),
            gpu_hours=sum(row[0] for row in rows),
            lost_gpu_hours=sum(row[1] for row in rows) / 3600,
            waited_s=sum(row[2] for row in rows),
        )
        for name, rows in found.items()
    )
    return tuple(sorted(groups, key=lambda g: (-g.lost_gpu_hours, -g.waited_s, g.name)))
