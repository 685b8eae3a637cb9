"""Bound waits: by seconds, naming the peer, or by progress, until nothing moves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from sluice.concurrency.waits import waiting_for
from sluice.errors import DeadlineError, SluiceError

_units = itertools.count(1)
_latest = 0

ResultT = TypeVar("ResultT")


def advance() -> None:
    """Count a unit of work: a micro-batch, a bucket of weights, progress of a long wait."""
    global _latest
    _latest = next(_units)


def units_done() -> int:
    """Return the units so far."""
    return _latest


@asynccontextmanager
async def deadline(
    seconds: float, *, peer: str, phase: str, remedy: str = ""
) -> AsyncIterator[None]:
    """End the block after `seconds`; register it as a wait meanwhile.

    Raises:
        DeadlineError: naming `peer` and `phase`.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            with waiting_for(peer, phase):
                yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineError(peer, phase, seconds, remedy) from error


async def while_progressing(
    work: Awaitable[ResultT],
    progress: Callable[[], Awaitable[object]],
    *,
    stall_s: float,
    interval_s: float,
    peer: str,
    phase: str,
) -> ResultT:
    """Wait for `work` as long as `progress` changes at least every `stall_s` seconds.

    Args:
        work: is cancelled when it stalls.
        progress: returns a value that differs whenever something moved; None if it is not known.
        stall_s: longest time without a change.
        interval_s: time between two looks; well below `stall_s`.
        peer: the process that does the work, for the error.
        phase: what the work is, for the error.

    Raises:
        DeadlineError: nothing moved for `stall_s`.
        SluiceError: as `work` raises it.
    """
    failure: SluiceError | None = None
    async with asyncio.TaskGroup() as tasks:
        watcher: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(stall_s) as scope:
                watcher = tasks.create_task(
                    _extend(scope, progress, stall_s, interval_s), name=f"progress: {phase}"
                )
                result = await work
        except TimeoutError:
            failure = DeadlineError(peer, phase, stall_s, "nothing moved meanwhile")
        except SluiceError as error:
            failure = error
        finally:
            if watcher is not None:
                watcher.cancel()
    if failure is not None:
        raise failure
    return result


async def _extend(
    scope: asyncio.Timeout,
    progress: Callable[[], Awaitable[object]],
    stall_s: float,
    interval_s: float,
) -> None:
    seen: object = None
    while True:
        await asyncio.sleep(interval_s)
        found = await progress()
        if found is not None and found != seen and not scope.expired():
            seen = found
            advance()
            scope.reschedule(asyncio.get_running_loop().time() + stall_s)
