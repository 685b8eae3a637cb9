"""What ends a joint call of a transfer group when our own part of it does not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from services.trainer.fleet.delivery import TransferSession
from sluice.errors import DeadlineError, PeerError, leaves
from sluice.types import ReplicaInfo

INFO = ReplicaInfo("rollout-0", "1", "host:1", 8)


class HangingSender:
    """Its part of the group's formation does not look at `stop`."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def form_group(
        self, epoch: int, names: list[str], tensors: Any, ranks: dict[str, int]
    ) -> dict[str, None]:
        return dict.fromkeys(names)

    def join(self, stop: threading.Event) -> None:
        self.released.wait(30)

    def abandon(self, reason: str) -> None:
        """Nothing was received."""


class RefusingReplica:
    async def probe(self, timeout_s: float) -> None:
        """It answers."""

    async def join(self, spec: Any) -> None:
        raise PeerError("rollout-0", "joining", "gone")

    async def abort(self, epoch: int, reason: str) -> None:
        """It has nothing."""

    async def close(self) -> None:
        """It has no connection."""


async def test_our_own_part_that_does_not_end_after_a_failure_is_an_error_that_says_so() -> None:
    sender: Any = HangingSender()
    replica: Any = RefusingReplica()
    session = TransferSession(
        sender, lambda _: replica, (), lambda: 1, timeout_s=0.05, probe_timeout_s=1.0
    )
    snapshot: Any = None
    try:
        with pytest.raises(ExceptionGroup) as caught:
            await session.deliver((INFO,), snapshot)
    finally:
        sender.released.set()
    (error,) = leaves(caught.value)
    assert isinstance(error, DeadlineError)
    assert str(error) == "trainer: no answer within 0.05 s while leaving a failed epoch"
