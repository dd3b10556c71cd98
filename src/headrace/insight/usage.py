"""Usage: who used what, by user and account, and which jobs lost most to waiting for data.

Plain functions of the agents' history (`headrace.telemetry`) and of Slurm's books. The books (`sacct`) know
every job's hours, and nothing of what they were good for; the history knows that of the jobs it saw. Together:
hours from the books, shares from the history, and how many of the hours the history covers. Where a job has no
GPU it is ranked by the time that its steps waited. What is inferred is called so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.telemetry.report import hours_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.cluster.slurm.accounting import AccountedJob
    from headrace.telemetry.history import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """A user in an account.

    Attributes:
        cpu_hours: CPU time that they used; without a history, that they had.
        seen_gpu_hours: GPU-hours that an agent saw: shares are of these.
        gpu_use: share of their GPUs' time in which they worked; None: nobody looked.
        lost_gpu_hours: waited for data, of those seen.
        stall: share of steps' time that was waited; None: nothing is known.
        efficiency: share of GPU-hours seen that did not wait for data; None: none was seen.
    """

    user: str
    account: str
    jobs: int
    gpu_hours: float
    cpu_hours: float
    seen_gpu_hours: float
    gpu_use: float | None
    lost_gpu_hours: float
    stall: float | None
    efficiency: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTable:
    """Who used what."""

    since_s: float
    until_s: float
    source: str
    """Where hours come from: `slurm` or `history`."""
    rows: tuple[UsageRow, ...]
    """Who had most first."""
    total: UsageRow


class _Share(NamedTuple):
    """What a job had within the stretch, and what the history knows of it."""

    job_id: str
    gpu_hours: float
    cpu_hours: float
    record: JobRecord | None


def _row(user: str, account: str, shares: Sequence[_Share]) -> UsageRow:
    seen = [share.record for share in shares if share.record is not None]
    seen_gpu_hours = sum(record.gpu_hours for record in seen)
    lost_gpu_hours = sum(sum(record.lost.values()) for record in seen) / 3600
    watched_s = sum(record.total("gpu_watched_s") for record in seen)
    waited_s = known_s = 0.0
    for record in seen:
        if record.stall is not None:
            waits_s = sum(record.waited.values())
            waited_s += waits_s
            known_s += waits_s + record.total("worked_s") if record.measured else record.seconds
    return UsageRow(
        user=user, account=account, jobs=len({share.job_id for share in shares}),
        gpu_hours=sum(share.gpu_hours for share in shares),
        cpu_hours=sum(share.cpu_hours for share in shares), seen_gpu_hours=seen_gpu_hours,
        gpu_use=sum(r.total("gpu_busy_s") for r in seen) / watched_s if watched_s else None,
        lost_gpu_hours=lost_gpu_hours, stall=waited_s / known_s if known_s else None,
        efficiency=max(0.0, 1.0 - lost_gpu_hours / seen_gpu_hours) if seen_gpu_hours else None,
    )  # fmt: skip


def usage_of(
    records: Sequence[JobRecord], books: Iterable[AccountedJob] | None, since_s: float, until_s: float
) -> UsageTable:  # fmt: skip
    """Add up; without books (the scheduler's jobs), hours are the history's. The stretch is in Unix seconds."""
    shares: dict[tuple[str, str], list[_Share]] = defaultdict(list)
    by_id = {name: r for r in records for name in (r.job_id, r.alias) if name}
    if books is None:
        for r in records:
            cpu_hours = r.total("cpu_s") / 3600
            shares[r.user, r.account].append(_Share(r.job_id, r.gpu_hours, cpu_hours, r))
    for job in books or ():
        hours = _hours(job, since_s, until_s)
        if hours <= 0.0:
            continue
        known = by_id.get(job.job_id)
        cpu_hours = hours * job.cpu_count if known is None else known.total("cpu_s") / 3600
        gpu_hours = hours * job.gpu_count
        if not gpu_hours and known is not None:
            gpu_hours = known.gpu_hours  # not every book counts GPUs
        shares[job.user, job.account].append(_Share(job.job_id, gpu_hours, cpu_hours, known))
    rows = [_row(*key, of_key) for key, of_key in shares.items()]
    return UsageTable(
        since_s=since_s, until_s=until_s, source="history" if books is None else "slurm",
        rows=tuple(sorted(rows, key=lambda r: (-r.gpu_hours, -r.cpu_hours, r.user, r.account))),
        total=_row("", "", [share for of_key in shares.values() for share in of_key]),
    )  # fmt: skip


def _hours(job: AccountedJob, since_s: float, until_s: float) -> float:
    """That a job had its resources within the stretch."""
    if job.started_s is None:
        return 0.0
    ended_s = until_s if job.ended_s is None else min(job.ended_s, until_s)
    return max(0.0, ended_s - max(job.started_s, since_s)) / 3600


# -- starving ----------------------------------------------------------------------------------------


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
class StarvingGroup:
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
    users: tuple[StarvingGroup, ...]
    file_systems: tuple[StarvingGroup, ...]
    causes: tuple[StarvingGroup, ...]
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
            longest = f"job {first.job_id} waited longest, {first.waited_s:,.0f} s"
            return f"{longest}; no GPU was lost by it"
        most = f"job {first.job_id} ({hours_text(first.lost_gpu_hours)}, {first.cause})"
        lost, had = hours_text(self.lost_gpu_hours), hours_text(self.gpu_hours)
        return (
            f"{lost} of {had} GPU-hours ({share:.0%}) were lost to waiting for data, most by {most}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "answer": self.answer}


def starving_of(
    records: Iterable[JobRecord], since_s: float, until_s: float, least: float = 0.01
) -> Starving:
    """Rank jobs; who waited for less than the share `least` of its time does not starve."""
    every = list(records)
    hungry = [record for record in every if (record.stall or 0.0) >= least]
    jobs = sorted(map(_job, hungry), key=lambda j: (-j.lost_gpu_hours, -j.waited_s, j.job_id))
    users, systems, causes = (defaultdict[str, list[_Amounts]](list) for _ in range(3))
    for record in hungry:
        lost_s, waited_s = sum(record.lost.values()), sum(record.waited.values())
        users[record.user].append((record.gpu_hours, lost_s, waited_s))
        _spread(systems, record.lost_by_file_system, _waited_on(record))
        _spread(causes, record.lost, record.waited)
    return Starving(
        since_s=since_s, until_s=until_s, jobs=tuple(jobs), users=_groups(users),
        file_systems=_groups(systems), causes=_groups(causes),
        gpu_hours=sum(record.gpu_hours for record in every),
        lost_gpu_hours=sum(job.lost_gpu_hours for job in jobs),
    )  # fmt: skip


def _job(record: JobRecord) -> StarvingJob:
    by_system = record.lost_by_file_system or _waited_on(record)
    return StarvingJob(
        job_id=record.shown_id, name=record.name, user=record.user, account=record.account,
        nodes=len(record.nodes), gpu_hours=record.gpu_hours,
        lost_gpu_hours=sum(record.lost.values()) / 3600, waited_s=sum(record.waited.values()),
        stall=record.stall or 0.0, cause=next(iter(record.waited), ""),
        file_system=next(iter(by_system), ""), quality=record.quality,
    )  # fmt: skip


def _waited_on(record: JobRecord) -> Mapping[str, float]:
    """Seconds waited by file system."""
    return record.by_file_system("stall_s" if record.measured else "inferred_s")


_Amounts = tuple[float, float, float]
"""Of a job: GPU-hours that it had, seconds of GPUs lost, seconds waited."""


def _spread(
    groups: dict[str, list[_Amounts]], lost: Mapping[Any, float], waited: Mapping[Any, float]
) -> None:
    """Add a job to each name that it lost or waited at."""
    for name in {**lost, **waited}:
        groups[str(name)].append((0.0, lost.get(name, 0.0), waited.get(name, 0.0)))


def _groups(groups: Mapping[str, list[_Amounts]]) -> tuple[StarvingGroup, ...]:
    """Who lost most, first."""
    rows = []
    for name, jobs in groups.items():
        gpu_hours, lost_s, waited_s = map(sum, zip(*jobs, strict=True))
        rows += [StarvingGroup(
            name=name, jobs=len(jobs), gpu_hours=gpu_hours, lost_gpu_hours=lost_s / 3600,
            waited_s=waited_s,
        )]  # fmt: skip
    return tuple(sorted(rows, key=lambda g: (-g.lost_gpu_hours, -g.waited_s, g.name)))
