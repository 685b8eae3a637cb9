"""Write changes of a ledger to its file in order, many in one commit.

Consumes: statements, each change's together. Waits for: a change; then, while nobody waits for a
    commit, a moment for more of them. Produces: commits, each with all changes
    that were there; wakes the callers that wait for one.
On failure: the first error ends the thread, and with it every wait and every further change.
On shutdown: `close` writes what is left.

The file holds a prefix of the changes at every moment, since one thread writes them in order.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sluice.concurrency.deadlines import deadline
from sluice.errors import DataError, DeadlineError

PEER = "disk of the ledger"
COMMIT_TIMEOUT_S = 30.0
LINGER_S = 0.05
MAX_QUEUED = 65_536
"""Changes that wait for the disk at most; one more blocks its caller."""

Statement = tuple[str, tuple[object, ...]]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _CommitWaiter:
    change_number: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


class LedgerWriter:
    """One thread that owns a database.

    Args:
        database: in autocommit mode; closed at the end.
        unusable: makes an error of a database error.
    """

    def __init__(
        self, database: sqlite3.Connection, unusable: Callable[[object], DataError]
    ) -> None:
        self._database, self._unusable = database, unusable
        self._changed = threading.Condition()
        self._queue: deque[Sequence[Statement]] = deque()
        self._waiters: list[_CommitWaiter] = []
        self._noted = self._committed = 0
        self._is_closing = False
        self._error: DataError | None = None
        self._in_use = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    @property
    def noted(self) -> int:
        """The number of the last change."""
        return self._noted

    def write(self, statements: Sequence[Statement]) -> None:
        """One change: all of its statements, or none, reach the file.

        Raises:
            DataError: the file cannot be written, or not for `COMMIT_TIMEOUT_S`.
        """
        with self._changed:
            has_capacity = self._changed.wait_for(self._has_capacity, COMMIT_TIMEOUT_S)
            if self._error is not None:
                raise self._error
            if not has_capacity:
                raise self._unusable(f"{MAX_QUEUED} changes wait for {COMMIT_TIMEOUT_S:g} s")
            self._queue.append(statements)
            self._noted += 1
            if len(self._queue) == 1:
                self._changed.notify_all()

    async def committed(self, change_number: int) -> None:
        """Wait until the first `change_number` changes are on the disk.

        Raises:
            DataError: the file cannot be written.
            DeadlineError: not within `COMMIT_TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        waiter = _CommitWaiter(change_number, loop, loop.create_future())
        with self._changed:
            if self._committed >= change_number:
                return
            if self._error is not None:
                raise self._error
            self._waiters.append(waiter)
            self._changed.notify_all()
        async with deadline(COMMIT_TIMEOUT_S, peer=PEER, phase="committing changes"):
            await waiter.done

    async def failure(self) -> DataError:
        """Wait until the file cannot be written, and why."""
        try:
            await self._wait_for_failure()
        except DataError as error:
            return error
        raise AssertionError("more changes were committed than there can be")

    async def read(self, query: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Run a query over all changes so far, in a thread between two commits.

        Raises:
            DataError, DeadlineError: as for `committed`; or the file cannot be read.
        """
        await self.committed(self._noted)
        return await asyncio.to_thread(self._asked, query)

    def close(self) -> None:
        """Write what is left and close the file. Errors of these last writes are not raised."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(COMMIT_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineError(PEER, "writing the last changes", COMMIT_TIMEOUT_S)
        self._database.close()

    async def _wait_for_failure(self) -> None:
        loop = asyncio.get_running_loop()
        waiter = _CommitWaiter(1 << 62, loop, loop.create_future())
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiters.append(waiter)
        await waiter.done

    def _asked(self, query: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
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
            except sqlite3.Error as error:
                self._fail(self._unusable(error))
                return
            self._notify(len(changes))
        self._fail(self._unusable("it was closed"))

    def _next_changes(self) -> list[Sequence[Statement]] | None:
        """All that wait; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            if not self._is_urgent():
                self._changed.wait_for(self._is_urgent, LINGER_S)
            changes = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        return changes or None

    def _is_urgent(self) -> bool:
        is_awaited = any(waiter.change_number <= self._noted for waiter in self._waiters)
        return is_awaited or self._is_closing or len(self._queue) >= MAX_QUEUED // 2

    def _commit(self, changes: Sequence[Sequence[Statement]]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for statements in changes:
                for sql, values in statements:
                    self._database.execute(sql, values)
            self._database.execute("COMMIT")
        except sqlite3.Error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _notify(self, num_changes: int) -> None:
        with self._changed:
            self._committed += num_changes
            reported = [
                waiter for waiter in self._waiters if waiter.change_number <= self._committed
            ]
            self._waiters = [each for each in self._waiters if each.change_number > self._committed]
        for waiter in reported:
            _call_soon(waiter, _resolve, waiter.done)

    def _fail(self, error: DataError) -> None:
        with self._changed:
            self._error = error
            reported, self._waiters = self._waiters, []
            self._changed.notify_all()
        for waiter in reported:
            _call_soon(waiter, _reject, waiter.done, error)


def _call_soon(waiter: _CommitWaiter, call: Callable[..., None], *arguments: object) -> None:
    try:
        waiter.loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:  # its loop has ended, and nobody waits any more
        return


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _reject(done: asyncio.Future[None], error: DataError) -> None:
    if not done.done():
        done.set_exception(error)
