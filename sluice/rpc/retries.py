"""Deadlines that no caller set: who did not ask for one hears of a failure."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    HandshakeError,
    NotReadyError,
    PeerError,
    SluiceError,
)


@contextmanager
def own_deadline_is_failure() -> Iterator[None]:
    """A call of the block whose deadline is that of `sluice.rpc.policy` fails by it, which
    may be tried again; a deadline of the caller's that passed never is.

    Raises:
        PeerError: in place of a DeadlineError.
    """
    try:
        yield
    except DeadlineError as error:
        detail = f"the call's own deadline of {error.seconds:g} s passed"
        raise PeerError(error.peer, error.phase, detail) from error


_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a client bears that services come and go.

    Args:
        first_s: wait before the second try, seconds; doubled before each further one.
        most_s: longest such wait.
        patience_s: failures in a row may last so long; anything that gets on starts it anew.
            A service that answers that it is full is asked until the call's deadline, if it has
            one. 0: nothing is tried again.
        stall_s: a replica from which nothing came for so long, neither tokens nor a sign that its
            engine draws others', is left for another one.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    patience_s: float = 60.0
    stall_s: float = 60.0


def is_transient(error: SluiceError) -> bool:
    """Whether the same call may succeed later, or elsewhere.

    Credentials that do not fit, requests that break a contract and passed deadlines never do.
    """
    if isinstance(error, HandshakeError):
        return False
    return isinstance(error, PeerError | NotReadyError | ExhaustedError)


@dataclass(slots=True)
class Retries:
    """The failures in a row of one call.

    Args:
        policy: how long to bear them.
        ends_s: the call's deadline by `clock`; none: it has none.
        clock: seconds, monotonic.
    """

    policy: RetryPolicy
    ends_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    _since_s: float | None = field(default=None, init=False)
    _answered_s: float | None = field(default=None, init=False)
    _count: int = field(default=0, init=False)
    _last: SluiceError | None = field(default=None, init=False)

    def got_on(self) -> None:
        """Something came: failures count from the beginning."""
        self._since_s, self._count, self._last = None, 0, None

    def answered(self) -> None:
        """The try was taken up, though nothing came of it so far."""
        if self._answered_s is None:
            self._answered_s = self.clock()

    def stalled(self) -> None:
        """Nothing came of the try that was taken up: it counts as one that was not."""
        self._answered_s = None

    def remaining_s(self, peer: str, phase: str, whole_s: float | None) -> float | None:
        """Seconds to the deadline; none without one.

        Raises:
            DeadlineError: it has passed; tells of the failure that it passed in, if any.
        """
        if self.ends_s is None:
            return None
        remaining_s = self.ends_s - self.clock()
        if remaining_s <= 0:
            why = f"the last try ended with: {self._last}" if self._last is not None else ""
            raise DeadlineError(peer, phase, whole_s or 0.0, why) from self._last
        return remaining_s

    async def wait_after(self, error: SluiceError) -> None:
        """Waits before another try, at most until the deadline.

        Raises:
            SluiceError: `error`, if it is not worth another try or patience has ended. A deadline
                that passed before the try was taken up is told as caused by the failure before it.
        """
        now_s = self.clock()
        if self._answered_s is not None and now_s - self._answered_s >= self.policy.patience_s:
            self.got_on()  # a try that was taken up for so long is no failure in a row
        before = self._last if self._answered_s is None else None
        self._answered_s = None
        self._last = error
        if isinstance(error, DeadlineError) and before is not None:
            raise error from before  # the try that it passed in was not even taken up
        if not is_transient(error) or not self._is_borne(error, now_s):
            raise error
        wait_s = min(self.policy.first_s * 2.0**self._count, self.policy.most_s)
        self._count = min(self._count + 1, 32)
        # Clients that were thrown off together do not come back together.
        wait_s *= random.uniform(_LEAST_SHARE, 1.0)
        if self.ends_s is not None:
            wait_s = min(wait_s, max(self.ends_s - now_s, 0.0))
        await asyncio.sleep(wait_s)

    def _is_borne(self, error: SluiceError, now_s: float) -> bool:
        """A full service is there and will have room: waiting for it is what a deadline is for, and
        no part of the time that it was away."""
        waits = isinstance(error, ExhaustedError) and self.ends_s is not None
        if waits and self.policy.patience_s > 0:
            self._since_s = None
            return True
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s < self.policy.patience_s
