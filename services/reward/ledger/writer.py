"""Write a ledger's changes to its file in order, many per commit.

Consumes: changes of several statements each. Waits for: a change; then, unless a caller waits for a
commit, a moment for more changes. Produces: commits of all queued changes; wakes the callers that
wait for one. On failure: the first error ends the thread, and with it every wait and every further
change. On shutdown: `close` writes what is left.

The file holds a prefix of the changes at every moment, since one thread writes them in order.

`concurrency.threads.BoundedWriter` does not suit: it drops items when it is full or cannot write,
and callers cannot wait for an item. Here a change blocks its caller rather than getting lost,
callers can wait for the commit, and a failed write is final.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from sluice.concurrency.waits import deadline
from sluice.errors import DataError, DeadlineError

PEER = "disk of the ledger"
COMMIT_TIMEOUT_S = 30.0
LINGER_S = 0.05
MAX_QUEUED = 65_536
"""Most changes that wait for the disk; one more blocks its caller."""

Statement = tuple[str, tuple[object, ...]]
ResultT = TypeVar("ResultT")


class LedgerWriter:
    """A thread that owns a database.

    Args:
        database: a connection in autocommit mode; closed at the end.
        unusable: converts an error of the database to the error that calls raise.

    Attributes:
        noted: the number of the last change.
    """

    def __init__(
        self, database: sqlite3.Connection, unusable: Callable[[object], DataError]
    ) -> None:
        self._database, self._unusable = database, unusable
        self._changed = threading.Condition()
        self._queue: deque[Sequence[Statement]] = deque()
        self._waiters: list[tuple[int, Future[None]]] = []  # by the change that each waits for
        self._failure: Future[DataError] = _running_future()
        self.noted = 0
        self._committed = 0
        self._is_closing = False
        self._error: DataError | None = None
        self._in_use = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, statements: Sequence[Statement]) -> None:
        """Queue a change: all its statements reach the file, or none.

        Raises:
            DataError: the file cannot be written, or the queue was full for `COMMIT_TIMEOUT_S`.
        """
        with self._changed:
            has_capacity = self._changed.wait_for(self._has_capacity, COMMIT_TIMEOUT_S)
            if self._error is not None:
                raise self._error
            if not has_capacity:
                raise self._unusable(f"{MAX_QUEUED} changes wait for {COMMIT_TIMEOUT_S:g} s")
            self._queue.append(statements)
            self.noted += 1
            if len(self._queue) == 1:
                self._changed.notify_all()

    async def wait_until_committed(self, change_number: int) -> None:
        """Wait until the first `change_number` changes are on disk.

        Raises:
            DataError: the file cannot be written.
            DeadlineError: not within `COMMIT_TIMEOUT_S`.
        """
        with self._changed:
            if self._committed >= change_number:
                return
            if self._error is not None:
                raise self._error
            waiter: Future[None] = _running_future()
            self._waiters.append((change_number, waiter))
            self._changed.notify_all()
        async with deadline(COMMIT_TIMEOUT_S, peer=PEER, phase="committing changes"):
            await asyncio.wrap_future(waiter)

    async def failure(self) -> DataError:
        """Wait until the file cannot be written, or is closed; return the error."""
        return await asyncio.wrap_future(self._failure)

    async def read(self, query: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run a query that sees all changes so far, in a thread between two commits.

        Raises:
            DataError, DeadlineError: as for `wait_until_committed`; or the file cannot be read.
        """
        await self.wait_until_committed(self.noted)
        return await asyncio.to_thread(self._query, query)

    def close(self) -> None:
        """Write the remaining changes and close the file. Do not raise errors of these writes."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(COMMIT_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineError(PEER, "writing the last changes", COMMIT_TIMEOUT_S)
        self._database.close()

    def _query(self, query: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        try:
            with self._in_use:
                return query(self._database)
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _has_capacity(self) -> bool:
        return self._error is not None or len(self._queue) < MAX_QUEUED

    def _run(self) -> None:
        while (changes := self._next_changes()) is not None:
            try:
                with self._in_use:
                    self._commit(changes)
            except Exception as error:  # noqa: BLE001 - also a value that SQLite cannot bind
                self._fail(self._unusable(error))
                return
            self._notify(len(changes))
        self._fail(self._unusable("it was closed"))

    def _next_changes(self) -> list[Sequence[Statement]] | None:
        """Return all queued changes; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            if not self._is_urgent():
                self._changed.wait_for(self._is_urgent, LINGER_S)
            changes = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        return changes or None

    def _is_urgent(self) -> bool:
        is_awaited = any(number <= self.noted for number, _ in self._waiters)
        return is_awaited or self._is_closing or len(self._queue) >= MAX_QUEUED // 2

    def _commit(self, changes: Sequence[Sequence[Statement]]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for statements in changes:
                for sql, values in statements:
                    self._database.execute(sql, values)
            self._database.execute("COMMIT")
        except Exception:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _notify(self, num_changes: int) -> None:
        with self._changed:
            self._committed += num_changes
            served = [waiter for number, waiter in self._waiters if number <= self._committed]
            self._waiters = [waiting for waiting in self._waiters if waiting[0] > self._committed]
        for waiter in served:
            waiter.set_result(None)

    def _fail(self, error: DataError) -> None:
        with self._changed:
            self._error = error
            waiters, self._waiters = self._waiters, []
            self._changed.notify_all()
        for _, waiter in waiters:
            waiter.set_exception(error)
        self._failure.set_result(error)


def _running_future() -> Future[ResultT]:
    """Return a future that a cancelled waiter does not cancel, so it can always be set."""
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()
    return future
