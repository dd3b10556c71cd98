"""Usage: who had what and used how much of it, and which jobs lost most to waiting for data.

Plain functions of the agents' history (`headrace.telemetry`) and of Slurm's books. The books (`sacct`) know
every job's hours, and little of what they were good for; the history knows that of the jobs it saw. Together:
hours from the books, shares from both, and how much of the hours is covered (`headrace.telemetry.waste`). Where
a job has no GPU it is ranked by the time that its steps waited. What is inferred is called so.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.text import counted, duration_text
from headrace.telemetry.history import JobRecord
from headrace.telemetry.report import JobReport, hours_text
from headrace.telemetry.waste import Booked, JobUse, together, use_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from headrace.cluster.slurm.accounting import AccountedJob


BY: Final = {
    "user": ("user", "account"), "account": ("account",), "partition": ("partition",),
    "job": ("job_id", "user"), "day": ("day",), "hour": ("hour",),
}  # fmt: skip
"""What usage can be told by, and the columns that name a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """A user in an account, a partition, a job, a day: what `BY` says.

    Attributes:
        gpu_hours, cpu_hours: that they had.
    """

    names: tuple[str, ...]  # one for each of the columns that `BY` has
    jobs: int
    gpu_hours: float
    cpu_hours: float
    lost_gpu_hours: float  # waited for data, of those that agents saw
    stall: float | None  # share of steps' time that was waited; None: nothing is known
    use: JobUse  # of which resource how much was used, and how much of that is known

    def as_dict(self, by: str) -> dict[str, Any]:
        """As plain values."""
        names = dict(zip(BY[by], self.names, strict=False))
        own = {n: getattr(self, n) for n in self.__slots__ if n not in ("names", "use")}
        more = {"advice": list(self.use.advice)} if by == "job" else {}
        return {**names, **own, **self.use.as_dict(), **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTable:
    """Who used what."""

    since_s: float
    until_s: float
    by: str
    source: str  # where hours come from: `slurm` or `history`
    rows: tuple[UsageRow, ...]  # who had most first; days and hours in their order
    total: UsageRow
    uncounted: bool = False  # the books have no GPUs of jobs that are known to have had some

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        own = {
            name: getattr(self, name)
            for name in ("since_s", "until_s", "by", "source", "uncounted")
        }
        rows = [row.as_dict(self.by) for row in self.rows]
        return {**own, "rows": rows, "total": self.total.as_dict(self.by)}


class _Share(NamedTuple):
    """What a job had and used within the stretch, and what the history knows of it."""

    job_id: str
    user: str
    account: str
    partition: str
    use: JobUse
    record: JobRecord | None
    uncounted: bool = False


def _row(names: tuple[str, ...], shares: Sequence[_Share]) -> UsageRow:
    seen = [share.record for share in shares if share.record is not None]
    waited_s = known_s = 0.0
    for record in seen:
        if record.stall is not None:
            waits_s = sum(record.waited.values())
            waited_s += waits_s
            known_s += waits_s + record.total("worked_s") if record.measured else record.seconds
    use = shares[0].use if len(shares) == 1 else together(share.use for share in shares)
    return UsageRow(
        names=names, jobs=len({share.job_id for share in shares}), gpu_hours=use.gpu.had / 3600,
        cpu_hours=use.cpu.had / 3600, stall=waited_s / known_s if known_s else None,
        lost_gpu_hours=sum(sum(record.lost.values()) for record in seen) / 3600, use=use,
    )  # fmt: skip


def booked_of(job: AccountedJob, since_s: float, until_s: float) -> Booked:
    """What the books say of a job within a stretch of time, in Unix seconds."""
    began_s, ended_s = job.started_s, job.ended_s
    last_s = until_s if ended_s is None else min(ended_s, until_s)
    nodes = max(1, job.node_count)
    whole = (
        began_s is not None and began_s >= since_s and ended_s is not None and ended_s <= until_s
    )
    peak = job.memory_peak_mib if job.task_count == 1 and nodes == 1 else None
    return Booked(
        seconds=0.0 if began_s is None else max(0.0, last_s - max(began_s, since_s)), nodes=nodes,
        cpus=job.cpu_count, gpus=job.gpu_count, cpu_s=job.cpu_s if whole else None,
        memory_asked_bytes=(job.memory_mib << 20) // nodes,
        memory_bytes=None if peak is None else peak << 20,
    )  # fmt: skip


def report_of_books(job: AccountedJob, report: JobReport | None, now_s: float) -> JobReport:
    """A job's report with what the books say; all that they know where no agent saw it."""
    booked = booked_of(job, 0.0, now_s)
    if report is not None:
        return replace(report, booked=booked)
    record = JobRecord(
        job_id=job.job_id, name=job.name, user=job.user, account=job.account,
        first_s=job.started_s or now_s, last_s=job.ended_s or now_s,
    )  # fmt: skip
    return JobReport(record, booked=booked)


def _shares(
    records: Sequence[JobRecord], books: Iterable[AccountedJob] | None, since_s: float, until_s: float
) -> list[_Share]:  # fmt: skip
    if books is None:
        return [_Share(r.job_id, r.user, r.account, r.partition, use_of(r), r) for r in records]
    by_id = {name: r for r in records for name in (r.job_id, r.alias) if name}
    shares = []
    for job in books:
        if (booked := booked_of(job, since_s, until_s)).seconds > 0.0:
            known = by_id.get(job.job_id)
            use = use_of(known, booked)
            uncounted = not booked.gpus and use.gpu.had > 0.0
            names = (job.job_id, job.user, job.account, job.partition)
            shares += [_Share(*names, use, known, uncounted)]
    return shares


def usage_by(
    by: str, records_of: Callable[[float, float], Sequence[JobRecord]],
    books: Sequence[AccountedJob] | None, since_s: float, until_s: float,
) -> UsageTable:  # fmt: skip
    """Add up by any of `BY`; a day or an hour is one by the local clock.

    `records_of` gives the history's records of a stretch of Unix time. Where there are no books (the
    scheduler's jobs), hours are the history's.
    """
    shares = _shares(records_of(since_s, until_s), books, since_s, until_s)
    if by in ("day", "hour"):
        rows = list(_rows_over_time(by, records_of, books, since_s, until_s))
    else:
        groups: dict[tuple[str, ...], list[_Share]] = defaultdict(list)
        for share in shares:
            groups[tuple(getattr(share, name) for name in BY[by])].append(share)
        rows = [_row(names, of_group) for names, of_group in groups.items()]
        rows.sort(key=lambda r: (-r.gpu_hours, -r.cpu_hours, r.names))
    return UsageTable(
        since_s=since_s, until_s=until_s, by=by, source="history" if books is None else "slurm",
        rows=tuple(rows), total=_row(("all",), shares),
        uncounted=any(share.uncounted for share in shares),
    )  # fmt: skip


def _rows_over_time(
    by: str, records_of: Callable[[float, float], Sequence[JobRecord]],
    books: Sequence[AccountedJob] | None, since_s: float, until_s: float,
) -> Iterator[UsageRow]:  # fmt: skip
    begin_s = since_s
    while begin_s < until_s:
        clock = time.localtime(begin_s)
        # A day has 23 or 25 hours where the clock is changed.
        tomorrow = (clock.tm_year, clock.tm_mon, clock.tm_mday + 1, 0, 0, 0, 0, 0, -1)
        hour_s = begin_s - begin_s % 1 - clock.tm_min * 60 - clock.tm_sec + 3600.0
        end_s = min(until_s, time.mktime(tomorrow) if by == "day" else hour_s)
        shares = _shares(records_of(begin_s, end_s), books, begin_s, end_s)
        if shares:
            yield _row(
                (time.strftime("%Y-%m-%d" if by == "day" else "%m-%d %H:00", clock),), shares
            )
        begin_s = max(end_s, begin_s + 1.0)


# -- starving ----------------------------------------------------------------------------------------

STARVING: Final = 0.01  # who waits for less than this share of its time does not starve


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
    stall: float  # share of its steps' time
    cause: str  # what they waited for most
    file_system: str  # on which most was lost; ''
    quality: str  # `measured` or `inferred`


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
    jobs: tuple[StarvingJob, ...]  # who lost most, first
    users: tuple[StarvingGroup, ...]
    file_systems: tuple[StarvingGroup, ...]
    causes: tuple[StarvingGroup, ...]
    gpu_hours: float  # that all jobs had, also those that did not starve
    lost_gpu_hours: float
    left_out: int = 0  # jobs that waited, for less than the least share of their time
    too_few_steps: int = 0  # jobs that waited, in too few steps to give a share

    @property
    def answer(self) -> str:
        """The one thing to know."""
        if not self.jobs:
            least = f" {STARVING:.0%} of its time" if self.left_out or self.too_few_steps else ""
            return f"nobody starved: no job is known to have waited{least} for data"
        first = self.jobs[0]
        share = self.lost_gpu_hours / self.gpu_hours if self.gpu_hours else 0.0
        if self.lost_gpu_hours <= 0.0:
            waited = f"waited {duration_text(first.waited_s)} for data, most for {first.cause}"
            return f"job {first.job_id} starved most: {waited}"
        most = f"job {first.job_id} ({hours_text(first.lost_gpu_hours)}, {first.cause})"
        lost, had = hours_text(self.lost_gpu_hours), hours_text(self.gpu_hours)
        return (
            f"{lost} of {had} GPU-hours ({share:.0%}) were lost by jobs that starved for data, "
            f"most by {most}"
        )

    @property
    def notes(self) -> list[str]:
        """Which jobs are left out."""
        jobs = counted(self.left_out, "more job"), counted(self.too_few_steps, "more job")
        waited = [f"{jobs[0]} waited for data, under {STARVING:.0%} of the time: left out"]
        few = [f"{jobs[1]} waited for data, in too few steps to give a share: left out"]
        return (waited if self.left_out else []) + (few if self.too_few_steps else [])

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "answer": self.answer}


