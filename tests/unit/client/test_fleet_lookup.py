"""A peer that answers too late when it is asked for the replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.client import AsyncClient, RetryPolicy, RunAddress
from sluice.errors import PeerError
from sluice.rpc.policy import CALL_POLICIES, CallPolicy
from tests.support.rpc_server import serving
from tests.support.threaded_run import FleetTrainer
from tests.support.token_replica import TokenReplica, token_replicas

QUICK = RetryPolicy(first_s=0.01, most_s=0.02, patience_s=20.0)


class FrozenTrainer(FleetTrainer):
    """Answers no status call but those after `num_lost`."""

    def __init__(self, num_lost: int) -> None:
        super().__init__()
        self.num_lost = num_lost

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.num_lost -= 1
        if self.num_lost >= 0:
            await asyncio.Event().wait()
        return await super().GetStatus(request, context)


@pytest.fixture(autouse=True)
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALL_POLICIES, "TrainerService/GetStatus", CallPolicy(deadline_s=0.2))


async def test_a_trainer_that_is_late_with_the_fleet_is_asked_again_within_the_patience() -> None:
    trainer = FrozenTrainer(num_lost=2)
    async with token_replicas(TokenReplica()) as addresses, serving(trainer=trainer) as server:
        trainer.address = addresses[0]
        async with (
            AsyncClient(RunAddress(trainer=server.address), policy=QUICK) as client,
            asyncio.timeout(20),
        ):
            assert (await client.generate("text")).rollouts[0].num_tokens == 6
    assert trainer.num_lost < 0


async def test_a_trainer_that_stays_late_is_a_failed_peer() -> None:
    async with (
        serving(trainer=FrozenTrainer(num_lost=100)) as server,
        AsyncClient(RunAddress(trainer=server.address)) as client,
    ):
        with pytest.raises(PeerError, match=r"trainer: .*own deadline of 0\.2 s passed"):
            await client.replicas()
