"""The priority that clients may ask for: none before training, unless the run allows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.config.schema.limits import LimitsConfig
from sluice.errors import InvalidRequestError
from sluice.rpc.metadata import CLIENT_KEY, SERVICE_KEY
from sluice.security.token_file import Role, Token

SERVICE_TOKEN, CLIENT_TOKEN = "s" * 20, "c" * 20


class Tokens:
    def tokens(self) -> tuple[Token, ...]:
        return (Token(Role.SERVICE, SERVICE_TOKEN), Token(Role.CLIENT, CLIENT_TOKEN))


class Taking(RolloutServicer):
    """Draws nothing."""

    def __init__(self, most: int, tokens: Tokens | None) -> None:
        nothing, engine = cast("Any", None), cast("Any", SimpleNamespace(max_model_len=64))
        super().__init__(
            ReplicaIdentity("r", "one"),
            *(engine, nothing, nothing),
            engine_name="torch",
            max_n=8,
            tokens=tokens,
            max_client_priority=most,
        )
        self.num_taken = 0

    async def _generate(self, *_: object) -> None:
        self.num_taken += 1


class Call:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


async def asked(
    priority: int, *metadata: tuple[str, str], most: int = 0, with_tokens: bool = False
) -> int:
    request = rollout.GenerateRequest(
        prompt=common.PromptInput(text="1"), sample_indexes=[0], priority=priority
    )
    servicer = Taking(most, Tokens() if with_tokens else None)
    await servicer.Generate(request, cast("Any", Call(*metadata)))
    return servicer.num_taken


def test_clients_wait_behind_training_unless_the_run_says_otherwise() -> None:
    assert LimitsConfig().max_client_priority == 0


@pytest.mark.parametrize("metadata", [(), ((CLIENT_KEY, "a"),)])
async def test_a_client_has_no_more_priority_than_it_may(metadata: Any) -> None:
    reported = r"priority: 1; clients may ask for 0 .*sluice\.limits\.max_client_priority"
    with pytest.raises(InvalidRequestError, match=reported):
        await asked(1, *metadata)
    assert await asked(0, *metadata) == await asked(-100, *metadata) == 1
    assert await asked(5, *metadata, most=5) == 1
    with pytest.raises(InvalidRequestError, match="may ask for 5"):
        await asked(6, *metadata, most=5)


async def test_a_service_of_the_run_has_the_priority_that_it_asks_for() -> None:
    assert await asked(100, (SERVICE_KEY, "reward")) == 1
    assert await asked(100, bearer(SERVICE_TOKEN), with_tokens=True) == 1


async def test_a_client_with_a_token_is_one_whatever_it_says() -> None:
    for metadata in ((), ((SERVICE_KEY, "reward"),)):
        with pytest.raises(InvalidRequestError, match="clients may ask for 0"):
            await asked(1, bearer(CLIENT_TOKEN), *metadata, with_tokens=True)