def starving_of(records: Iterable[JobRecord], since_s: float, until_s: float) -> Starving:
    """Rank jobs; who waited for less than `STARVING` of its time does not starve."""
    every = list(records)
    hungry = [record for record in every if (record.stall or 0.0) >= STARVING]
    waited = [record.stall for record in every if sum(record.waited.values()) > 0.0]
    jobs = sorted(map(_job, hungry), key=lambda j: (-j.lost_gpu_hours, -j.waited_s, j.job_id))
    users = [(r.user, r.gpu_hours, sum(r.lost.values()), sum(r.waited.values())) for r in hungry]
    systems = (_spread(r.lost_by_file_system, r.waited_by_file_system) for r in hungry)
    causes = (_spread(r.lost, r.waited) for r in hungry)
    return Starving(
        since_s=since_s, until_s=until_s, jobs=tuple(jobs), users=_groups(users),
        file_systems=_groups(chain(*systems)), causes=_groups(chain(*causes)),
        gpu_hours=sum(record.gpu_hours for record in every),
        lost_gpu_hours=sum(job.lost_gpu_hours for job in jobs),
        left_out=sum(share is not None and share < STARVING for share in waited),
        too_few_steps=waited.count(None),
    )  # fmt: skip


def _job(record: JobRecord) -> StarvingJob:
    by_system = record.lost_by_file_system or record.waited_by_file_system
    return StarvingJob(
        job_id=record.shown_id, name=record.name, user=record.user, account=record.account,
        nodes=len(record.nodes), gpu_hours=record.gpu_hours,
        lost_gpu_hours=sum(record.lost.values()) / 3600, waited_s=sum(record.waited.values()),
        stall=record.stall or 0.0, cause=next(iter(record.waited), ""),
        file_system=next(iter(by_system), ""), quality=record.quality,
    )  # fmt: skip


_Lost = tuple[str, float, float, float]
"""Of a job: a name, GPU-hours that it had, seconds of GPUs lost, seconds waited."""


def _spread(lost: Mapping[Any, float], waited: Mapping[Any, float]) -> list[_Lost]:
    return [(str(n), 0.0, lost.get(n, 0.0), waited.get(n, 0.0)) for n in {**lost, **waited}]


def _groups(parts: Iterable[_Lost]) -> tuple[StarvingGroup, ...]:
    """Who lost most, first."""
    by_name = defaultdict[str, list[_Lost]](list)
    for part in parts:
        by_name[part[0]].append(part)
    rows = [
        StarvingGroup(
            name=name, jobs=len(jobs), gpu_hours=sum(job[1] for job in jobs),
            lost_gpu_hours=sum(job[2] for job in jobs) / 3600, waited_s=sum(job[3] for job in jobs),
        )
        for name, jobs in by_name.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda g: (-g.lost_gpu_hours, -g.waited_s, g.name)))
