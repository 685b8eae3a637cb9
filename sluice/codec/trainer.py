"""Checks of calls to the trainer. Each function raises InvalidRequestError."""

from __future__ import annotations

from collections.abc import Collection

from sluice.algorithm.accounting import COUNTER_NAMES
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.codec.bounds import check_fields
from sluice.codec.fields import MAX_NUMBER, check_count, check_finite, check_name, check_range
from sluice.errors import ExhaustedError

MAX_HOLDERS = 64
# Each state becomes a metric, so their number is bounded.
_MAX_STATES = 16


def check_register(request: trainer.RegisterReplicaRequest) -> None:
    """Check the replica and the digest of its weights' layout."""
    check_fields(request.replica, "replica.")
    check_fields(request)


def check_heartbeat(request: trainer.HeartbeatRequest) -> None:
    """Check that counters can be added up: finite, not negative, of few states."""
    check_fields(request)
    check_count("seconds_by_state", request.seconds_by_state, _MAX_STATES)
    for state, seconds in request.seconds_by_state.items():
        check_name("seconds_by_state", state)
        check_finite(f"seconds_by_state of {state!r}", seconds)
    for field in COUNTER_NAMES:
        value = getattr(request, field)
        if isinstance(value, float):
            check_finite(field, value)
        elif isinstance(value, int):
            check_range(field, value, 0, MAX_NUMBER)


def check_watchers(num_open: int, max_watchers: int) -> None:
    """Raise ExhaustedError if no further stream may open."""
    if num_open >= max_watchers:
        raise ExhaustedError(
            f"{num_open} WatchSteps calls are open, the most that sluice.limits.max_watchers "
            "allows; end one, or watch later"
        )


def check_pause(request: trainer.PauseRequest, holders: Collection[str]) -> None:
    """Check the holder's name, their number, and the lease's length.

    Raises:
        ExhaustedError: too many others hold the run.
    """
    check_fields(request)
    if request.holder not in holders and len(holders) >= MAX_HOLDERS:
        raise ExhaustedError(
            f"holder: {len(holders)} callers hold the run, the most at once; resume one of them"
        )
