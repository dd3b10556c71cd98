"""History: what is known of jobs, wherever it was kept: files of agents, or a Prometheus.

A record is a job over all its nodes within a stretch of time; its figures are sums over that stretch, except
for peaks. What asks (`job_report`, `headrace starving`, `usage`, the queue) asks for records.

Agents' history files are read together, from a folder that many nodes may share. Files are copied and the
copies are read: no lock is taken, the writer is not held up, and a file on a shared file system is read
without its write-ahead log being shared. A copy that was taken while the writer carried its log into the file
is taken again. A file that cannot be read is left out and named.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from headrace.base.causes import WORTH_NAMING, Cause, cause_of
from headrace.base.files import state_folder
from headrace.base.job import clean
from headrace.errors import TelemetryError
from headrace.runtime import agent_sockets, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace.telemetry.metrics import PrometheusHistory

T = TypeVar("T")

LITTLE: Final = 0.05  # who waits for less than this share of its time does not starve
STEPS_LEAST: Final = 10
STEPS_LEAST_S: Final = 30.0
"""Fewer steps in less time say nothing of a job: the first waits for all that begins with it."""

FORMAT: Final = "1"
SUFFIX: Final = ".telemetry"  # of agents' history files: SQLite, see `headrace.telemetry.writing`

ENDED: Final = "ended"
"""When an agent saw a job end, in Unix seconds; one that goes on after that was seen later (`last_s`)."""

_LARGEST: Final = frozenset({
    "memory_bytes", "memory_asked_bytes", "gpu_memory_bytes", "gpu_memory_asked_bytes", "node_cpus",
    "node_gpus", "node_memory_bytes", "partition", ENDED,
})  # fmt: skip
"""Over nodes, the largest counts; of GPUs, the sum."""

PEAKS: Final = _LARGEST | {"gpus", "gpus_used", "nodes"}
"""Figures of which the largest counts; of all others, the sum."""

UNENDED: Final = "unended"
"""In a process's last report that was kept: a later one, with its end, was to come."""


def default_history(environment: Mapping[str, str] = os.environ) -> Path:
    """Where an agent keeps it: HEADRACE_HISTORY, else `headrace/history` in the user's state folder."""
    given = environment.get("HEADRACE_HISTORY", "")
    if given and "://" not in given:
        return Path(given)
    return state_folder(environment) / "history"


def history_place(environment: Mapping[str, str] = os.environ) -> str:
    """Where a history is read from that nobody names: HEADRACE_HISTORY, which may be a URL, or the user's."""
    return environment.get("HEADRACE_HISTORY") or str(default_history(environment))


