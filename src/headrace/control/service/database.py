"""Database: what survives a controller: policies, whose reign it is, and leases that may still run.

SQLite with a write-ahead log. The epoch is counted up when a controller begins to rule and read again
whenever it writes: of two that got at the same file, however that came about, the older one sees
that it rules no more. A lock (flock) beside the file keeps honest ones from trying.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from typing import TYPE_CHECKING, Any

from headrace.base.documents import DocumentKind
from headrace.base.files import lock_path, locked_by
from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = 1
BUSY_S = 2.0
POLICIES_KEPT = 100

_TABLES = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS policies (
    version INTEGER PRIMARY KEY, document TEXT NOT NULL, who TEXT NOT NULL, at TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS leases (number INTEGER PRIMARY KEY CHECK (number = 1),
    planes TEXT NOT NULL) STRICT;
"""


_AGAIN = "Remove the database and apply the policy again."
_POLICY = DocumentKind(
    name="the policy in the controller's database", version=2, unchecked=1, error=ControlError,
    next_step=_AGAIN,
)  # fmt: skip
_LEASES = DocumentKind(
    name="the leases in the controller's database", version=1, unchecked=0, error=ControlError,
    next_step=_AGAIN,
)  # fmt: skip


class Fenced(ControlError):
    """Another controller rules by now."""


class Database:
    """The file, claimed by this controller, and made if there is none.

    Without `lock` only the epoch keeps others out.

    Raises ControlError if another controller has it, it cannot be written, or it is none of ours.
    """

    def __init__(self, path: Path, *, lock: bool = True) -> None:
        self.path = path
        self.reign = ""
        self.epoch = 0
        self._lock = -1
        self._connection: sqlite3.Connection | None = None
        try:
            if lock:  # it is left there: it may lie in a folder of others
                beside = path.with_name(path.name + "-lock")
                fd = lock_path(beside, sign=True)
                if fd is None:
                    raise ControlError(  # noqa: TRY301 - closes what there is, as all that fails here
                        f"{path}: another controller rules with this database, process {locked_by(beside)}.",
                        path=str(path),
                        next_step="Use it, or stop it first: headrace control stop.",
                    )
                self._lock = fd
            old = os.umask(0o077)
            try:
                self._connection = sqlite3.connect(
                    path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
                )
                self._claim(self._connection)
            finally:
                os.umask(old)
        except (sqlite3.Error, OSError) as e:
            self.close()
            raise ControlError(
                f"{path}: the controller's database cannot be used: {e}.",
                path=str(path),
                next_step="Name one in a folder that can be written: --db FILE.",
            ) from e
        except BaseException:
            self.close()
            raise

    def _claim(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_TABLES)
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            about = dict(connection.execute("SELECT key, value FROM about"))
            if about.get("schema", str(SCHEMA)) != str(SCHEMA):
                raise ControlError(
                    f"{self.path}: the database has schema {about['schema']}, expected {SCHEMA}.",
                    path=str(self.path),
                    next_step="Use the version of headrace that wrote it, or another file.",
                )
            self.reign = about.get("reign") or secrets.token_hex(8)
            self.epoch = int(about.get("epoch", 0)) + 1
            values = {"schema": str(SCHEMA), "reign": self.reign, "epoch": str(self.epoch)}
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", values.items())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        if connection is None:
            raise ControlError(f"{self.path}: the database is closed.", path=str(self.path))
        try:
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back
                self._check(connection)
                yield connection
        except sqlite3.Error as e:
            raise ControlError(
                f"{self.path}: the database cannot be written: {e}.",
                path=str(self.path),
                next_step="See that its disk has room and that its folder can be written.",
            ) from e

    def _check(self, connection: sqlite3.Connection) -> None:
        row = connection.execute("SELECT value FROM about WHERE key = 'epoch'").fetchone()
        epoch = int(row[0]) if row else 0
        if epoch != self.epoch:
            raise Fenced(
                f"{self.path}: another controller rules by now, its epoch is {epoch}, "
                f"this one's {self.epoch}.",
                path=str(self.path),
                next_step="End this one; one database is for one controller.",
            )

    def policy(self) -> tuple[int, dict[str, Any]]:
        """The last policy and its version; 0 and an empty one before the first."""
        assert self._connection is not None
        row = self._connection.execute(
            "SELECT version, document FROM policies ORDER BY version DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return 0, {}
        fields = _POLICY.decode(row[1].encode(), str(self.path))
        # Of before policies had a checksum: the document itself.
        document = (
            fields.inner("policy").plain()
            if "policy" in fields
            else {"version": 1} | fields.plain()
        )
        return int(row[0]), document

    def save_policy(self, document: dict[str, Any], who: str, at: str) -> int:
        """Keep a policy and return its version; raises ControlError if it cannot be kept."""
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO policies (document, who, at) VALUES (?, ?, ?)",
                (_POLICY.encode({"policy": document}).decode(), who, at),
            )
            version = int(cursor.lastrowid or 0)
            last = version - POLICIES_KEPT
            connection.execute("DELETE FROM policies WHERE version <= ?", (last,))
        return version

    def leases(self) -> list[dict[str, Any]]:
        """What the controller before this one had given when it last wrote."""
        assert self._connection is not None
        row = self._connection.execute("SELECT planes FROM leases").fetchone()
        if row is None:
            return []
        text = row[0] if row[0].startswith("{") else f'{{"planes": {row[0]}}}'  # of before
        return list(_LEASES.decode(text.encode(), str(self.path)).value("planes"))

    def save_leases(self, planes: list[dict[str, Any]]) -> None:
        """Keep what is given.

        Raises Fenced if another controller rules, and ControlError if it cannot be written.
        """
        with self._writing() as connection:
            text = _LEASES.encode({"planes": planes}).decode()
            connection.execute("INSERT OR REPLACE INTO leases VALUES (1, ?)", (text,))

    def close(self) -> None:
        """Let go of it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
