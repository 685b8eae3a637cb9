"""Checks of calls to the trainer. Each function raises InvalidRequestError."""

from __future__ import annotations

from collections.abc import Collection

from sluice.algorithm.accounting import COUNTER_NAMES
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.codec.fields import (
    MAX_NUMBER,
    check_count,
    check_finite,
    check_name,
    check_range,
    check_text,
)
from sluice.codec.messages import check_replica
from sluice.errors import ExhaustedError, InvalidRequestError

MAX_HOLDERS = 64
MAX_LEASE_S = 7 * 24 * 3600.0
MAX_REASON_BYTES = 2000
# Each state becomes a metric, so their number is bounded.
_MAX_STATES = 16


def check_register(request: trainer.RegisterReplicaRequest) -> None:
    """Check the replica and the digest of its weights' layout."""
    check_replica(request.replica, "replica")
    check_name("weights_layout_digest", request.weights_layout_digest)


def check_heartbeat(request: trainer.HeartbeatRequest) -> None:
    """Check that counters can be added up: finite, not negative, of few states."""
    check_name("name", request.name)
    check_name("instance_id", request.instance_id)
    check_count("seconds_by_state", request.seconds_by_state, _MAX_STATES)
    for state, seconds in request.seconds_by_state.items():
        check_name("seconds_by_state", state)
        check_finite(f"seconds_by_state of {state!r}", seconds)
    if request.HasField("policy_version"):
        check_range("policy_version", request.policy_version, 0, MAX_NUMBER)
    for field in COUNTER_NAMES:
        value = getattr(request, field)
        if isinstance(value, float):
            check_finite(field, value)
        elif isinstance(value, int):
            check_range(field, value, 0, MAX_NUMBER)


def check_watch(request: trainer.WatchStepsRequest) -> None:
    """Check the first step."""
    check_range("from_step", request.from_step, 0, MAX_NUMBER)


def check_watchers(num_open: int, most: int) -> None:
    """Raise ExhaustedError if no further stream may open."""
    if num_open >= most:
        raise ExhaustedError(
            f"{num_open} WatchSteps calls are open, the most that sluice.limits.max_watchers "
            "allows; end one, or watch later"
        )


def check_pause(request: trainer.PauseRequest, holders: Collection[str]) -> None:
    """Check the holder's name, their number, and the lease's length.

    Raises:
        ExhaustedError: too many others hold the run.
    """
    check_name("holder", request.holder, may_be_empty=True)
    if request.HasField("lease_seconds"):
        lease_s = request.lease_seconds
        if not 0.0 < lease_s <= MAX_LEASE_S:
            raise InvalidRequestError(
                f"lease_seconds: {lease_s} is not above 0 and at most {MAX_LEASE_S:.0f}; leave it "
                "out to pause until Resume"
            )
    if request.holder not in holders and len(holders) >= MAX_HOLDERS:
        raise ExhaustedError(
            f"holder: {len(holders)} callers hold the run, the most at once; resume one of them"
        )


def check_resume(request: trainer.ResumeRequest) -> None:
    """Check the holder's name."""
    check_name("holder", request.holder, may_be_empty=True)


def check_stop(request: trainer.StopRequest) -> None:
    """Check that the reason fits a log line."""
    check_text("reason", request.reason, MAX_REASON_BYTES)