def catch_up(history: str, job: str = "") -> None:
    """Let this node's agents write what they know, so that a job which has just ended is in the history.

    Agents of other nodes are not asked: what they know is in their histories seconds later. Of a `job` that
    is named, its own agent is asked, too. Never fails.
    """
    if "://" in history:
        return
    from headrace.telemetry.messages import ask_state

    for path in agent_sockets(job):
        if checked(path) and Path(path).exists():
            with contextlib.suppress(OSError, ValueError):
                ask_state(Path(path), written=True)


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """A job within a stretch of time."""

    job_id: str  # the scheduler's number
    alias: str = ""  # how people write it, if otherwise ("17_3")
    name: str = ""
    user: str = ""
    account: str = ""
    nodes: tuple[str, ...] = ()
    first_s: float = 0.0  # when it was seen first and last, in Unix seconds; also outside
    last_s: float = 0.0
    measured: bool = False  # headrace reported how its steps fared; else their waiting was inferred
    restarts: int = 0  # how often it was begun again under its number
    unended: int = 0  # processes with training steps that gave no last message: killed, or running
    figures: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """By name, label (a cause, a tier, "") and file system."""

    def total(self, name: str) -> float:
        """A figure over all labels and file systems."""
        return sum(value for key, value in self.figures.items() if key[0] == name)

    def by_label(self, name: str) -> dict[str, float]:
        """A figure by cause as it was written, or by tier, the largest first."""
        return self._by(name, lambda key: key[1])

    def by_file_system(self, name: str) -> dict[str, float]:
        """A figure by file system, the largest first; '' is an unknown one."""
        return self._by(name, lambda key: key[2])

    def _by(self, name: str, word: Callable[[tuple[str, str, str]], T]) -> dict[T, float]:
        sums: dict[T, float] = defaultdict(float)
        for key, value in self.figures.items():
            if key[0] == name:
                sums[word(key)] += value
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def partition(self) -> str:
        """That it ran in; '' if nobody said."""
        return next(iter(self.by_label("partition")), "")

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
    def _lost(self) -> str:
        return "lost_gpu_s" if self.measured else "inferred_gpu_s"

    @property
    def _waited(self) -> str:
        return "stall_s" if self.measured else "inferred_s"

    @property
    def lost(self) -> dict[Cause, float]:
        """GPU-seconds that its steps waited for data, by cause, the largest first."""
        return self._by(self._lost, lambda key: cause_of(key[1]))

    @property
    def lost_by_file_system(self) -> dict[str, float]:
        """The same by file system."""
        return self.by_file_system(self._lost)

    @property
    def waited(self) -> dict[Cause, float]:
        """Seconds that its steps waited, of all its training processes (measured) or nodes (inferred)."""
        return self._by(self._waited, lambda key: cause_of(key[1]))

    @property
    def waited_by_file_system(self) -> dict[str, float]:
        """The same by file system."""
        return self.by_file_system(self._waited)

    @property
    def stall(self) -> float | None:
        """Share of their time that its steps waited; None: too few were seen, and nothing is inferred."""
        return None if self.has_few_steps else self.stall_now

    @property
    def stall_now(self) -> float | None:
        """The same of a moment, in which there may be few steps."""
        waited_s = sum(self.waited.values())
        known_s = waited_s + self.total("worked_s") if self.measured else self.seconds
        return min(1.0, waited_s / known_s) if known_s > 0.0 else None

    @property
    def has_few_steps(self) -> bool:
        """Whether it was measured, for too few steps to say what share of its time it waits."""
        known_s = sum(self.waited.values()) + self.total("worked_s")
        few = 0 < self.total("batches") < STEPS_LEAST
        return self.measured and few and known_s < STEPS_LEAST_S

    @property
    def gpu_use(self) -> float | None:
        """Share of its GPUs' time in which they worked; None: nobody looked."""
        watched_s = self.total("gpu_watched_s")
        return self.total("gpu_busy_s") / watched_s if watched_s > 0.0 else None


def running_parts(parts: Iterable[tuple[str, JobRecord]]) -> list[tuple[str, JobRecord]]:
    """Of nodes' records of a moment, those of jobs that have not ended there, nor gone on without the node."""
    every = list(parts)
    ended_s: dict[str, float] = defaultdict(float)
    latest_s: dict[str, float] = defaultdict(float)
    for _, record in every:
        job, end_s = record.job_id, record.total(ENDED)
        ended_s[job] = max(ended_s[job], end_s)
        latest_s[job] = max(latest_s[job], end_s, record.last_s)

    def runs(record: JobRecord) -> bool:
        ended_elsewhere = record.last_s < ended_s[record.job_id]
        quiet = record.last_s < latest_s[record.job_id] - QUIET_S
        return record.total(ENDED) < record.last_s and not (ended_elsewhere and quiet)

    return [(node, record) for node, record in every if runs(record)]


QUIET_S: Final = 30.0
"""A node that is silent for longer, while others of its job were begun anew or have ended, is lost."""


def open_history(place: Path | str) -> FileHistory | PrometheusHistory:
    """Open a history to read it; raises TelemetryError if there is none."""
    text = str(place)
    if text.startswith(("http://", "https://")):
        from headrace.telemetry.metrics import PrometheusHistory

        return PrometheusHistory(text)

    if not Path(text).exists():
        raise TelemetryError(f"{text}: there is no history.", path=text, next_step=_START)
    return FileHistory(Path(text))


def merged(records: Iterable[tuple[str, JobRecord]]) -> list[JobRecord]:
    """Records of nodes, each with its node, as records of jobs.

    Two agents may have looked at the same job on the same node: the one that measured it counts, else the one
    that watched longer.
    """
    best: dict[tuple[str, str], JobRecord] = {}
    for node, record in records:
        at = record.job_id, node
        best[at] = max(best.get(at, record), record, key=lambda r: (r.measured, r.seconds))
    jobs: dict[str, JobRecord] = {}
    for (job_id, node), record in sorted(best.items()):
        job = jobs.setdefault(job_id, JobRecord(job_id=job_id, first_s=record.first_s))
        job.alias, job.name = job.alias or record.alias, job.name or record.name
        job.user, job.account = job.user or record.user, job.account or record.account
        job.nodes = (*job.nodes, node)
        job.first_s, job.last_s = min(job.first_s, record.first_s), max(job.last_s, record.last_s)
        job.measured = job.measured or record.measured
        job.restarts = max(job.restarts, record.restarts)
        job.unended += record.unended
        for key, value in record.figures.items():
            before = job.figures.get(key, 0.0)
            job.figures[key] = max(before, value) if key[0] in _LARGEST else before + value
    return list(jobs.values())


