"""History: what is known of jobs, wherever it was kept. Files of agents, or a Prometheus.

A record is a job over all its nodes within a stretch of time; its figures are sums over that stretch,
except for peaks. What asks (`job_report`, `headrace starving`, `usage`, the queue) asks for records.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.base.causes import Cause, cause_of
from headrace.errors import TelemetryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["History", "JobRecord", "merged", "open_history"]


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A job within a stretch of time.

    Attributes:
        job_id: the scheduler's number.
        alias: how people write it, if otherwise ("17_3").
        first_s, last_s: when it was seen first and last, in Unix seconds; also outside of the stretch.
        measured: headrace told how its steps fared; else their waiting was inferred.
        figures: by name, label (a cause, a tier, "") and file system.
    """

    job_id: str
    alias: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    nodes: tuple[str, ...] = ()
    first_s: float = 0.0
    last_s: float = 0.0
    measured: bool = False
    figures: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """A figure over all labels and file systems."""
        return sum(value for key, value in self.figures.items() if key[0] == name)

    def by_label(self, name: str) -> dict[str, float]:
        """A figure by cause as it was written, or by tier, the largest first."""
        return self._by(name, 1)

    def _by_cause(self, name: str) -> dict[Cause, float]:
        found: dict[Cause, float] = defaultdict(float)
        for word, value in self.by_label(name).items():
            found[cause_of(word)] += value
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def by_file_system(self, name: str) -> dict[str, float]:
        """A figure by file system, the largest first; '' is an unknown one."""
        return self._by(name, 2)

    def _by(self, name: str, place: int) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for key, value in self.figures.items():
            if key[0] == name:
                found[key[place]] += value
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def quality(self) -> str:
        """`measured` or `inferred`."""
        return "measured" if self.measured else "inferred"

    @property
    def shown_id(self) -> str:
        """As people write it."""
        return self.alias or self.job_id

    @property
    def seconds(self) -> float:
        """Node-seconds that it ran."""
        return self.total("seconds")

    @property
    def gpu_hours(self) -> float:
        """That it had, used or not."""
        return self.total("gpu_s") / 3600

    @property
    def lost(self) -> dict[Cause, float]:
        """GPU-seconds that its steps waited for data, by cause, the largest first."""
        return self._by_cause("lost_gpu_s" if self.measured else "inferred_gpu_s")

    @property
    def lost_by_file_system(self) -> dict[str, float]:
        """The same by file system."""
        return self.by_file_system("lost_gpu_s" if self.measured else "inferred_gpu_s")

    @property
    def waited(self) -> dict[Cause, float]:
        """Seconds that its steps waited, of all its training processes (measured) or nodes (inferred)."""
        return self._by_cause("stall_s" if self.measured else "inferred_s")

    @property
    def stall(self) -> float | None:
        """Share of their time that its steps waited; None: no step was seen, and nothing inferred."""
        waited_s = sum(self.waited.values())
        known_s = waited_s + self.total("worked_s") if self.measured else self.seconds
        return min(1.0, waited_s / known_s) if known_s > 0.0 else None

    @property
    def gpu_use(self) -> float | None:
        """Share of its GPUs' time in which they worked; None: nobody looked."""
        watched_s = self.total("gpu_watched_s")
        return self.total("gpu_busy_s") / watched_s if watched_s > 0.0 else None


class History(Protocol):
    """Gives records."""

    skipped: list[str]
    """What could not be read, and why."""

    def records(self, since_s: float, until_s: float, job_id: str = "") -> list[JobRecord]:
        """The jobs that were there, with their figures of that time.

        Args:
            since_s: Unix seconds; what is older than the history is not there.
            until_s: likewise.
            job_id: one job, by either of its names; '': all.

        Raises:
            TelemetryError: there is no history, or it does not answer.
        """

    def close(self) -> None:
        """Let go of it."""


def open_history(place: Path | str) -> History:
    """Open a history to read it.

    Args:
        place: a folder of agents' files, one of these files, or the URL of a Prometheus.

    Raises:
        TelemetryError: there is nothing.
    """
    text = str(place)
    if text.startswith(("http://", "https://")):
        from headrace.telemetry.prometheus import PrometheusHistory

        return PrometheusHistory(text)
    from headrace.telemetry.reading import FileHistory

    path = Path(text)
    if not path.exists():
        raise TelemetryError(
            f"{path}: there is no history.",
            path=str(path),
            next_step="Start an agent that keeps one: headrace agent start --history DIR.",
        )
    return FileHistory(path)


def merged(records: Iterable[tuple[str, JobRecord]]) -> list[JobRecord]:
    """Records of nodes as records of jobs.

    Args:
        records: each with its node. Two agents may have looked at the same job on the same node: the one
            that was told of it counts, else the one that watched longer.
    """
    best: dict[tuple[str, str], JobRecord] = {}
    for node, record in records:
        before = best.get((record.job_id, node))
        if before is None or _knows(record) > _knows(before):
            best[record.job_id, node] = record
    jobs: dict[str, JobRecord] = {}
    for (job_id, node), record in sorted(best.items()):
        job = jobs.setdefault(job_id, JobRecord(job_id=job_id, first_s=record.first_s))
        job.alias, job.name = job.alias or record.alias, job.name or record.name
        job.user, job.account = job.user or record.user, job.account or record.account
        job.nodes = (*job.nodes, node)
        job.first_s, job.last_s = min(job.first_s, record.first_s), max(job.last_s, record.last_s)
        job.measured = job.measured or record.measured
        _add(job.figures, record.figures)
    return list(jobs.values())


def _knows(record: JobRecord) -> tuple[bool, float]:
    return record.measured, record.total("seconds")


_LARGEST = frozenset({"memory_bytes", "gpu_memory_bytes"})
"""Over nodes, the largest counts; of GPUs, the sum."""


def _add(to: dict[tuple[str, str, str], float], more: Mapping[tuple[str, str, str], float]) -> None:
    for key, value in more.items():
        before = to.get(key, 0.0)
        to[key] = max(before, value) if key[0] in _LARGEST else before + value
