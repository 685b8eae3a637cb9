"""Callers that a real server accepts, and the errors that the others get."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sluice.api.launch.v1 import launch_pb2_grpc
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.api.weights.v1 import weights_pb2_grpc
from sluice.errors import AccessDeniedError, HandshakeError
from sluice.rpc.auth import CLIENT_METHODS
from sluice.rpc.client import open_channel, reward_stub, unary_call
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.server import RpcServer
from sluice.security.token_file import Role, Token
from tests.support.certified import (
    ACCEPTED,
    CLIENT_TOKEN,
    SERVICE_TOKEN,
    authority,
    bearing,
    client_key,
    mutual,
    service_key,
)
from tests.support.rpc_server import LIMIT_BYTES, REWARD

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

STUBS = (
    rollout_pb2_grpc.RolloutServiceStub,
    weights_pb2_grpc.WeightSyncServiceStub,
    reward_pb2_grpc.RewardServiceStub,
    trainer_pb2_grpc.TrainerServiceStub,
    launch_pb2_grpc.LaunchServiceStub,
)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
TOKENS_ONLY = Credentials(tokens=ACCEPTED)


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Answers one call of each kind; the others fail inside."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return reward_pb2.GetStatusResponse(prompts_submitted=7)

    async def SubmitPrompts(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            receipt = reward_pb2.PromptReceipt(prompt_id=request.prompt_id)
            yield reward_pb2.SubmitPromptsResponse(receipt=receipt)


class WritingReward(Reward):
    """The same, writing its answers as ours do."""

    async def SubmitPrompts(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async for request in requests:
            receipt = reward_pb2.PromptReceipt(prompt_id=request.prompt_id)
            await context.write(reward_pb2.SubmitPromptsResponse(receipt=receipt))


class Serving:
    """A server of all four services for the length of a block."""

    def __init__(
        self, credentials: Credentials, health_port: int = 0, reward: Reward | None = None
    ) -> None:
        reward = reward or Reward()
        self.server = RpcServer(
            [
                lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(
                    rollout_pb2_grpc.RolloutServiceServicer(), s
                ),
                lambda s: weights_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                    weights_pb2_grpc.WeightSyncServiceServicer(), s
                ),
                lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, s),
                lambda s: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
                    trainer_pb2_grpc.TrainerServiceServicer(), s
                ),
            ],
            [REWARD],
            host="127.0.0.1",
            port=0,
            max_message_bytes=LIMIT_BYTES,
            credentials=credentials,
            health_port=health_port,
        )

    async def __aenter__(self) -> str:
        await self.server.start()
        return self.server.address

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)


def channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    return open_channel(address, max_message_bytes=LIMIT_BYTES, credentials=credentials)


async def status(address: str, credentials: Credentials) -> int:
    """Calls `GetStatus` as every process of ours calls its peers."""
    async with channel(address, credentials) as opened:
        answer = await unary_call(
            reward_stub(opened).GetStatus,
            reward_pb2.GetStatusRequest(),
            peer="reward service",
            phase="asking for its status",
        )
    return int(answer.prompts_submitted)


async def codes(address: str, credentials: Credentials) -> dict[str, grpc.StatusCode]:
    """How each method of the four services ends; those that our servicer has end well."""
    async with channel(address, credentials) as opened:
        recorder = Recorder(opened)
        for stub in STUBS:
            stub(recorder)
        return {path: await ending(method) for path, method in recorder.methods.items()}


class Recorder:
    """Stands for a channel and keeps each method that a stub asks for, without serializers."""

    def __init__(self, opened: grpc.aio.Channel) -> None:
        self.methods: dict[str, Any] = {}
        self._opened = opened

    def __getattr__(self, kind: str) -> Any:
        def method(path: str, **_: Any) -> None:
            self.methods[path] = (kind, getattr(self._opened, kind)(path))

        return method


async def ending(method: tuple[str, Any]) -> grpc.StatusCode:
    kind, call = method
    # A message that is sent while a refusal comes back would end the call with INTERNAL.
    given = iter(()) if kind.startswith("stream") else b""
    try:
        answer = call(given, timeout=60)
        if kind.endswith("stream"):
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("caller", "refusal"),
    [
        (OPEN, UNAUTHENTICATED),
        (Credentials(tokens=bearing("an-unknown-token-0123")), UNAUTHENTICATED),
        (Credentials(tokens=bearing(SERVICE_TOKEN[:-1])), UNAUTHENTICATED),
        (Credentials(tokens=bearing(CLIENT_TOKEN)), DENIED),
    ],
    ids=["no token", "unknown token", "part of a token", "client's token"],
)
async def test_every_method_is_refused_without_a_token_that_allows_it(
    caller: Credentials, refusal: grpc.StatusCode
) -> None:
    async with Serving(TOKENS_ONLY) as address:
        found = await codes(address, caller)
    assert len(found) == 30
    refused = {path for path, code in found.items() if code is refusal}
    allowed = set(CLIENT_METHODS) if refusal is DENIED else set()
    assert refused == set(found) - allowed
    assert not {found[path] for path in allowed} & {UNAUTHENTICATED, DENIED}


async def test_a_services_token_opens_every_method() -> None:
    async with Serving(TOKENS_ONLY) as address:
        found = await codes(address, Credentials(tokens=bearing(SERVICE_TOKEN)))
    assert not {UNAUTHENTICATED, DENIED} & set(found.values())
    assert grpc.StatusCode.OK in found.values()


async def test_every_method_that_clients_may_call_exists() -> None:
    async with channel("127.0.0.1:1", OPEN) as opened:
        recorder = Recorder(opened)
        for stub in STUBS:
            stub(recorder)
    assert set(recorder.methods) >= CLIENT_METHODS


async def test_a_method_that_does_not_exist_is_refused_like_one_that_does() -> None:
    async with Serving(TOKENS_ONLY) as address, channel(address, OPEN) as opened:
        for path in ("/sluice.api.reward.v1.RewardService/NoSuch", "/no.such.Service/Method"):
            assert await ending(("unary_unary", opened.unary_unary(path))) is UNAUTHENTICATED


@pytest.mark.parametrize("caller", [OPEN, Credentials(tokens=bearing("an-unknown-token-0123"))])
async def test_health_answers_without_a_token_and_reflection_does_not(caller: Credentials) -> None:
    async with Serving(TOKENS_ONLY) as address, channel(address, caller) as opened:
        request = health_pb2.HealthCheckRequest(service=REWARD)
        answer = await health_pb2_grpc.HealthStub(opened).Check(request, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(opened)
        assert refused.value.code() is UNAUTHENTICATED
    async with Serving(TOKENS_ONLY) as address, channel(address, TOKENS_ONLY) as opened:
        assert REWARD in await reflected(opened)


async def reflected(opened: grpc.aio.Channel) -> set[str]:
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    stub = reflection_pb2_grpc.ServerReflectionStub(opened)
    answers = [answer async for answer in stub.ServerReflectionInfo(requests, timeout=60)]
    return {service.name for a in answers for service in a.list_services_response.service}


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "mtls"])
async def test_a_stream_both_ways_bears_the_token(encrypted: bool) -> None:
    both = mutual(service_key(), tokens=ACCEPTED) if encrypted else TOKENS_ONLY
    prompts = [reward_pb2.SubmitPromptsRequest(prompt_id=name) for name in "abc"]
    async with Serving(both) as address, channel(address, both) as opened:
        call = reward_stub(opened).SubmitPrompts(iter(prompts), timeout=60)
        assert [answer.receipt.prompt_id async for answer in call] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("tokens", "reported"),
    [
        (None, "no bearer token came; set sluice.security.token_file, or SLUICE_TOKEN"),
        (bearing("an-unknown-token-0123"), "the bearer token is unknown; set sluice.security"),
    ],
)
async def test_a_caller_without_a_valid_token_reads_what_to_set(tokens: Any, reported: str) -> None:
    async with Serving(mutual(service_key(), tokens=ACCEPTED)) as address:
        with pytest.raises(AccessDeniedError, match=f"^reward service: refused while .*{reported}"):
            await status(address, mutual(service_key(), tokens=tokens))


async def test_a_refusal_of_a_role_names_the_method_and_the_role_that_may() -> None:
    caller = Credentials(tokens=bearing(CLIENT_TOKEN))
    async with Serving(TOKENS_ONLY) as address, channel(address, caller) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reward_stub(opened).TakeBatch(reward_pb2.TakeBatchRequest(), timeout=60)
    assert refused.value.code() is DENIED
    assert refused.value.details() == (
        "a token of the role client may not call /sluice.api.reward.v1.RewardService/TakeBatch; "
        "use one of the role service"
    )


@pytest.mark.parametrize("caller", [service_key(), client_key()], ids=["service", "client"])
async def test_mtls_lets_in_who_has_a_certificate_of_the_same_authority(caller: Any) -> None:
    async with Serving(mutual(service_key())) as address:
        assert await status(address, mutual(caller)) == 7


@pytest.mark.parametrize(
    ("caller", "reported"),
    [
        (mutual(None), "ended the connection at once.* certificate that is missing"),
        (mutual(client_key("theirs")), "ended the connection at once.* of another CA"),
        (mutual(client_key(days=-1)), "ended the connection at once.* expired"),
        (OPEN, "ended the connection at once.*servers with TLS do when the caller has none"),
        (mutual(client_key(), trusts="theirs"), "not one that we trust; check .*ca_file here"),
        (mutual(client_key(), server_name="other"), "does not name the address .*server_name"),
    ],
    ids=["none", "another CA's", "expired", "no TLS", "distrusted server", "wrong name"],
)
async def test_mtls_refuses_and_says_where_to_look(caller: Credentials, reported: str) -> None:
    async with Serving(mutual(service_key(), tokens=ACCEPTED)) as address:
        with pytest.raises(HandshakeError, match=f"UNAVAILABLE|{reported}") as refused:
            await status(address, replace(caller, tokens=ACCEPTED))
    assert refused.match(reported)


async def test_a_caller_with_tls_reads_that_the_server_has_none() -> None:
    async with Serving(OPEN) as address:
        with pytest.raises(HandshakeError, match=r"it speaks no TLS; set sluice\.security\.tls"):
            await status(address, mutual(client_key()))


async def test_a_clients_certificate_serves_nobody() -> None:
    async with Serving(mutual(client_key())) as address:
        with pytest.raises(HandshakeError, match="not one that we trust"):
            await status(address, mutual(client_key(), server_name="sluice"))


async def test_a_server_name_stands_for_every_address() -> None:
    named = service_key(hosts=("sluice",))
    async with Serving(mutual(named)) as address:
        assert await status(address, mutual(client_key(), server_name="sluice")) == 7
        with pytest.raises(HandshakeError, match="does not name the address"):
            await status(address, mutual(client_key()))


async def test_tls_of_the_server_alone_asks_for_no_certificate() -> None:
    pair = service_key()
    server = Credentials(None, pair.certificate, pair.key, is_encrypted=True, tokens=ACCEPTED)
    caller = Credentials(authority("ours").ca.certificate, is_encrypted=True, tokens=ACCEPTED)
    async with Serving(server) as address:
        assert await status(address, caller) == 7
        with pytest.raises(AccessDeniedError, match="no bearer token came"):
            await status(address, replace(caller, tokens=None))


async def test_a_port_for_probes_answers_health_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    secured = Serving(mutual(service_key(), tokens=ACCEPTED), health_port=port)
    async with secured, channel(f"127.0.0.1:{port}", OPEN) as opened:
        request = health_pb2.HealthCheckRequest(service=REWARD)
        stub = health_pb2_grpc.HealthStub(opened)
        assert (await stub.Check(request, timeout=60)).status == 1
        await secured.server.set_serving(serving=False)
        assert (await stub.Check(request, timeout=60)).status == 2
        found = await codes(f"127.0.0.1:{port}", TOKENS_ONLY)
        assert set(found.values()) == {grpc.StatusCode.UNIMPLEMENTED}


class Changing:
    """Tokens that a test exchanges."""

    def __init__(self, *secrets: str) -> None:
        self.secrets = secrets

    def tokens(self) -> tuple[Token, ...]:
        return tuple(Token(Role.SERVICE, secret) for secret in self.secrets)


async def test_a_token_is_replaced_without_a_refused_call_or_a_restart() -> None:
    old, new = "the-old-token-0123456", "the-new-token-0123456"
    server, caller = Changing(old), Changing(old)
    both = (Credentials(tokens=server), Credentials(tokens=caller))
    async with Serving(both[0]) as address, channel(address, both[1]) as opened:
        stub = reward_stub(opened)
        steps = [(server, (old, new)), (caller, (old, new)), (caller, (new, old)), (server, (new,))]
        for side, secrets in steps:
            side.secrets = secrets
            await stub.GetStatus(reward_pb2.GetStatusRequest(), timeout=60)
        caller.secrets = (old,)
        with pytest.raises(grpc.aio.AioRpcError, match="unknown"):
            await stub.GetStatus(reward_pb2.GetStatusRequest(), timeout=60)


async def one_by_one(prompts: asyncio.Queue[str]) -> AsyncIterator[Any]:
    while True:
        yield reward_pb2.SubmitPromptsRequest(prompt_id=await prompts.get())


@pytest.mark.parametrize("served", [Reward, WritingReward])
async def test_a_token_that_is_taken_out_ends_open_streams_at_their_next_message(
    served: type[Reward],
) -> None:
    old, new = "the-old-token-0123456", "the-new-token-0123456"
    server, prompts = Changing(old), asyncio.Queue[str]()
    caller = Credentials(tokens=bearing(old))
    tokens = Credentials(tokens=server)
    async with Serving(tokens, reward=served()) as address, channel(address, caller) as opened:
        call = reward_stub(opened).SubmitPrompts(one_by_one(prompts), timeout=30)
        prompts.put_nowait("a")
        assert (await anext(aiter(call))).receipt.prompt_id == "a"
        server.secrets = (new, old)
        prompts.put_nowait("b")
        assert (await anext(aiter(call))).receipt.prompt_id == "b"
        server.secrets = (new,)
        prompts.put_nowait("c")
        with pytest.raises(grpc.aio.AioRpcError, match="was taken out; call again") as refused:
            await anext(aiter(call))
        assert refused.value.code() is UNAUTHENTICATED


async def test_a_token_that_is_taken_out_ends_what_is_only_listened_to() -> None:
    server = Changing("the-old-token-0123456")
    listener = Credentials(tokens=bearing("the-old-token-0123456"))
    serving = Serving(Credentials(tokens=server))
    async with serving as address, channel(address, listener) as opened:
        request = health_pb2.HealthCheckRequest(service=REWARD)
        call = health_pb2_grpc.HealthStub(opened).Watch(request, timeout=30)
        assert (await anext(aiter(call))).status == health_pb2.HealthCheckResponse.SERVING
        server.secrets = ("the-new-token-0123456",)
        await serving.server.set_serving(serving=False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(call))
        assert refused.value.code() is UNAUTHENTICATED