YOUNG_S: Final = 300.0
"""Of the minutes that begin within so long after a job, figures are kept by ten seconds."""

RECENT_S: Final = 600.0  # what a job did longer ago says little about now

FILES_MAX: Final = 256
"""A view of the queue must not wait for thousands of files to be copied: there a Prometheus answers."""


class Stall(NamedTuple):
    """How much a job waits for data."""

    share: float  # of their time that its steps waited, 0 to 1
    cause: str  # what they waited for most; '' where they hardly waited
    measured: bool  # headrace reported it; else it is inferred


def stalls(history: Path | str, seconds: float = RECENT_S) -> dict[str, Stall]:
    """How much jobs wait, by both of their names ("4712" and "4711_1"); unknown ones are not there.

    Of a folder with more than `FILES_MAX` files nothing is read.

    Raises TelemetryError if there is no history, or it cannot be read.
    """
    with contextlib.suppress(OSError), os.scandir(history) as entries:
        if sum(entry.name.endswith(SUFFIX) for entry in entries) > FILES_MAX:
            return {}
    now_s = time.time()
    by_name: dict[str, Stall] = {}
    for record in open_history(history).records(now_s - seconds, now_s + 60):
        if (share := record.stall) is not None:
            cause = next(iter(record.waited), "") if share >= WORTH_NAMING else ""
            stall = Stall(share, cause, record.measured)
            by_name |= {name: stall for name in (record.job_id, record.alias) if name}
    return by_name


_START: Final = "Start an agent that keeps one: headrace agent start --history DIR."

ATTEMPTS: Final = 5
PAUSE_S: Final = 0.05

SKEW_S: Final = 3600.0
"""Clocks of nodes differ by less. A file that was not written since has nothing to say."""


