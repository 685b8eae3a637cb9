"""Servers of `sluice.environment.addresses` get equal shares of the episodes and no secret of the
run, since they are no part of it.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from services.reward.episodes.client import ServedEnvironments, spread_over_servers
from sluice.api.environment.v1 import environment_pb2_grpc
from tests.support.certified import ACCEPTED, mutual, service_key
from tests.support.environments import LIMIT_BYTES, episode
from tests.support.scripted_environment import ScriptedEnvironment


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["https", "plain"])
async def test_an_environment_server_gets_no_token_and_no_certificate(is_encrypted: bool) -> None:
    shown: list[Any] = []

    async def note(_call: str, _episode: str, context: Any) -> None:
        sent = [name for name, _ in context.invocation_metadata()]
        shown.append((context.peer_identities(), "authorization" in sent))

    server, key = grpc.aio.server(), service_key()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
        ScriptedEnvironment(before=note), server
    )
    address = "127.0.0.1:0"
    if is_encrypted:
        asked = grpc.ssl_server_credentials([(key.key, key.certificate)])
        address = f"https://127.0.0.1:{server.add_secure_port(address, asked)}"
    else:
        address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    own = mutual(service_key(), tokens=ACCEPTED)
    try:
        async with ServedEnvironments(
            spread_over_servers([address]),
            call_timeout_s=10.0,
            max_message_bytes=LIMIT_BYTES,
            credentials=own,
        ) as servers:
            played = episode(servers)
            await played.open()
            await played.abandon()
    finally:
        await server.stop(None)
    assert shown == [(None, False)]


def test_each_server_plays_as_many_episodes_as_another_and_groups_are_not_on_one() -> None:
    servers = spread_over_servers(["a:1", "b:1"])
    places = [[servers(f"{batch:032x}.{n}") for n in range(4)] for batch in range(1000)]
    on_first = sum(place == "a:1" for group in places for place in group)
    assert 1800 < on_first < 2200
    assert sum(len(set(group)) == 1 for group in places) < 200
    assert servers("x.0") == servers("x.0")
