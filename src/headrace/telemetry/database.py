"""Database: the tables of a history file, and how it is opened, whole or not.

    meta      key, value                  format version, node
    jobs      what is known of each job on this node
    series    figure, label, file system  each once
    figures   minute, job, series, value  the amounts of that minute
    tellers   what each process told last

One agent writes, with a write-ahead log that is carried into the file every minute. Who reads copies the
files and reads the copy (`headrace.telemetry.reading`): so a history may lie on a shared file system, where a
write-ahead log must not be shared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from headrace.errors import TelemetryError

__all__ = ["FORMAT", "SUFFIX", "check_whole", "open_database"]

_log = logging.getLogger("headrace.agent")

FORMAT: Final = "1"
SUFFIX: Final = ".telemetry"

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
    """Open a history to write it; a new one if there is none.

    A file that is damaged is kept beside, under another name, and a new one is begun.

    Raises:
        TelemetryError: it cannot be made or written, or is of another version or node.
    """
    try:
        return _open(path, node)
    except sqlite3.DatabaseError as e:
        if isinstance(e, sqlite3.OperationalError) or not path.exists():
            raise _unwritable(path, e) from e
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        _log.error("%s is damaged (%s): it is kept as %s, and a new one is begun", path, e, aside)
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").unlink()
        try:
            return _open(path, node)
        except sqlite3.Error as again:
            raise _unwritable(path, again) from again


def _open(path: Path, node: str) -> sqlite3.Connection:
    made = not path.exists()
    database = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
    try:
        if made:
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


def check_whole(database: sqlite3.Connection) -> None:
    """See that a file is whole.

    Raises:
        DatabaseError: of sqlite3: it is not.
    """
    found = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != ("ok",):
        raise sqlite3.DatabaseError(
            str(found[0]) if found else "it does not say whether it is whole"
        )


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


def _unwritable(path: Path, error: Exception) -> TelemetryError:
    return TelemetryError(
        f"{path}: the history cannot be written: {error}.",
        path=str(path),
        next_step="See that the folder is there, writable and not full.",
    )
