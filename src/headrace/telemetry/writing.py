"""Writing: one agent's history file: minutes are added, old ones go, and a full disk loses nothing.

    meta      key, value                  format version, node
    jobs      what is known of each job on this node
    series    figure, label, file system  each once
    figures   minute, job, series, value  the amounts of that minute
    tellers   the last report of each process

One agent writes, with a write-ahead log that is carried into the file every minute;
`headrace.telemetry.history` reads. Bounded by age and by bytes. What cannot be written waits in the ledger
and is tried again, less and less often. A clock that jumps must not empty the history: nothing is removed by
age until the clock has agreed with the monotonic one for an hour.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.files import lock_path, locked_by
from headrace.errors import TelemetryError
from headrace.telemetry.history import FORMAT, PEAKS, SUFFIX, check_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.telemetry.accounts import Ledger, PendingWrites
    from headrace.telemetry.messages import FigureKey

_log = logging.getLogger("headrace.agent")

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
  job INTEGER PRIMARY KEY, job_id TEXT NOT NULL UNIQUE, alias TEXT NOT NULL, name TEXT NOT NULL,
  user TEXT NOT NULL, account TEXT NOT NULL, restarts INTEGER NOT NULL,
  first_s REAL NOT NULL, last_s REAL NOT NULL, measured INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS series (
  series INTEGER PRIMARY KEY, name TEXT NOT NULL, label TEXT NOT NULL, file_system TEXT NOT NULL,
  UNIQUE (name, label, file_system)
);
CREATE TABLE IF NOT EXISTS figures (
  minute INTEGER NOT NULL, job INTEGER NOT NULL, series INTEGER NOT NULL, value REAL NOT NULL,
  PRIMARY KEY (minute, job, series)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tellers (
  instance TEXT PRIMARY KEY, job_id TEXT NOT NULL, at_s REAL NOT NULL, figures TEXT NOT NULL
) WITHOUT ROWID;
"""


def open_database(path: Path, node: str) -> sqlite3.Connection:
    """Open a history file to write it; a new one if there is none.

    A file that is damaged is kept beside, under another name, and a new one is begun.

    Raises TelemetryError if it cannot be made or written, or is of another version or node.
    """
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    while True:
        try:
            return _open(path, node)
        except sqlite3.Error as e:
            damaged = isinstance(e, sqlite3.DatabaseError) and path.exists()
            if not damaged or isinstance(e, sqlite3.OperationalError) or aside.exists():
                raise TelemetryError(
                    f"{path}: the history cannot be written: {e}.",
                    path=str(path),
                    next_step="See that the folder is there, writable and not full.",
                ) from e
            _log.error("%s is damaged (%s): it is kept as %s, a new one is begun", path, e, aside)
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)


def _open(path: Path, node: str) -> sqlite3.Connection:
    new = not path.exists()
    database = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
    try:
        if new:
            os.chmod(path, 0o644)  # noqa: PTH101 - a history is to be read by others
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        # A power cut may cost the last minute, never the file.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        check_whole(database)
        database.executescript(_SCHEMA)
        _check(database, path, node)
    except BaseException:
        database.close()
        raise
    return database


def _check(database: sqlite3.Connection, path: Path, node: str) -> None:
    known = dict(database.execute("SELECT key, value FROM meta"))
    if known and known.get("format") != FORMAT:
        raise TelemetryError(
            f"{path}: the history has format {known.get('format')!r}, expected {FORMAT!r}.",
            path=str(path),
            next_step="Use the headrace that wrote it, or name another folder.",
        )
    if known and known.get("node") != node:
        raise TelemetryError(
            f"{path}: this is the history of node {known.get('node')!r}, this node is {node!r}.",
            path=str(path),
            next_step="Name another folder.",
        )
    if not known:
        database.executemany("INSERT INTO meta VALUES (?, ?)", [("format", FORMAT), ("node", node)])


AGE_S: Final = 30 * 86400.0
BYTES_MAX: Final = 256 << 20
BYTES_LEAST: Final = 1 << 20

CHECKPOINT_S: Final = 60.0
PRUNE_S: Final = 600.0
RETRY_S: Final = 5.0
RETRY_MAX_S: Final = 300.0

STEADY_S: Final = 3600.0
"""So long must the clock have agreed before anything is removed because of its age."""

JUMP_S: Final = 60.0

REPORTS_S: Final = 2 * 86400.0  # the last report of a process is remembered so long


