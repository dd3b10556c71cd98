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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import TelemetryError
from headrace.runtime.job import clean
from headrace.telemetry.database import FORMAT, SUFFIX, check_whole
from headrace.telemetry.history import JobRecord, merged
from headrace.telemetry.ledger import PEAKS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FileHistory"]

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
        self.skipped = []
        found: list[tuple[str, JobRecord]] = []
        files = self._files()
        for file in (file for file in files if _written_s(file) > since_s - SKEW_S):
            try:
                with _copied(file) as database:
                    found += _records(database, since_s, until_s, job_id)
            except (sqlite3.Error, OSError, ValueError) as e:
                self.skipped.append(f"{file}: {e}")
        if files and len(self.skipped) == len(files):
            raise TelemetryError(
                f"{self._place}: no history file can be read: {self.skipped[0]}.",
                path=str(self._place),
                next_step="Start the agent again: it keeps a damaged file aside and begins another.",
            )
        return merged(found)

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


def _records(
    database: sqlite3.Connection, since_s: float, until_s: float, job_id: str
) -> list[tuple[str, JobRecord]]:
    meta = dict(database.execute("SELECT key, value FROM meta"))
    if meta.get("format") != FORMAT:
        raise ValueError(f"its format is {meta.get('format')!r}, expected {FORMAT!r}")
    node = clean(str(meta.get("node", "")))
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
