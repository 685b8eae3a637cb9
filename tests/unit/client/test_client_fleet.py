"""Which replica takes the next request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.common.v1 import common_pb2
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client import RunAddress
from sluice.client.channels import ServiceChannels
from sluice.client.fleet import ClientFleet, FleetLookup, FleetReplica, choose_replica
from sluice.errors import NotReadyError
from tests.support.rpc_server import serving

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


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Lookup:
    def __init__(self, replicas: Sequence[FleetReplica]) -> None:
        self.replicas, self.looks = replicas, 0

    async def __call__(self) -> Sequence[FleetReplica]:
        self.looks += 1
        return self.replicas


async def test_a_failed_replica_comes_last_for_a_while_and_the_fleet_is_asked_for_anew() -> None:
    clock, lookup = Clock(), Lookup([FleetReplica("a", 8, 0), FleetReplica("b", 8, 5)])
    fleet = ClientFleet(lookup, clock)
    assert (await fleet.choose()).address == "a"
    assert (await fleet.choose()).address == "a"
    assert lookup.looks == 1
    fleet.failed("a")
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
                chosen = await ClientFleet(FleetLookup(address, channels)).choose()
                assert chosen.address == "b:1"
        finally:
            await channels.close()
