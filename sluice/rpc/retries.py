"""The only way to retry a call: which failures to wait out, for how long, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sluice.concurrency.waits import Wait, advance, waiting_for
from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    HandshakeError,
    NotReadyError,
    PeerDefectError,
    PeerError,
    SluiceError,
)

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")
Progress = Callable[[], Awaitable[object]]
"""Returns a value that changes with the peer's progress; None if the peer does not answer."""

_MIN_JITTER = 0.5
_MAX_DOUBLINGS = 32


@contextmanager
def own_deadline_is_failure() -> Iterator[None]:
    """Turn a missed deadline of `sluice.rpc.policy` in the block into a failure of the peer.

    Such a call may be retried; a call whose caller set the deadline may not.

    Raises:
        PeerError: in place of a DeadlineError.
    """
    try:
        yield
    except DeadlineError as error:
        detail = f"the call's own deadline of {error.seconds:g} s passed"
        raise PeerError(error.peer, error.phase, detail) from error


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a client waits for services that are away.

    Args:
        first_s: pause before the second try, seconds. It doubles before each further try.
        max_s: longest such pause.
        patience_s: how long failures in a row may last. Any progress starts the count again. A call
            with a deadline is sent to a full service until the deadline, for any patience. 0:
            nothing is retried.
        stall_s: seconds without tokens, and without a sign that the engine generates for others,
            after which another replica continues.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    patience_s: float = 60.0
    stall_s: float = 60.0

    def pause_s(self, num_pauses: int) -> float:
        """Return the pause after `num_pauses` earlier ones in a row, seconds, with jitter."""
        longest_s = min(self.first_s * 2.0 ** min(num_pauses, _MAX_DOUBLINGS), self.max_s)
        # Jitter: clients that lost a service together, or found it full, must not return together.
        return longest_s * random.uniform(_MIN_JITTER, 1.0)


def is_transient(error: SluiceError) -> bool:
    """Return whether the same call may succeed later, or elsewhere.

    Wrong credentials, requests that break a contract and passed deadlines never do.
    """
    if isinstance(error, HandshakeError):
        return False
    return isinstance(error, PeerError | NotReadyError | ExhaustedError)


def is_absence(error: SluiceError) -> bool:
    """Return whether a service of the run may be away: starting, restarting or overloaded.

    A HandshakeError counts: a service that restarts may break a connection in its handshake.
    """
    return isinstance(error, PeerError | DeadlineError)


def _now_s() -> float:
    return time.monotonic()


