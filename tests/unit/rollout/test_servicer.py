"""Calls of the rollout service, over engines that compute nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from services.rollout.engines.protocol import EngineLoad, GenerationRequest
from services.rollout.generation import GenerationEvent, GenerationRunner
from services.rollout.servicer import (
    ImageRules,
    ReplicaIdentity,
    RolloutServicer,
    WeightSyncServicer,
)
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.fields import token_ids_to_bytes
from sluice.config.schema.service import LimitsConfig
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.rpc.auth import ClientQuota
from sluice.rpc.metadata import CLIENT_KEY, SERVICE_KEY
from sluice.security.token_file import Role, Token
from sluice.types import ChatMessage, Rollout, TokenIds
from sluice.vision.image_limits import ImageLimits
from tests.support.causal_lms import request as generation_request
from tests.support.image_files import png
from tests.support.tiny_policy import make_batch, routed

NOTHING: Any = None
LOAD = EngineLoad(
    slots=8,
    slots_busy=3,
    queued=2,
    generated_tokens=40,
    unsent_tokens=2,
    running_tokens=7,
    busy_seconds=1.0,
    seconds_by_state={"generating": 1.0},
    version=7,
    weight_digest="digest",
    direct_sent_tokens=11,
    direct_unsent_tokens=1,
)


class HungEngine:
    """Knows its last counters; its loop does not answer."""

    def __init__(self) -> None:
        self.last = LOAD

    def load(self) -> EngineLoad:
        return self.last

    async def check_alive(self) -> EngineLoad:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def engine() -> Any:
    return HungEngine()


def status_of(engine: Any, *, without_engine: bool) -> Any:
    servicer = RolloutServicer(
        ReplicaIdentity("rollout-0", "instance-0"),
        engine,
        NOTHING,
        NOTHING,
        engine_name="torch",
        max_n=8,
    )
    request = rollout_pb2.GetStatusRequest(without_engine=without_engine)
    return servicer.GetStatus(request, NOTHING)


async def test_a_replica_whose_engine_hangs_still_says_what_it_knows(engine: Any) -> None:
    status = await status_of(engine, without_engine=True)
    assert (status.name, status.slots_busy, status.queued) == ("rollout-0", 3, 2)
    assert (status.generated_tokens, status.unsent_tokens, status.running_tokens) == (40, 2, 7)
    assert (status.direct_sent_tokens, status.direct_unsent_tokens) == (11, 1)


async def test_a_liveness_check_of_a_hung_engine_gets_no_answer(engine: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await status_of(engine, without_engine=False)


async def test_a_replica_without_weights_waits_for_the_trainer(engine: Any) -> None:
    assert not await named_waits(engine, "trainer")
    engine.last = replace(LOAD, version=None)
    assert await named_waits(engine, "trainer") == ["sending the first weights"]


async def named_waits(engine: Any, peer: str) -> list[str]:
    status = await status_of(engine, without_engine=True)
    return [wait.phase for wait in status.wait_report.waits if wait.peer == peer]


SERVICE_TOKEN, CLIENT_TOKEN = "s" * 20, "c" * 20
REWARD = (SERVICE_KEY, "reward")


class Tokens:
    def tokens(self) -> tuple[Token, ...]:
        return (Token(Role.SERVICE, SERVICE_TOKEN), Token(Role.CLIENT, CLIENT_TOKEN))


class IdleEngine:
    vocab_size = 100
    max_model_len = 64

    def load(self) -> EngineLoad:
        return EngineLoad(slots=8, version=1, weight_digest="digest")


class Noting:
    """A generation that samples nothing."""

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
        cast("Any", IdleEngine()),
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


class Sending:
    """A generation of these samples, all in one event."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._event = GenerationEvent((), tuple(rollouts))
        self.asked: list[GenerationRequest] = []

    async def run(self, request: GenerationRequest, *arguments: Any) -> None:
        self.asked.append(request)
        await arguments[-1](self._event)


class Keeping(Call):
    """A call that keeps what is written."""

    def __init__(self) -> None:
        super().__init__(REWARD)
        self.written: list[rollout.GenerateResponse] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)


async def test_each_sample_with_experts_is_a_message_of_its_own() -> None:
    group = routed(make_batch(1), num_experts=8).groups[0]
    first, second, third, _ = group.rollouts
    generation, call = Sending((first, second.with_routing(None), third)), Keeping()
    servicer = RolloutServicer(
        ReplicaIdentity("r", "one"),
        cast("Any", IdleEngine()),
        NOTHING,
        cast("Any", generation),
        engine_name="torch",
        max_n=8,
    )
    ids = token_ids_to_bytes(group.prompt_token_ids)
    prompt = common.PromptInput(tokens=common.TokenPrompt(token_ids_u32=ids))
    asked = rollout.GenerateRequest(prompt=prompt, sample_indexes=[0, 1, 2], with_routing=True)
    await servicer.Generate(asked, cast("Any", call))
    assert generation.asked[0].with_routing
    _, *sent = call.written  # the first message has the prompt's tokens
    assert [[one.sample_index for one in message.rollouts] for message in sent] == [[1], [0], [2]]
    assert [one.rollouts[0].HasField("routing") for one in sent] == [False, True, True]


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


SERVICE_TOKEN, CLIENT_TOKEN = "s" * 20, "c" * 20


class Taking(RolloutServicer):
    """Samples nothing."""

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


class MetadataCall:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"


async def asked(
    priority: int, *metadata: tuple[str, str], most: int = 0, with_tokens: bool = False
) -> int:
    request = rollout.GenerateRequest(
        prompt=common.PromptInput(text="1"), sample_indexes=[0], priority=priority
    )
    servicer = Taking(most, Tokens() if with_tokens else None)
    await servicer.Generate(request, cast("Any", MetadataCall(*metadata)))
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


