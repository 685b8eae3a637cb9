"""Deadlines that no caller set: who did not ask for one hears of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice.errors import DeadlineError, PeerError


@contextmanager
def own_deadline_is_failure() -> Iterator[None]:
    """A call of the block whose deadline is that of `sluice.rpc.call_policy` fails by it, which
    may be tried again; a deadline of the caller's that passed never is.

    Raises:
        PeerError: in place of a DeadlineError.
    """
    try:
        yield
    except DeadlineError as error:
        detail = f"the call's own deadline of {error.seconds:g} s passed"
        raise PeerError(error.peer, error.phase, detail) from error
