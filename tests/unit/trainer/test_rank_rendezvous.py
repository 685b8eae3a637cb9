"""The meeting of the trainer's ranks, and its errors."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.trainer.learner.rank_rendezvous import RankAddress, RankRendezvous, rank_place
from sluice.errors import ConfigError, DeadlineError
from tests.support.loopback import needs_ipv6

HOST = "127.0.0.1"
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "7"}
MEETING_S = 30.0


def free_port(host: str = HOST) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


def test_the_environment_gives_a_rank_its_place() -> None:
    assert rank_place(ENVIRONMENT) == RankAddress(1, 2, "node-0", 7)
    assert rank_place(ENVIRONMENT | {"MASTER_ADDR": "[::1]"}) == RankAddress(1, 2, "::1", 7)


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named_with_the_remedy(name: str, value: str | None) -> None:
    given = {n: v for n, v in ENVIRONMENT.items() if n != name}
    with pytest.raises(ConfigError, match=f"{name} is not set; start them with torchrun or"):
        rank_place(given if value is None else given | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("RANK", "first", "RANK = 'first' is not a number"),
        ("RANK", "-1", "RANK = '-1' is not a number"),
        ("RANK", "2", "RANK = 2 is not below WORLD_SIZE = 2"),
        ("MASTER_PORT", "0", r"MASTER_PORT = 0 is not in 1\.\.65535"),
        ("MASTER_PORT", "65536", r"MASTER_PORT = 65536 is not in 1\.\.65535"),
    ],
)
def test_a_place_that_cannot_be_is_named(name: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rank_place(ENVIRONMENT | {name: value})


@pytest.mark.parametrize("host", [HOST, pytest.param("::1", marks=needs_ipv6)])
def test_ranks_share_keys_once_all_are_there(host: str) -> None:
    port = free_port(host)
    other_waits = threading.Event()

    def meet(rank: int) -> RankRendezvous:
        if rank == 0:
            other_waits.wait(MEETING_S)  # its address refuses connections until then
        else:
            other_waits.set()
        return RankRendezvous(RankAddress(rank, 2, host, port), MEETING_S)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, (0, 1))
    try:
        first.store.set("key", "value")
        assert second.store.get("key") == b"value"
    finally:
        second.close()
        first.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    place = RankAddress(0, 2, HOST, free_port())
    with pytest.raises(DeadlineError, match=r"^trainer rank 1: no answer within 1 s while form"):
        RankRendezvous(place, 1.0)
    with socket.create_server((HOST, place.port)):  # and the port is free again
        pass


def test_a_rank_0_that_does_not_come_is_named_with_its_address_and_what_came_instead() -> None:
    place = RankAddress(1, 2, HOST, free_port())
    named = f"trainer rank 0 at {HOST}:{place.port}: no answer within 1 s while forming the .*"
    with pytest.raises(DeadlineError, match=named + "refused.*command_timeout_s"):
        RankRendezvous(place, 1.0)


def test_a_port_in_use_is_reported_at_once() -> None:
    with socket.create_server((HOST, 0)) as server:
        place = RankAddress(0, 2, HOST, server.getsockname()[1])
        with pytest.raises(ConfigError, match="in use"):
            RankRendezvous(place, MEETING_S)
