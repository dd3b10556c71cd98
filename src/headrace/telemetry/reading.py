"""Reading: agents' history files together, from a folder that may be shared by many nodes.

Files are copied and the copies are read: no lock is taken, the writer is not held up, and a file on a
shared file system is read without its write-ahead log being shared. A copy that was taken while the
writer carried its log into the file is taken again. A file that cannot be read is left out and named.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from headrace.base.job import clean
from headrace.errors import TelemetryError
from headrace.telemetry.database import FORMAT, SUFFIX, check_whole
from headrace.telemetry.history import JobRecord, merged
from headrace.telemetry.ledger import PEAKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FileHistory"]

T = TypeVar("T")

ATTEMPTS: Final = 5
PAUSE_S: Final = 0.05

SKEW_S: Final = 3600.0
"""Clocks of nodes differ by less. A file that was not written since has nothing to say."""


class FileHistory:
    """The history files of a folder, or one of them.

    Args:
        place: the folder or file.

    Attributes:
        skipped: files that could not be read, and why.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.skipped: list[str] = []

    def records(self, since_s: float, until_s: float, job_id: str = "") -> list[JobRecord]:
        """See `History.records`."""
        return merged(self.parts(since_s, until_s, job_id))

    def parts(
        self, since_s: float, until_s: float, job_id: str = ""
    ) -> list[tuple[str, JobRecord]]:
        """The same, node by node: jobs on several nodes come as several records, each with its node.

        Raises:
            TelemetryError: as for `records`.
        """
        return self._read(lambda database: _records(database, since_s, until_s, job_id), since_s)

    def minutes(
        self, since_s: float, until_s: float, job_id: str = ""
    ) -> dict[float, list[JobRecord]]:
        """The same as `records`, minute by minute, by the minute's beginning.

        Raises:
            TelemetryError: as for `records`.
        """

        def read(database: sqlite3.Connection) -> list[tuple[str, float, JobRecord]]:
            return _by_minute(database, since_s, until_s, job_id)

        by_minute: dict[float, list[tuple[str, JobRecord]]] = {}
        for node, minute, record in self._read(read, since_s):
            by_minute.setdefault(minute, []).append((node, record))
        return {minute: merged(by_minute[minute]) for minute in sorted(by_minute)}

    def _read(self, read: Callable[[sqlite3.Connection], list[T]], since_s: float) -> list[T]:
        """What is read from each file that may have something."""
        self.skipped = []
        found: list[T] = []
        files = self._files()
        for file in (file for file in files if _written_s(file) > since_s - SKEW_S):
            try:
                with _copied(file) as database:
                    found += read(database)
            except (sqlite3.Error, OSError, ValueError) as e:
                self.skipped.append(f"{file}: {e}")
        if files and len(self.skipped) == len(files):
            raise TelemetryError(
                f"{self._place}: no history file can be read: {self.skipped[0]}.",
                path=str(self._place),
                next_step="Start the agent again: it keeps a damaged file aside and begins another.",
            )
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _files(self) -> list[Path]:
        if not self._place.is_dir():
            return [self._place]
        files = sorted(self._place.glob(f"*{SUFFIX}"))
        if not files:
            raise TelemetryError(
                f"{self._place}: there is no history in this folder.",
                path=str(self._place),
                next_step="Start an agent that keeps one: headrace agent start --history DIR.",
            )
        return files


def _written_s(file: Path) -> float:
    """When it was written last."""
    found = 0.0
    for path in (file, Path(f"{file}-wal")):
        with contextlib.suppress(OSError):
            found = max(found, path.stat().st_mtime)
    return found


@contextlib.contextmanager
def _copied(file: Path) -> Iterator[sqlite3.Connection]:
    with tempfile.TemporaryDirectory(prefix="headrace-history-") as folder:
        copy = Path(folder) / "history"
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            if not _copy(file, copy) and not last:
                time.sleep(PAUSE_S)
                continue
            database = sqlite3.connect(copy)
            try:
                check_whole(database)
            except sqlite3.DatabaseError:
                database.close()
                if last:
                    raise
                time.sleep(PAUSE_S)
                continue
            try:
                yield database
            finally:
                database.close()
            return


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
SELECT f.job, s.name, s.label, s.file_system, sum(f.value), max(f.value)
FROM figures f JOIN series s ON s.series = f.series
WHERE f.minute >= ? AND f.minute < ? AND f.job IN (SELECT job FROM jobs WHERE ? IN ('', job_id, alias))
GROUP BY f.job, f.series
"""


_BY_MINUTE: Final = """
SELECT f.minute, f.job, s.name, s.label, s.file_system, f.value
FROM figures f JOIN series s ON s.series = f.series
WHERE f.minute >= ? AND f.minute < ? AND f.job IN (SELECT job FROM jobs WHERE ? IN ('', job_id, alias))
"""


def _records(
    database: sqlite3.Connection, since_s: float, until_s: float, job_id: str
) -> list[tuple[str, JobRecord]]:
    node, records = _jobs(database)
    seen = set()
    # A minute belongs to the stretch in which it begins, but for the first: a window ends within one.
    for number, name, label, system, total, most in database.execute(
        _FIGURES, (since_s - 59, until_s, job_id)
    ):
        record = records.get(number)
        if record is not None:
            seen.add(number)
            value = most if name in PEAKS else total
            record.figures[clean(name), clean(label), clean(system)] = float(value)
    return [(node, records[number]) for number in sorted(seen)]


def _by_minute(
    database: sqlite3.Connection, since_s: float, until_s: float, job_id: str
) -> list[tuple[str, float, JobRecord]]:
    node, facts = _jobs(database)
    found: dict[tuple[float, int], JobRecord] = {}
    for minute, number, name, label, system, value in database.execute(
        _BY_MINUTE, (since_s - 59, until_s, job_id)
    ):
        if number not in facts:
            continue
        record = found.get((minute, number))
        if record is None:
            record = found[minute, number] = replace(facts[number], figures={})
        record.figures[clean(name), clean(label), clean(system)] = float(value)
    return [(node, float(minute), record) for (minute, _), record in found.items()]


def _jobs(database: sqlite3.Connection) -> tuple[str, dict[int, JobRecord]]:
    """The node, and its jobs without their figures.

    Raises:
        ValueError: the file has another format.
    """
    meta = dict(database.execute("SELECT key, value FROM meta"))
    if meta.get("format") != FORMAT:
        raise ValueError(f"its format is {meta.get('format')!r}, expected {FORMAT!r}")
    records = {
        number: JobRecord(
            job_id=clean(one), alias=clean(alias), name=clean(name), user=clean(user),
            account=clean(account), first_s=float(first_s), last_s=float(last_s),
            measured=bool(measured),
        )
        for number, one, alias, name, user, account, first_s, last_s, measured in database.execute(
            "SELECT job, job_id, alias, name, user, account, first_s, last_s, measured FROM jobs"
        )
    }  # fmt: skip
    return clean(str(meta.get("node", ""))), records