def file_of(folder: Path, node: str, job: str = "") -> Path:
    """The file of an agent; one that looks at a single job has a file of its own."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)[:64] or "node"
    of_job = "".join(c if c.isalnum() else "_" for c in job)[:64]
    return folder / (f"{safe}.job-{of_job}{SUFFIX}" if of_job else f"{safe}{SUFFIX}")


class HistoryWriter:
    """Writes a history file, alone.

    Raises TelemetryError if it cannot be written, or another agent writes it.
    """

    def __init__(
        self,
        path: Path,
        node: str,
        *,
        age_s: float = AGE_S,
        bytes_max: int = BYTES_MAX,
        mono: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        if age_s <= 0 or bytes_max < BYTES_LEAST:
            raise ValueError(
                f"a history of {age_s:g} s and {bytes_max} bytes: "
                f"expected more than 0 s and at least {BYTES_LEAST} bytes"
            )
        self.path = path
        self._node, self._age_s, self._bytes_max = node, age_s, bytes_max
        self._mono, self._unix = mono, unix
        self._lock_fd = _locked(path)
        _remove_old(path, age_s)
        try:
            self._database: sqlite3.Connection | None = open_database(path, node)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._next_s = self._pause_s = 0.0
        self._checkpoint_s = self._prune_s = mono()
        self._offset_s = unix() - mono()
        self._steady_since_s = mono()
        self.why = ""  # why it cannot be written now; '' if it can

    def reports(self) -> dict[str, dict[FigureKey, float]]:
        """The last report of each process when this file was written last."""
        reports = {}
        for instance, text in self._open().execute("SELECT instance, figures FROM tellers"):
            with contextlib.suppress(ValueError, TypeError):
                reports[instance] = {
                    (name, label, system): float(value)
                    for name, label, system, value in json.loads(text)
                }
        return reports

    def last_seen(self) -> dict[str, float]:
        """Until when jobs of the last days are known."""
        since = self._unix() - REPORTS_S
        rows = self._open().execute("SELECT job_id, last_s FROM jobs WHERE last_s > ?", (since,))
        return dict(rows)

    def write(self, ledger: Ledger, *, now: bool = False) -> bool:
        """Write what waits in a ledger; it waits on if that fails."""
        mono_s = self._mono()
        if mono_s < self._next_s and not now:
            return False
        pending = ledger.take()
        try:
            if pending:
                self._write(pending)
            self._care(mono_s, now=now)
        except (sqlite3.Error, OSError, TelemetryError) as e:
            ledger.give_back(pending)
            self._failed(e, mono_s)
            return False
        if self.why:
            _log.warning("%s: written again", self.path)
        self.why, self._pause_s, self._next_s = "", 0.0, 0.0
        return True

    def close(self) -> None:
        """Carry the log into the file, and let go of it."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._let_go()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self._database is not None and not self.path.exists():
            _log.warning("%s was removed: another is begun", self.path)
            self._let_go()
        if self._database is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._database = open_database(self.path, self._node)
        return self._database

    def _let_go(self) -> None:
        """Let go of the file; it is opened anew, which keeps what is damaged, and begins another."""
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _write(self, pending: PendingWrites) -> None:
        database, now_s = self._open(), self._unix()
        jobs = dict.fromkeys(job for _, job, *_ in pending.amounts)
        database.execute("BEGIN IMMEDIATE")
        with database:  # commits, or rolls back
            self._write_jobs(database, pending)
            database.executemany(
                "INSERT OR IGNORE INTO jobs VALUES (NULL, ?, '', '', '', '', 0, ?, ?, 0)",
                [(job, now_s, now_s) for job in jobs],
            )
            database.executemany(
                "INSERT OR IGNORE INTO series (name, label, file_system) VALUES (?, ?, ?)",
                list(dict.fromkeys(entry[2:] for entry in pending.amounts)),
            )
            for (minute, job, *key), value in pending.amounts.items():
                statement = _RAISE if key[0] in PEAKS else _ADD
                database.execute(statement, (minute, job, value, *key))
            database.executemany(
                "INSERT OR REPLACE INTO tellers VALUES (?, ?, ?, ?)",
                [
                    (instance, job, at_s, json.dumps([[*key, v] for key, v in figures.items()]))
                    for instance, (job, at_s, figures) in pending.reports.items()
                ],
            )

    def _write_jobs(self, database: sqlite3.Connection, pending: PendingWrites) -> None:
        for job, facts in pending.jobs.items():
            identity = facts.identity
            database.execute(
                "INSERT INTO jobs (job_id, alias, name, user, account, restarts, first_s, last_s, measured) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id) DO UPDATE SET "
                "alias = excluded.alias, name = excluded.name, user = excluded.user, "
                "account = excluded.account, restarts = excluded.restarts, "
                "first_s = min(first_s, excluded.first_s), last_s = max(last_s, excluded.last_s), "
                "measured = max(measured, excluded.measured)",
                (job, identity.alias, identity.name, facts.user, identity.account,
                 identity.restarts, facts.first_s, facts.last_s, int(facts.measured)),
            )  # fmt: skip

    def _care(self, mono_s: float, *, now: bool) -> None:
        """Carry the log into the file and remove what is old, now and then."""
        database = self._open()
        if now or mono_s - self._checkpoint_s >= CHECKPOINT_S:
            self._checkpoint_s = mono_s
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if mono_s - self._prune_s >= PRUNE_S or self._bytes(database) > self._bytes_max:
            self._prune_s = mono_s
            self._prune(database, mono_s)

    def _prune(self, database: sqlite3.Connection, mono_s: float) -> None:
        unix_s = self._unix()
        if abs(unix_s - mono_s - self._offset_s) > JUMP_S:
            _log.warning("the clock has jumped: nothing is removed by age for an hour")
            self._offset_s, self._steady_since_s = unix_s - mono_s, mono_s
        if mono_s - self._steady_since_s >= STEADY_S:
            database.execute("DELETE FROM figures WHERE minute < ?", (unix_s - self._age_s,))
            database.execute("DELETE FROM tellers WHERE at_s < ?", (unix_s - REPORTS_S,))
        while self._bytes(database) > self._bytes_max:
            # A tenth of the minutes at a time, the oldest first.
            removed = database.execute(
                "DELETE FROM figures WHERE minute <= (SELECT minute FROM figures GROUP BY minute "
                "ORDER BY minute LIMIT 1 OFFSET (SELECT count(DISTINCT minute) / 10 FROM figures))"
            )
            if not removed.rowcount:
                break
        database.execute(
            "DELETE FROM jobs WHERE last_s < ? AND job NOT IN (SELECT DISTINCT job FROM figures)",
            (unix_s - REPORTS_S,),
        )
        database.execute("PRAGMA incremental_vacuum").fetchall()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @staticmethod
    def _bytes(database: sqlite3.Connection) -> int:
        """Of what is in use; pages that are free will be used again."""
        names = ("page_size", "page_count", "freelist_count")
        size, pages, free = (database.execute(f"PRAGMA {n}").fetchone()[0] for n in names)
        return int(size * (pages - free))

    def _failed(self, error: Exception, mono_s: float) -> None:
        if not self.why:
            _log.error("%s cannot be written, figures wait in memory: %s", self.path, error)
        self.why = str(error)
        self._pause_s = min(RETRY_MAX_S, 2 * self._pause_s or RETRY_S)
        self._next_s = mono_s + self._pause_s
        harmless = sqlite3.OperationalError | sqlite3.IntegrityError
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, harmless):
            self._let_go()  # it is damaged