@dataclass(slots=True)
class Retries:
    """Counts consecutive failures of a call.

    Args:
        policy: how long to wait them out.
        peer: the called service, for errors and logs.
        phase: the purpose of the call, for errors.
        deadline_s: seconds from now for all tries together; None: no deadline.
        retries_on: returns whether to retry after an error.
        max_failures: tries that may fail in all; None: any number.
        max_defects: answers in a row that the peer is broken, after which the call fails, since
            the peer does not recover without help; None: any number.
        warns_after_s: length of an absence after which it is logged, once, and so is its end;
            None: nothing is logged.
        clock: seconds, monotonic.
    """

    policy: RetryPolicy
    peer: str = ""
    phase: str = ""
    deadline_s: float | None = None
    retries_on: Callable[[SluiceError], bool] = is_transient
    max_failures: int | None = None
    max_defects: int | None = None
    warns_after_s: float | None = None
    clock: Callable[[], float] = _now_s
    _ends_s: float | None = field(default=None, init=False)
    _since_s: float | None = field(default=None, init=False)
    _accepted_s: float | None = field(default=None, init=False)
    _num_pauses: int = field(default=0, init=False)
    _num_failures: int = field(default=0, init=False)
    _num_defects: int = field(default=0, init=False)
    _last: SluiceError | None = field(default=None, init=False)
    _seen: object = field(default=None, init=False)
    _wait: Wait | None = field(default=None, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.deadline_s is not None:
            self._ends_s = self.clock() + self.deadline_s

    async def call(
        self, make: Callable[[], Awaitable[AnswerT]], progress: Progress | None = None
    ) -> AnswerT:
        """Return the answer of the first call that succeeds.

        Args:
            make: makes the call; it must be idempotent.
            progress: see `wait_after`.

        Raises:
            SluiceError: as in `wait_after`.
        """
        try:
            while True:
                began_s = self.clock()
                try:
                    answer = await make()
                except SluiceError as error:
                    await self.wait_after(error, progress, began_s)
                else:
                    self._end_absence(is_back=True)
                    return answer
        finally:
            self._end_absence(is_back=False)

    def note_progress(self) -> None:
        """Note progress: restart the count of failures."""
        self._since_s = None
        self._num_pauses = 0
        self._last = None
        self._end_absence(is_back=True)

    def note_accepted(self) -> None:
        """Note that a peer accepted the try, which has no result yet."""
        if self._accepted_s is None:
            self._accepted_s = self.clock()

    def note_stall(self) -> None:
        """Note that the accepted try had no result, so it counts as not accepted."""
        self._accepted_s = None

    def remaining_s(self) -> float | None:
        """Return the seconds to the deadline; None without one.

        Raises:
            DeadlineError: it has passed. The error names the last failure, if there was one.
        """
        if self._ends_s is None:
            return None
        remaining_s = self._ends_s - self.clock()
        if remaining_s <= 0:
            why = f"the last try ended with: {self._last}" if self._last is not None else ""
            raise DeadlineError(self.peer, self.phase, self.deadline_s or 0.0, why) from self._last
        return remaining_s

    async def wait_after(
        self,
        error: SluiceError,
        progress: Progress | None = None,
        began_s: float | None = None,
    ) -> None:
        """Pause before another try, at most until the deadline.

        Args:
            error: the error of the last try.
            progress: called before the next try, which waits until the peer answers. A new value
                restarts the patience, which otherwise also covers the tries themselves.
            began_s: when the last try began. Its duration counts as pause, so that a call that
                used up its own deadline is repeated at once.

        Raises:
            SluiceError: `error`, if it is not worth another try or patience has ended. A caller's
                deadline that passed before the try was accepted is raised from the failure before.
            DeadlineError: with `progress`, instead of `error` where patience has ended.
        """
        now_s = self.clock()
        if self._accepted_s is not None and now_s - self._accepted_s >= self.policy.patience_s:
            self.note_progress()  # a try that ran for so long is no failure in a row
        before = self._last if self._accepted_s is None else None
        self._accepted_s = None
        self._last = error
        if not self._is_worth_another_try(error):
            if isinstance(error, DeadlineError) and before is not None:
                raise error from before  # no peer even accepted the try that it passed in
            raise error
        await self._pause(error, 0.0 if began_s is None else now_s - began_s, progress)
        while progress is not None:
            present = await progress()
            if present is not None:
                self._take_progress(present)
                return
            await self._pause(error, 0.0, progress)

    def _is_worth_another_try(self, error: SluiceError) -> bool:
        self._num_failures += 1
        self._num_defects = self._num_defects + 1 if isinstance(error, PeerDefectError) else 0
        has_failed_too_often = self._num_failures == self.max_failures
        is_broken = self._num_defects == self.max_defects
        return self.retries_on(error) and not has_failed_too_often and not is_broken

    def _take_progress(self, present: object) -> None:
        if present != self._seen:
            self.note_progress()
            self._seen = present
            self._since_s = self.clock()  # patience runs from here, not from the next failure
            advance()

    async def _pause(self, error: SluiceError, elapsed_s: float, progress: Progress | None) -> None:
        now_s = self.clock()
        if self._ends_s is not None and now_s >= self._ends_s:
            self.remaining_s()
        if not self._has_patience(error, now_s):
            if progress is None:
                raise error
            raise DeadlineError(
                self.peer, self.phase, self.policy.patience_s, str(error)
            ) from error
        self._note_absence(error, now_s)
        pause_s = max(self.policy.pause_s(self._num_pauses) - elapsed_s, 0.0)
        self._num_pauses += 1
        if self._ends_s is not None:
            pause_s = min(pause_s, self._ends_s - now_s)
        await asyncio.sleep(pause_s)

    def _has_patience(self, error: SluiceError, now_s: float) -> bool:
        # A full service is there and will have capacity. Waiting for it is what the deadline is
        # for, and does not count as absence.
        is_full = isinstance(error, ExhaustedError) and self._ends_s is not None
        if is_full and self.policy.patience_s > 0:
            self._since_s = None
            return True
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s < self.policy.patience_s

    def _note_absence(self, error: SluiceError, now_s: float) -> None:
        if self.warns_after_s is None:
            return
        self._wait = self._wait or waiting_for(self.peer, "coming back into reach")
        away_s = 0.0 if self._since_s is None else now_s - self._since_s
        if away_s >= self.warns_after_s and not self._has_warned:
            self._has_warned = True
            duration = f" for {self.warns_after_s:g} s" if self.warns_after_s else ""
            logger.warning("%s out of reach%s, trying again: %s", self.peer, duration, error)

    def _end_absence(self, *, is_back: bool) -> None:
        if self._wait is not None:
            self._wait.end()
        if self._has_warned and is_back:
            logger.info("%s is back", self.peer)
        self._wait = None
        self._has_warned = False
