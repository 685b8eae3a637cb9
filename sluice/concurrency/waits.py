"""Bounded waits: by seconds or by progress, with an error that names the peer; and those of now.

Tasks and threads register each wait while it lasts; status calls and the watchdog read the
registry. Registering and removing are one operation on a dict each, which the interpreter does not
interrupt, so there is no lock to hang on.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from sluice.errors import DeadlineError, SluiceError

MAX_REPORTED = 32
"""Lines a status answer holds at most."""
_units = itertools.count(1)
_latest = 0

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waits for one peer and one purpose, counted together.

    Attributes:
        peer: the process or thing that has to act.
        phase: what the wait is for.
        seconds: how long the longest has lasted.
        count: how many there are.
        task: the task or thread that waits longest.
    """

    peer: str
    phase: str
    seconds: float
    count: int = 1
    task: str = ""


class Wait:
    """A wait of this task or thread, from its creation to the end of its block, or to `end`.

    Args:
        peer: the service or replica that has to act, or a thing such as "ledger's disk".
        phase: what for; waits with the same words are counted together.
    """

    __slots__ = ("_owner", "peer", "phase", "since_s")

    def __init__(self, peer: str, phase: str) -> None:
        self.peer = peer
        self.phase = phase
        self.since_s = time.monotonic()
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without an event loop
            task = None
        self._owner = threading.current_thread() if task is None else task
        _open[self] = None

    def restart(self) -> None:
        """Start to wait for the next thing, because something came."""
        self.since_s = time.monotonic()

    def end(self) -> None:
        """End the wait. Repeating it is harmless."""
        _open.pop(self, None)

    @property
    def task(self) -> str:
        """The name of the task that waits, or of the thread outside of tasks."""
        owner = self._owner
        return owner.get_name() if isinstance(owner, asyncio.Task) else owner.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


waiting_for = Wait
_open: dict[Wait, None] = {}


def present_waits() -> tuple[Waiting, ...]:
    """Return this process's waits by peer and phase, the longest first, `MAX_REPORTED` at most."""
    now_s = time.monotonic()
    return merge_waits(Waiting(w.peer, w.phase, now_s - w.since_s, 1, w.task) for w in list(_open))


def merge_waits(waits: Iterable[Waiting], max_lines: int = MAX_REPORTED) -> tuple[Waiting, ...]:
    """Merge waits of one peer and phase; the longest first, `max_lines` lines at most."""
    by_purpose: dict[tuple[str, str], list[Waiting]] = {}
    for wait in waits:
        by_purpose.setdefault((wait.peer, wait.phase), []).append(wait)
    lines = [_merge_group(group) for group in by_purpose.values()]
    lines.sort(key=lambda line: (-line.seconds, line.peer, line.phase))
    return tuple(lines[:max_lines])


def _merge_group(group: Sequence[Waiting]) -> Waiting:
    longest = max(group, key=lambda wait: wait.seconds)
    count = sum(wait.count for wait in group)
    return Waiting(longest.peer, longest.phase, longest.seconds, count, longest.task)


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


async def run_unless(unwanted: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """Return the result of `work`; cancel it and return None if `unwanted` is set first.

    Raises:
        Exception: whatever `work` raises.
    """
    results: list[ResultT] = []
    errors: list[Exception] = []

    async def kept() -> None:
        try:
            results.append(await work)
        except Exception as error:  # noqa: BLE001 raised below, as itself and not in a group
            errors.append(error)

    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(kept(), name="work")
        waiting = tasks.create_task(unwanted.wait(), name="unwanted")
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        waiting.cancel()
    if errors:
        raise errors[0]
    return results[0] if results else None


@asynccontextmanager
async def run_beside(work: Coroutine[object, object, None], name: str) -> AsyncIterator[None]:
    """Run `work` for the length of the block. Errors of the block pass unchanged."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name=name)
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised again below: the group would wrap it
            failure = error
        finally:
            task.cancel()
    if failure is not None:
        raise failure


async def ends_within(seconds: float, work: Awaitable[object]) -> bool:
    """Return whether `work` ends within `seconds`; it is cancelled if it does not."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


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
        peer, phase: who does the work, and what it is, for the error.

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
    last_state: object = None
    while True:
        await asyncio.sleep(interval_s)
        state = await progress()
        if state is not None and state != last_state and not scope.expired():
            last_state = state
            advance()
            scope.reschedule(asyncio.get_running_loop().time() + stall_s)


class ChangeSignal:
    """Take `next_change` before looking at the state, then wait for it: no change is missed.

    Args:
        following: notified as well, after this one.

    Attributes:
        next_change: is set at the first `notify` from now on.
    """

    def __init__(self, following: ChangeSignal | None = None) -> None:
        self.next_change = asyncio.Event()
        self._then = following

    def notify(self) -> None:
        """Wake all waiters."""
        event, self.next_change = self.next_change, asyncio.Event()
        event.set()
        if self._then is not None:
            self._then.notify()