_INSERT: Final = """
INSERT INTO figures SELECT ?, (SELECT job FROM jobs WHERE job_id = ?), series, ? FROM series
WHERE name = ? AND label = ? AND file_system = ?
ON CONFLICT (minute, job, series) DO UPDATE SET value = """
_ADD: Final = f"{_INSERT} value + excluded.value"
_RAISE: Final = f"{_INSERT} max(value, excluded.value)"


def _remove_old(path: Path, age_s: float) -> None:
    """Remove files of single jobs of this node that nobody has written for so long."""
    node = path.name.removesuffix(SUFFIX).partition(".job-")[0]
    for file in path.parent.glob(f"{node}.job-*{SUFFIX}"):
        with contextlib.suppress(OSError, TelemetryError):
            if file == path or time.time() - file.stat().st_mtime < age_s:
                continue
            fd = _locked(file)  # nobody writes it
            try:
                for suffix in ("", "-wal", "-shm", ".lock"):
                    file.with_name(file.name + suffix).unlink(missing_ok=True)
            finally:
                os.close(fd)


def _locked(path: Path) -> int:
    """The lock beside a history file, held.

    Raises TelemetryError if another agent holds it, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock")
        fd = lock_path(lock, mode=0o644, sign=True)
    except OSError as e:
        raise TelemetryError(
            f"{path.parent}: no history can be kept there: {e.strerror}.",
            path=str(path.parent),
            next_step="Name a folder that you may write: --history DIR.",
        ) from e
    if fd is None:
        raise TelemetryError(
            f"{path}: another agent writes this history, process {locked_by(lock)}.",
            path=str(path),
            next_step="Use that one, or give this one a folder of its own: --history DIR.",
        )
    return fd
