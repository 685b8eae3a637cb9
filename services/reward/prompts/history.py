"""Keep what earlier attempts showed (`<run_dir>/reward/prompt_memory.sqlite`).

One SQLite file in WAL mode: saved histories survive the process, however it ends. A history is
read when its prompt is issued, so memory does not grow with the data set. Histories are written in
one transaction per policy version. All calls block: make them from a thread.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Self

from sluice.algorithm.sampling.attempt import PromptHistory, RememberedAttempt, remembered
from sluice.errors import DataError

APPLICATION_ID = 0x534C5543  # "SLUC"
FORMAT = 1
BUSY_TIMEOUT_S = 10.0

_CREATE = """
CREATE TABLE histories (
    key BLOB PRIMARY KEY,
    num_right REAL NOT NULL,
    num_wrong REAL NOT NULL,
    mean_tokens REAL NOT NULL,
    version INTEGER NOT NULL,
    num_visits INTEGER NOT NULL
) WITHOUT ROWID
"""
_READ = "SELECT num_right, num_wrong, mean_tokens, version, num_visits FROM histories WHERE key = ?"
_LENGTHS = "SELECT key, mean_tokens FROM histories ORDER BY version DESC LIMIT ?"
_WRITE = "INSERT OR REPLACE INTO histories VALUES (?, ?, ?, ?, ?, ?)"


class PromptMemoryStore:
    """Histories by key (`prompt_key`). Any thread may use it, one call at a time.

    Args:
        path: the file; a missing file or folder is created.

    Raises:
        DataError: the file is damaged, belongs to another program or has another format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            self._open()
        except sqlite3.Error as error:
            self._database.close()
            raise self._damaged(error) from error
        except DataError:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; saved histories stay."""
        with self._lock:
            self._database.close()

    def read(self, key: str) -> PromptHistory | None:
        """Return the history of a prompt; ``None`` if it had no attempt.

        Raises:
            DataError: the file is damaged.
        """
        try:
            with self._lock:
                row = self._database.execute(_READ, (bytes.fromhex(key),)).fetchone()
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        return None if row is None else PromptHistory(*row)

    def add(self, attempts: Sequence[tuple[str, RememberedAttempt]]) -> None:
        """Add attempts to the histories of their prompts, all or none.

        Raises:
            DataError: the file cannot be read or written.
        """
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for key, seen in attempts:
                    self._write(bytes.fromhex(key), seen)
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def _write(self, key: bytes, seen: RememberedAttempt) -> None:
        row = self._database.execute(_READ, (key,)).fetchone()
        after = remembered(None if row is None else PromptHistory(*row), seen)
        counts = (after.num_right, after.num_wrong, after.mean_tokens)
        self._database.execute(_WRITE, (key, *counts, after.version, after.num_attempts))

    def lengths(self, count: int) -> list[tuple[str, float]]:
        """Return key and mean response length of the latest prompts, the newest at the end.

        Raises:
            DataError: the file is damaged.
        """
        try:
            with self._lock:
                rows = self._database.execute(_LENGTHS, (count,)).fetchall()
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        return [(key.hex(), mean_tokens) for key, mean_tokens in reversed(rows)]

    def _open(self) -> None:
        found = self._number("application_id")
        with closing(self._database.execute("SELECT count(*) FROM sqlite_schema")) as tables:
            is_empty = tables.fetchone()[0] == 0
        if is_empty and found == 0:
            self._create()
            return
        if found != APPLICATION_ID:
            raise DataError(
                f"{self._path}: a database of another program, not a memory of prompts; move it "
                "away, or choose another sluice.run_dir"
            )
        if (version := self._number("user_version")) != FORMAT:
            raise DataError(
                f"{self._path}: format {version}, and this version of sluice reads {FORMAT}; move "
                "the file away to start with an empty memory"
            )
        check = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check != "ok":
            raise self._damaged(check)
        self._database.execute("PRAGMA synchronous = NORMAL")

    def _create(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(_CREATE)
            self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._database.execute(f"PRAGMA user_version = {FORMAT}")

    def _number(self, pragma: str) -> int:
        return int(self._database.execute(f"PRAGMA {pragma}").fetchone()[0])

    def _damaged(self, what: object) -> DataError:
        words = " ".join(str(what).split())
        return DataError(
            f"{self._path}: the memory of prompts cannot be used: {words}; free the disk, or move "
            "the file away to start with an empty memory"
        )
