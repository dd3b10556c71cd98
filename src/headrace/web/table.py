"""Table: the rows of the leaderboard that a browser asks for, filtered, sorted and cut. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.telemetry.report import hint_of
from headrace.web.picture import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.insight.usage import Group, Starving, StarvingJob
    from headrace.telemetry.history import JobRecord

__all__ = ["Query", "rows"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked for.

    Raises:
        ValueError: the order is none.
    """

    sort: str = "lost"
    reverse: bool = False
    user: str = ""
    job: str = ""
    cause: str = ""
    system: str = ""
    limit: int = 50

    def __post_init__(self) -> None:
        if self.sort not in _SORTS:
            raise ValueError(f"sort is {self.sort!r}, expected one of {', '.join(_SORTS)}")

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """As an address says it."""
        limit = given.get("limit", "50")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= ROWS_MAX):
            raise ValueError(f"limit is {limit!r}, expected 1 to {ROWS_MAX}")
        return cls(
            sort=given.get("sort", "lost"), reverse=given.get("reverse") == "1",
            user=given.get("user", ""), job=given.get("job", ""), cause=given.get("cause", ""),
            system=given.get("on", ""), limit=int(limit),
        )  # fmt: skip

    def wants(self, job: StarvingJob) -> bool:
        """Whether a job is asked for."""
        text = self.job.lower()
        return (
            self.user in ("", job.user)
            and self.cause in ("", job.cause)
            and self.system in ("", job.file_system)
            and (not text or text in job.job_id.lower() or text in job.name.lower())
        )


def rows(found: Starving, records: Mapping[str, JobRecord], query: Query) -> dict[str, Any]:
    """The answer, as plain values."""
    wanted = [job for job in found.jobs if query.wants(job)]
    wanted.sort(key=_SORTS[query.sort], reverse=query.reverse)
    return {
        "answer": _sentence(found.answer),
        "since_s": found.since_s,
        "until_s": found.until_s,
        "gpu_hours": found.gpu_hours,
        "lost_gpu_hours": found.lost_gpu_hours,
        "jobs": [_row(job, records.get(job.job_id)) for job in wanted[: query.limit]],
        "of": len(wanted),
        "all": len(found.jobs),
        "lost_shown": sum(job.lost_gpu_hours for job in wanted),
        "users": _groups(found.users),
        "file_systems": _groups(found.file_systems),
        "causes": _groups(found.causes),
        "every_user": sorted({plain(group.name) for group in found.users})[:2000],
    }


def _sentence(text: str) -> str:
    """A sentence; longer than a name may be."""
    return "".join(plain(c) for c in text[:2000])


def _row(job: StarvingJob, record: JobRecord | None) -> dict[str, Any]:
    return {
        "job_id": plain(job.job_id),
        "name": plain(job.name),
        "user": plain(job.user),
        "account": plain(job.account),
        "nodes": job.nodes,
        "gpu_hours": job.gpu_hours,
        "lost": job.lost_gpu_hours,
        "waited_s": job.waited_s,
        "stall": job.stall,
        "cause": plain(job.cause),
        "on": plain(job.file_system),
        "measured": job.quality == "measured",
        "hint": "" if record is None else _sentence(hint_of(record)),
    }


def _groups(groups: tuple[Group, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": plain(group.name),
            "jobs": group.jobs,
            "lost": group.lost_gpu_hours,
            "waited_s": group.waited_s,
        }
        for group in groups[:GROUPS]
    ]
