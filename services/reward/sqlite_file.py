"""Open an SQLite file of the run's folder; check that it is ours and intact."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import DataError

BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A file in WAL mode.

    Args:
        path: the file, created with its folder if missing.
        name: the name of the file's kind, for messages.
        content: what a run loses without the file, for messages.
        application_id: identifies files of this kind.
        format: the number of the file's format; other formats are refused.
        tables: statements that create the tables, separated by ``;`` at the end of a line.
        is_durable: every commit survives a crash of the machine, and the process holds an exclusive
            lock on the file until it ends.
    """

    path: Path
    name: str
    content: str
    application_id: int
    format: int
    tables: str
    is_durable: bool

    def open(self) -> sqlite3.Connection:
        """Open, check and, if durable, lock the file. Any thread may use the connection.

        Raises:
            DataError: it is damaged, in use, of another program or of another format.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            database = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
        except sqlite3.Error as error:
            raise self.unusable(error) from error
        try:
            self._prepare(database)
        except sqlite3.Error as error:
            database.close()
            raise self.unusable(error) from error
        except DataError:
            database.close()
            raise
        return database

    def unusable(self, why: object) -> DataError:
        """Return the error for a file that cannot be read or written."""
        words = " ".join(str(why).split())
        if "locked" in words:
            return DataError(
                f"{self.path}: another process uses this {self.name}; end the other reward "
                "service, or choose another sluice.run_dir"
            )
        return DataError(
            f"{self.path}: the {self.name} cannot be used: {words}; free the disk or restore the "
            f"file, or move it away (with its -wal file) to start without {self.content}"
        )

    def _prepare(self, database: sqlite3.Connection) -> None:
        if self.is_durable:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
        application_id = _number(database, "PRAGMA application_id")
        is_empty = _number(database, "SELECT count(*) FROM sqlite_schema") == 0
        if not (is_empty and application_id == 0):
            self._check(database, application_id)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {'FULL' if self.is_durable else 'NORMAL'}")
        # Take the lock and create the tables in one transaction: a kill leaves an empty file.
        database.execute("BEGIN IMMEDIATE")
        if is_empty:
            for statement in self.tables.split(";\n"):
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {self.application_id}")
            database.execute(f"PRAGMA user_version = {self.format}")
        database.execute("COMMIT")

    def _check(self, database: sqlite3.Connection, application_id: int) -> None:
        if application_id != self.application_id:
            raise DataError(
                f"{self.path}: a database of another program, not a {self.name}; move it away, or "
                "choose another sluice.run_dir"
            )
        if (version := _number(database, "PRAGMA user_version")) != self.format:
            raise DataError(
                f"{self.path}: format {version}, and this version of sluice reads {self.format}; "
                f"use the version that wrote it, or move the file away to start without "
                f"{self.content}"
            )
        with closing(database.execute("PRAGMA quick_check(1)")) as rows:
            if (words := rows.fetchone()[0]) != "ok":
                raise self.unusable(words)


def _number(database: sqlite3.Connection, query: str) -> int:
    with closing(database.execute(query)) as rows:
        return int(rows.fetchone()[0])
