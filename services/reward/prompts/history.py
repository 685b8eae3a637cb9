"""Store the results of earlier attempts (`<run_dir>/reward/prompt_memory.sqlite`).

One SQLite file in WAL mode: saved histories survive the process, however it ends. A history is
read when its prompt is issued, so memory does not grow with the data set. Histories are written in
one transaction per policy version. All calls block: make them from a thread.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from services.reward.sqlite_file import SqliteFile
from sluice.algorithm.sampling.attempt import PromptHistory, RememberedAttempt, update_history

APPLICATION_ID = 0x534C5543  # "SLUC"
FORMAT = 1

_TABLES = """
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
        self._file = SqliteFile(
            path,
            "memory of prompts",
            "what earlier attempts showed",
            APPLICATION_ID,
            FORMAT,
            _TABLES,
            is_durable=False,
        )
        self._lock, self._database = threading.Lock(), self._file.open()

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
            raise self._file.unusable(error) from error
        return None if row is None else PromptHistory(*row)

    def add(self, attempts: Sequence[tuple[str, RememberedAttempt]]) -> None:
        """Add attempts to the histories of their prompts, all or none.

        Raises:
            DataError: the file cannot be read or written.
        """
        try:
            with self._lock, self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for key, attempt in attempts:
                    self._write(bytes.fromhex(key), attempt)
        except sqlite3.Error as error:
            raise self._file.unusable(error) from error

    def _write(self, key: bytes, attempt: RememberedAttempt) -> None:
        row = self._database.execute(_READ, (key,)).fetchone()
        history = update_history(None if row is None else PromptHistory(*row), attempt)
        counts = (history.num_right, history.num_wrong, history.mean_tokens)
        self._database.execute(_WRITE, (key, *counts, history.version, history.num_attempts))

    def lengths(self, count: int) -> list[tuple[str, float]]:
        """Return key and mean response length of the latest prompts, the newest at the end.

        Raises:
            DataError: the file is damaged.
        """
        try:
            with self._lock:
                rows = self._database.execute(_LENGTHS, (count,)).fetchall()
        except sqlite3.Error as error:
            raise self._file.unusable(error) from error
        return [(key.hex(), mean_tokens) for key, mean_tokens in reversed(rows)]