class FileHistory:
    """The history files of a folder, or one of them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.skipped: list[str] = []  # files that could not be read, and why

    def records(self, since_s: float, until_s: float, job_id: str = "") -> list[JobRecord]:
        """Jobs of a stretch of Unix time, with their figures of it; or one, by either of its names.

        Raises TelemetryError if there is no history, or it does not answer.
        """
        return merged(self.parts(since_s, until_s, job_id))

    def parts(
        self, since_s: float, until_s: float, job_id: str = ""
    ) -> list[tuple[str, JobRecord]]:
        """The same, node by node: jobs on several nodes come as several records, each with its node."""
        rows = self._rows(since_s, until_s, job_id)
        return [(node, record) for node, _, record in rows]

    def minutes(
        self, since_s: float, until_s: float, job_id: str = "", *, fine_until_s: float = 0.0
    ) -> dict[float, list[JobRecord]]:
        """The same as `records`, minute by minute, by the minute's beginning.

        Minutes that begin before `fine_until_s` come as finely as they are kept.
        """
        by_minute: dict[float, list[tuple[str, JobRecord]]] = defaultdict(list)
        start = "f.minute - f.minute % 60"
        start = f"CASE WHEN {start} < {fine_until_s!r} THEN f.minute ELSE {start} END"
        for node, minute, record in self._rows(since_s, until_s, job_id, start):
            by_minute[minute].append((node, record))
        return {minute: merged(by_minute[minute]) for minute in sorted(by_minute)}

    def _rows(
        self, since_s: float, until_s: float, job_id: str, start: str = "0.0"
    ) -> list[tuple[str, float, JobRecord]]:
        """What each file that may have something says: node, the minute by `start` (of SQL), and record."""
        self.skipped = []
        rows: list[tuple[str, float, JobRecord]] = []
        files = self._files()
        for file in (file for file in files if _written_s(file) > since_s - SKEW_S):
            try:
                with _copied(file) as database:
                    rows += _records(database, since_s, until_s, job_id, start)
            except (sqlite3.Error, OSError, ValueError) as e:
                self.skipped.append(f"{file}: {e}")
        if files and len(self.skipped) == len(files):
            raise TelemetryError(
                f"{self._place}: no history file can be read: {self.skipped[0]}.",
                path=str(self._place),
                next_step="Start the agent again: it keeps a damaged file aside and begins another.",
            )
        return rows

    def written_s(self) -> float:
        """When an agent last wrote something of a job, in Unix seconds."""
        return max(map(_written_s, self._files()))

    def _files(self) -> list[Path]:
        if not self._place.is_dir():
            return [self._place]
        files = sorted(self._place.glob(f"*{SUFFIX}"))
        if not files:
            raise TelemetryError(
                f"{self._place}: there is no history in this folder.",
                path=str(self._place),
                next_step=_START,
            )
        return files


def _written_s(file: Path) -> float:
    written_s = 0.0
    for path in (file, Path(f"{file}-wal")):
        with contextlib.suppress(OSError):
            written_s = max(written_s, path.stat().st_mtime)
    return written_s


def check_whole(database: sqlite3.Connection) -> None:
    """See that a file is whole; raises sqlite3.DatabaseError if it is not."""
    row = database.execute("PRAGMA quick_check(1)").fetchone()
    if row != ("ok",):
        raise sqlite3.DatabaseError(str(row[0]) if row else "it does not say whether it is whole")


@contextlib.contextmanager
def _copied(file: Path) -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(prefix="headrace-history-") as folder:
        copy = Path(folder) / "history"
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            if _copy(file, copy) or last:
                with contextlib.closing(sqlite3.connect(copy)) as database:
                    try:
                        check_whole(database)
                    except sqlite3.DatabaseError:
                        if last:
                            raise
                    else:
                        yield database
                        return
            time.sleep(PAUSE_S)


def _copy(file: Path, copy: Path) -> bool:
    """Copy a file and its log; whether the file stayed as it was meanwhile."""
    log, log_copy = (Path(f"{path}-wal") for path in (file, copy))
    before = file.stat()
    log_copy.unlink(missing_ok=True)
    # The log first: what is carried into the file meanwhile is in it.
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(log, log_copy)
    shutil.copyfile(file, copy)
    after = file.stat()
    return (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


_FIGURES: Final = """
SELECT {minute}, f.job, s.name, s.label, s.file_system, sum(f.value), max(f.value)
FROM figures f JOIN series s ON s.series = f.series
WHERE f.minute >= ? AND f.minute < ? AND f.job IN (SELECT job FROM jobs WHERE ? IN ('', job_id, alias))
GROUP BY {minute}, f.job, f.series
"""

_UNENDED: Final = (
    "SELECT job_id, count(*) FROM tellers WHERE at_s >= ? AND figures LIKE ? GROUP BY job_id"
)


def _records(
    database: sqlite3.Connection, since_s: float, until_s: float, job_id: str, start: str
) -> list[tuple[str, float, JobRecord]]:
    node, jobs = _jobs(database)
    unended = dict(database.execute(_UNENDED, (since_s, f'%"{UNENDED}"%')))
    records: dict[tuple[float, int], JobRecord] = {}
    query = _FIGURES.format(minute=start)
    # A minute belongs to the stretch in which it begins, but for the first: a window ends within one.
    rows = database.execute(query, (since_s - 59, until_s, job_id))
    for minute, job, name, label, system, total, most in rows:
        if job in jobs:
            record = records.setdefault((float(minute), job), replace(jobs[job], figures={}))
            record.unended = int(unended.get(record.job_id, 0))
            value = most if name in PEAKS else total
            record.figures[clean(name), clean(label), clean(system)] = float(value)
    return [(node, at[0], records[at]) for at in sorted(records)]


def _jobs(database: sqlite3.Connection) -> tuple[str, dict[int, JobRecord]]:
    """The node, and its jobs without their figures; raises ValueError if the file has another format."""
    meta = dict(database.execute("SELECT key, value FROM meta"))
    if meta.get("format") != FORMAT:
        raise ValueError(f"its format is {meta.get('format')!r}, expected {FORMAT!r}")
    records = {
        number: JobRecord(
            job_id=clean(one), alias=clean(alias), name=clean(name), user=clean(user),
            account=clean(account), first_s=float(first_s), last_s=float(last_s),
            measured=bool(measured), restarts=int(restarts),
        )
        for number, one, alias, name, user, account, first_s, last_s, measured, restarts in database.execute(
            "SELECT job, job_id, alias, name, user, account, first_s, last_s, measured, restarts FROM jobs"
        )
    }  # fmt: skip
    return clean(str(meta.get("node", ""))), records
