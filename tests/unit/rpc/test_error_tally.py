"""Calls that end with an error are counted on both sides, by method and code."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.errors import NotReadyError, PeerError
from sluice.rpc.client import reward_stub, unary_call
from sluice.rpc.status import RPC_ERRORS, short_method
from tests.support.rpc_server import connected

NAME = "RewardService/GetStatus"


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Fails as it is told to."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors

    async def GetStatus(self, request: Any, context: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return reward_pb2.GetStatusResponse()


async def counted(*errors: Exception) -> dict[tuple[str, ...], int]:
    """What the tally has more than before, after a call that meets these errors."""
    before = Counter(RPC_ERRORS.counts())
    async with connected(reward=Reward(list(errors))) as channel:
        with suppress(PeerError):
            await unary_call(
                reward_stub(channel).GetStatus,
                reward_pb2.GetStatusRequest(),
                name=NAME,
                peer="reward",
                phase="asking",
            )
    return dict(Counter(RPC_ERRORS.counts()) - before)


async def test_a_call_that_ends_well_is_not_counted() -> None:
    assert await counted() == {}


async def test_every_attempt_that_fails_is_counted_where_it_was_answered_and_where_it_was_met() -> (
    None
):
    found = await counted(NotReadyError("not yet"))
    assert found == {("server", NAME, "UNAVAILABLE"): 1, ("client", NAME, "UNAVAILABLE"): 1}


async def test_a_defect_is_counted_as_internal() -> None:
    found = await counted(ValueError("a defect"))
    assert found == {("server", NAME, "INTERNAL"): 1, ("client", NAME, "INTERNAL"): 1}


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/sluice.api.reward.v1.RewardService/Score", "RewardService/Score"),
        ("/Plain/Call", "Plain/Call"),
    ],
)
def test_methods_are_named_as_in_the_table_of_calls(path: str, short: str) -> None:
    assert short_method(path) == short
