"""Replicas without room, and deadlines of the caller's own: neither is a failure of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from sluice.client import GenerateOptions, RetryPolicy, RunAddress
from sluice.client.channels import ServiceChannels
from sluice.client.fleet import ClientFleet, FleetReplica, choose_replica
from sluice.client.generation import ResumableGeneration
from sluice.errors import DeadlineError, ExhaustedError
from sluice.rpc.status import CLASS_KEY
from tests.support.token_replica import TokenReplica, token_replicas

QUICK = RetryPolicy(first_s=0.01, most_s=0.01, patience_s=5.0)


class FullReplica(TokenReplica):
    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        kind = ((CLASS_KEY, "ExhaustedError"),)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        await context.abort(code, "the queue is full", trailing_metadata=kind)


@dataclass
class Client:
    """Generates on replicas that come in their order, by a clock that stands still."""

    addresses: Sequence[str]
    policy: RetryPolicy = QUICK
    looks: int = 0
    channels: ServiceChannels = field(default_factory=lambda: ServiceChannels(RunAddress(), "test"))

    def __post_init__(self) -> None:
        fleet = ClientFleet(self._look_up, lambda: 0.0)
        self._generation = ResumableGeneration(fleet, self.channels, self.policy)

    async def _look_up(self) -> Sequence[FleetReplica]:
        self.looks += 1
        return [FleetReplica(each, 8, place) for place, each in enumerate(self.addresses)]

    async def generate(self, deadline_s: float | None = None) -> None:
        options = GenerateOptions(deadline_s=deadline_s)
        async for _ in self._generation.run("text", options, every_token=False):
            pass


async def test_a_full_replica_is_passed_over_by_the_request_that_it_refused_and_by_no_other() -> (
    None
):
    full, free = FullReplica(), TokenReplica()
    async with token_replicas(full, free) as addresses:
        client = Client(addresses)
        for _ in range(2):
            await client.generate()
        await client.channels.close()
    assert (len(full.requests), len(free.requests)) == (2, 2)
    assert client.looks == 1  # what was heard of the fleet holds


async def test_replicas_that_are_all_full_are_asked_in_turn() -> None:
    replicas = [FullReplica() for _ in range(3)]
    async with token_replicas(*replicas) as addresses:
        client = Client(addresses, RetryPolicy(first_s=0.01, most_s=0.01, patience_s=0.3))
        with pytest.raises(ExhaustedError):
            await client.generate()
        await client.channels.close()
    tries = [len(replica.requests) for replica in replicas]
    assert sum(tries) > 3
    assert max(tries) - min(tries) <= 1


async def test_a_passed_deadline_of_the_caller_does_not_mark_the_replica_as_failed() -> None:
    slow, other = TokenReplica(hangs_after=2), TokenReplica()
    async with token_replicas(slow, other) as addresses:
        client = Client(addresses)
        for _ in range(2):
            with pytest.raises(DeadlineError):
                await client.generate(deadline_s=0.5)
        await client.channels.close()
    assert (len(slow.requests), len(other.requests)) == (2, 0)
    assert client.looks == 1


def test_a_failed_replica_comes_after_a_full_one() -> None:
    failed, full = FleetReplica("failed", 8, 0), FleetReplica("full", 8, 8)
    assert choose_replica([failed, full], {}, {}, {"failed"}, ["full"]) == full
