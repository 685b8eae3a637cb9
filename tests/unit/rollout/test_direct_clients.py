"""Whose tokens are entered apart: of all callers that are no service of the run."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.rollout.engines.protocol import EngineLoad, GenerationRequest
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.codec.fields import token_ids_to_bytes
from sluice.rpc.metadata import CLIENT_KEY, SERVICE_KEY
from sluice.security.token_file import Role, Token
from tests.support.causal_lms import request as generation_request

SERVICE_TOKEN, CLIENT_TOKEN = "s" * 20, "c" * 20
REWARD = (SERVICE_KEY, "reward")


class Tokens:
    def tokens(self) -> tuple[Token, ...]:
        return (Token(Role.SERVICE, SERVICE_TOKEN), Token(Role.CLIENT, CLIENT_TOKEN))


class Engine:
    vocab_size = 100
    max_model_len = 64

    def load(self) -> EngineLoad:
        return EngineLoad(slots=8, version=1, weight_digest="digest")


class Noting:
    """A generation that draws nothing."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def run(self, request: GenerationRequest, *_: object) -> None:
        self.asked.append(request)


class Call:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"

    async def write(self, _message: object) -> None:
        return


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


async def is_direct(*metadata: tuple[str, str], tokens: Tokens | None = None) -> bool:
    generation, nothing = Noting(), cast("Any", None)
    servicer = RolloutServicer(
        ReplicaIdentity("r", "one"),
        cast("Any", Engine()),
        nothing,
        cast("Any", generation),
        engine_name="torch",
        max_n=8,
        tokens=tokens,
    )
    ids = token_ids_to_bytes(generation_request().prompt_token_ids)
    prompt = common.PromptInput(tokens=common.TokenPrompt(token_ids_u32=ids))
    asked = rollout.GenerateRequest(prompt=prompt, sample_indexes=[0])
    await servicer.Generate(asked, cast("Any", Call(*metadata)))
    (sampled,) = generation.asked
    return sampled.for_direct_client


async def test_tokens_of_the_runs_own_services_are_not_entered_apart() -> None:
    assert not await is_direct(REWARD)
    assert not await is_direct(REWARD, bearer(SERVICE_TOKEN), tokens=Tokens())


@pytest.mark.parametrize(
    "metadata",
    [(), ((CLIENT_KEY, "sdk"),), ((CLIENT_KEY, "sdk"), REWARD)],
)
async def test_tokens_of_callers_that_are_no_service_are_entered_apart(metadata: Any) -> None:
    assert await is_direct(*metadata)
    assert await is_direct(*metadata, bearer(SERVICE_TOKEN), tokens=Tokens())


async def test_a_clients_token_makes_a_direct_client_whatever_it_says() -> None:
    assert await is_direct(REWARD, bearer(CLIENT_TOKEN), tokens=Tokens())