@dataclass
class Load:
    version: int = 3


@dataclass
class EngineStandIn:
    max_model_len: int = 64
    vocab_size: int = 100

    def load(self) -> Load:
        return Load()


@dataclass
class Recorder:
    """Encoder and generation in one: keeps what they are given."""

    encoded: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)

    def encode_chat(
        self, messages: Sequence[ChatMessage], images: Sequence[bytes] = (), **_: object
    ) -> TokenIds:
        self.encoded.append((messages[-1].content, tuple(images)))
        self.threads.append(threading.current_thread().name)
        return np.array([1, 2, 2, 3], np.uint32)

    def encode_text(self, text: str, **_: object) -> TokenIds:
        return np.array([1], np.uint32)

    async def run(self, request: GenerationRequest, *_: object) -> None:
        self.requests.append(request)


class Context:
    """A call of a client that names itself."""

    def __init__(self) -> None:
        self.written: list[rollout.GenerateResponse] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("sluice-client", "a"),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    async def write(self, message: rollout.GenerateResponse) -> None:
        self.written.append(message)


def servicer(recorder: Recorder, images: ImageRules | None = None) -> RolloutServicer:
    return RolloutServicer(
        ReplicaIdentity("r", "one"),
        cast("Any", EngineStandIn()),
        recorder,
        cast("GenerationRunner", recorder),
        engine_name="torch",
        max_n=8,
        images=images,
    )


def request(text: str, *images: bytes) -> rollout.GenerateRequest:
    turns = [common.ChatMessage(role="user", content=text)]
    prompt = common.PromptInput(chat=common.ChatPrompt(messages=turns, images=images))
    return rollout.GenerateRequest(prompt=prompt, sample_indexes=[0])


async def call(service: RolloutServicer, message: rollout.GenerateRequest) -> Context:
    context = Context()
    await service.Generate(message, cast("Any", context))
    return context


async def test_images_reach_encoder_and_engine_with_the_expanded_tokens() -> None:
    recorder, image = Recorder(), png()
    context = await call(servicer(recorder), request("<image>?", image))
    assert recorder.encoded == [("<image>?", (image,))]
    (asked,) = recorder.requests
    assert asked.images == (image,)
    assert asked.prompt_token_ids.tolist() == [1, 2, 2, 3]
    sent = np.frombuffer(context.written[0].accepted.prompt_token_ids_u32, np.uint32)
    assert sent.tolist() == [1, 2, 2, 3]
    assert recorder.threads[0] != threading.current_thread().name  # the event loop continues


async def test_callers_that_come_and_leave_never_have_two_images_measured_at_once() -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    class Slow(Recorder):
        def encode_chat(self, *arguments: Any, **options: Any) -> TokenIds:
            begun.release()
            assert may_end.wait(60)
            return super().encode_chat(*arguments, **options)

    service = servicer(recorder := Slow())
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(call(service, request("first <image>", png())))
        assert await asyncio.to_thread(begun.acquire, timeout=60)
        gone.cancel()
        waiting = tasks.create_task(call(service, request("second <image>", png())))
        is_measured = await asyncio.to_thread(begun.acquire, timeout=0.2)
        may_end.set()
        await waiting
    assert not is_measured
    assert [text for text, _ in recorder.encoded] == ["first <image>", "second <image>"]


async def test_a_prompt_without_images_takes_the_way_it_took() -> None:
    recorder = Recorder()
    await call(servicer(recorder), request("the word <image>"))
    assert recorder.encoded == [("the word <image>", ())]
    assert recorder.requests[0].images == ()


@pytest.mark.parametrize(
    ("text", "images", "message"),
    [
        ("<image>", (png(claims=(60_000, 60_000)),), r"prompt\.chat\.images\[0\]: 60000 x 60000"),
        ("<image>", (b"",), r"prompt\.chat\.images\[0\]: 0 bytes"),
        ("<image>", (b"MZ" + bytes(50),), "are no image"),
        ("", (png(),), "1 images for 0 times <image>"),
        ("<image>" * 3, (png(),) * 3, "3 images; .*max_prompt_images allows 2"),
    ],
)
async def test_a_hostile_image_reaches_neither_encoder_nor_engine(
    text: str, images: tuple[bytes, ...], message: str
) -> None:
    recorder = Recorder()
    rules = ImageRules(ImageLimits(max_images=2))
    with pytest.raises(InvalidRequestError, match=message):
        await call(servicer(recorder, rules), request(text, *images))
    assert recorder == Recorder()


async def test_images_that_a_client_has_under_way_are_bounded() -> None:
    recorder, image = Recorder(), png()
    quota = ClientQuota(len(image), "bytes of images", "sluice.limits.max_client_images_mb")
    service = servicer(recorder, ImageRules(quota=quota))
    with pytest.raises(InvalidRequestError, match=r"client 'a': .* bytes of .*max_client_images"):
        await call(service, request("<image><image>", image, image))
    with quota.hold("a", 1), pytest.raises(ExhaustedError, match=r"client 'a': 1 bytes of images"):
        await call(service, request("<image>", image))
    await call(service, request("<image>", image))
    await call(service, request("<image>", image))  # what ended counts no more
    assert len(recorder.requests) == 2


@pytest.mark.parametrize("can_sleep", [True, False])
async def test_a_caller_hears_whether_the_engine_sleeps(can_sleep: bool) -> None:
    class Sleeper:
        async def sleep(self) -> bool:
            return can_sleep

    service = WeightSyncServicer(cast("Any", Sleeper()))
    answer = await service.Sleep(weights.SleepRequest(), cast("Any", Context()))
    assert answer.asleep == can_sleep
