"""Images of a call reach the encoder and the engine, and none that may not be decoded does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from services.rollout.engines.protocol import Engine, GenerationRequest
from services.rollout.generation import GenerationRunner
from services.rollout.servicer import ImageRules, ReplicaIdentity, RolloutServicer
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.rpc.auth import ClientQuota
from sluice.types import ChatMessage, TokenIds
from sluice.vision.image_limits import ImageLimits
from tests.support.image_files import png


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
        cast("Engine", EngineStandIn()),
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
    assert recorder.threads[0] != threading.current_thread().name  # the event loop goes on


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
    with quota.held("a", 1), pytest.raises(ExhaustedError, match=r"client 'a': 1 bytes of images"):
        await call(service, request("<image>", image))
    await call(service, request("<image>", image))
    await call(service, request("<image>", image))  # what ended counts no more
    assert len(recorder.requests) == 2
