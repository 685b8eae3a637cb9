"""Which replica takes the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.common.v1 import common_pb2
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client import AsyncClient, GenerateOptions, RetryPolicy, RunAddress
from sluice.client.channels import ServiceChannels
from sluice.client.fleet import ClientFleet, FleetReplica, choose_replica, look_up_replicas
from sluice.client.generation import ResumableGeneration
from sluice.errors import DeadlineError, ExhaustedError, NotReadyError, PeerError
from sluice.rpc.policy import CALL_POLICIES, CallPolicy
from sluice.rpc.status import CLASS_KEY
from tests.support.clock import Clock
from tests.support.rpc_server import serving
from tests.support.threaded_run import FleetTrainer
from tests.support.token_replica import TokenReplica, token_replicas

REPLICAS = st.lists(
    st.builds(FleetReplica, st.sampled_from("abcdef"), st.integers(1, 64), st.integers(0, 200)),
    min_size=1,
    unique_by=lambda replica: replica.address,
)


@given(REPLICAS, st.sets(st.sampled_from("abcdef")))
def test_the_chosen_one_has_the_least_load_of_those_that_need_not_be_avoided(
    replicas: list[FleetReplica], avoided: set[str]
) -> None:
    chosen = choose_replica(replicas, {}, {}, avoided)
    allowed = [r for r in replicas if r.address not in avoided] or replicas
    assert chosen in allowed
    assert chosen is not None
    assert chosen.slots_busy / chosen.slots == min(r.slots_busy / r.slots for r in allowed)


@given(st.integers(1, 8), st.integers(1, 40))
def test_even_replicas_get_even_shares_however_old_the_loads_are(num: int, requests: int) -> None:
    replicas = [FleetReplica(str(index), 4, 0) for index in range(num)]
    under_way: dict[str, int] = {}
    for _ in range(requests):
        chosen = choose_replica(replicas, under_way, {}, ())
        assert chosen is not None
        under_way[chosen.address] = under_way.get(chosen.address, 0) + 1
    shares = [under_way.get(replica.address, 0) for replica in replicas]
    assert max(shares) - min(shares) <= 1


def test_what_the_client_had_under_way_is_not_counted_twice() -> None:
    ours, others = FleetReplica("ours", 8, 4), FleetReplica("others", 8, 3)
    # All four of the first were ours and have ended since.
    assert choose_replica([ours, others], {}, {"ours": 4}, ()) == ours
    assert choose_replica([ours, others], {"ours": 4}, {"ours": 4}, ()) == others


class Lookup:
    def __init__(self, replicas: Sequence[FleetReplica]) -> None:
        self.replicas, self.looks = replicas, 0

    async def __call__(self) -> Sequence[FleetReplica]:
        self.looks += 1
        return self.replicas


async def test_a_failed_replica_comes_last_for_a_while_after_a_fresh_look_up() -> None:
    clock, lookup = Clock(), Lookup([FleetReplica("a", 8, 0), FleetReplica("b", 8, 5)])
    fleet = ClientFleet(lookup, clock)
    assert (await fleet.choose()).address == "a"
    assert (await fleet.choose()).address == "a"
    assert lookup.looks == 1
    fleet.note_failed("a")
    assert (await fleet.choose()).address == "b"
    assert lookup.looks == 2
    clock.now_s = 60.0
    assert (await fleet.choose()).address == "a"


async def test_a_fleet_without_replicas_says_so_and_is_asked_again() -> None:
    lookup = Lookup([])
    fleet = ClientFleet(lookup, Clock())
    for looks in (1, 2):
        with pytest.raises(NotReadyError, match="no replica serves"):
            await fleet.choose()
        assert lookup.looks == looks


async def test_clients_of_one_request_each_do_not_all_go_to_the_same_of_even_replicas() -> None:
    replicas = [FleetReplica(name, 8, 8) for name in "abcd"]
    chosen = {(await ClientFleet(Lookup(replicas)).choose()).address for _ in range(64)}
    assert len(chosen) > 1


class TwoReplicas(trainer_pb2_grpc.TrainerServiceServicer):
    """Both have all slots taken, and many wait at the first."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return trainer_pb2.GetStatusResponse(
            replicas=[
                trainer_pb2.ReplicaStatus(
                    replica=common_pb2.Replica(address=address, slots=8),
                    state="serving",
                    slots_busy=8,
                    queued=queued,
                )
                for address, queued in (("a:1", 4000), ("b:1", 0))
            ]
        )


async def test_samples_that_wait_at_a_replica_for_a_slot_are_part_of_its_load() -> None:
    async with serving(trainer=TwoReplicas()) as server:
        address = RunAddress(trainer=server.address)
        channels = ServiceChannels(address, "")
        try:
            for _ in range(8):
                chosen = await ClientFleet(partial(look_up_replicas, address, channels)).choose()
                assert chosen.address == "b:1"
        finally:
            await channels.close()


QUICK = RetryPolicy(first_s=0.01, max_s=0.02)


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


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALL_POLICIES, "TrainerService/GetStatus", CallPolicy(deadline_s=0.2))


@pytest.mark.usefixtures("short_calls")
async def test_a_trainer_that_is_late_with_the_fleet_is_asked_again_within_the_patience() -> None:
    trainer = FrozenTrainer(num_lost=2)
    async with token_replicas(TokenReplica()) as addresses, serving(trainer=trainer) as server:
        trainer.address = addresses[0]
        async with (
            AsyncClient(RunAddress(trainer=server.address), policy=QUICK) as client,
            asyncio.timeout(200),
        ):
            assert (await client.generate("text")).rollouts[0].num_tokens == 6
    assert trainer.num_lost < 0


@pytest.mark.usefixtures("short_calls")
async def test_a_trainer_that_stays_late_is_a_failed_peer() -> None:
    async with (
        serving(trainer=FrozenTrainer(num_lost=100)) as server,
        AsyncClient(RunAddress(trainer=server.address)) as client,
    ):
        with pytest.raises(PeerError, match=r"trainer: .*own deadline of 0\.2 s passed"):
            await client.replicas()


class FullReplica(TokenReplica):
    skip_time: Callable[[float], None] = staticmethod(lambda _: None)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        self.skip_time(25.0)  # fewer seconds than a stalled call has
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


async def test_replicas_that_are_all_full_are_asked_in_turn(
    skip_time: Callable[[float], None],
) -> None:
    replicas = [FullReplica() for _ in range(3)]
    async with token_replicas(*replicas) as addresses:
        for replica in replicas:
            replica.skip_time = skip_time
        client = Client(addresses, RetryPolicy(first_s=0.01, max_s=0.01, patience_s=600.0))
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
        while len(slow.requests) < 2:  # a slow machine may not send one in time
            with pytest.raises(DeadlineError):
                await client.generate(deadline_s=0.5)
        await client.channels.close()
    assert (len(slow.requests), len(other.requests)) == (2, 0)
    assert client.looks == 1


def test_a_failed_replica_comes_after_a_full_one() -> None:
    failed, full = FleetReplica("failed", 8, 0), FleetReplica("full", 8, 8)
    assert choose_replica([failed, full], {}, {}, {"failed"}, ["full"]) == full
