"""Prompts with images over the wire to the embedded engine, hostile ones among them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.generation import GenerationRunner
from services.rollout.prompt_encoder import PromptEncoder
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.client import (
    AsyncClient,
    ChatMessage,
    ChatWithImages,
    GenerateOptions,
    RetryPolicy,
    RunAddress,
    Sampling,
)
from sluice.errors import InvalidRequestError
from sluice.rpc.server import RpcServer
from tests.support.causal_lms import running_engine
from tests.support.tiny_vision import IMAGE, image_file, save_model

ONCE = RetryPolicy(patience_s=0.0)
OPTIONS = GenerateOptions(n=2, sampling=Sampling(max_tokens=6, ignore_eos=True, seed=5))


@asynccontextmanager
async def replica(folder: Path) -> AsyncIterator[tuple[str, EmbeddedEngine]]:
    model = save_model("qwen2_5_vl", folder)
    encoder = PromptEncoder(folder)
    async with running_engine(folder, model, slots=4, max_model_len=128) as engine:
        servicer = RolloutServicer(
            ReplicaIdentity("rollout-0", "one"),
            engine,
            encoder,
            GenerationRunner(engine, encoder.decode),
            engine_name="torch",
            max_n=8,
        )
        server = RpcServer(
            [lambda grpc_: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, grpc_)],
            ["sluice.api.rollout.v1.RolloutService"],
            host="127.0.0.1",
            port=0,
            max_message_bytes=1 << 24,
        )
        await server.start()
        try:
            yield server.address, engine
        finally:
            await server.stop(0)


def asked(text: str, *images: bytes) -> ChatWithImages:
    return ChatWithImages([ChatMessage("user", text)], images)


def damaged_pixels() -> bytes:
    """Every header is as it should be; the pixels are those of no image."""
    file = io.BytesIO()
    Image.open(io.BytesIO(image_file(4))).save(file, "WEBP", lossless=True)
    whole = file.getvalue()
    return whole[:60] + b"\xaa" * (len(whole) - 70) + whole[-10:]


def damaged_png() -> bytes:
    """Its header is whole, and its compressed pixels are not."""
    whole = image_file(4)
    start = whole.index(b"IDAT") + 4
    return whole[:start] + b"\xaa" * 8 + whole[start + 8 :]


async def test_samples_follow_the_image_and_a_damaged_one_costs_its_own_call_only(
    tmp_path: Path,
) -> None:
    async with replica(tmp_path) as (address, engine):
        client = AsyncClient(RunAddress(replicas=(address,)), policy=ONCE)
        async with client:
            first = await client.generate(asked("<image> so", image_file(1)), OPTIONS)
            other = await client.generate(asked("<image> so", image_file(2)), OPTIONS)
            async with asyncio.TaskGroup() as tasks:
                again = tasks.create_task(
                    client.generate(asked("<image> so", image_file(1)), OPTIONS)
                )
                bad = [
                    tasks.create_task(refusal(client, asked("<image> so", image)))
                    for image in (
                        *(damaged_pixels(), damaged_png()),
                        *(image_file(3)[:-40], b"\xff\xd8\xff\xd9"),
                    )
                ]
                literal = asked("<image> <|image_pad|>", image_file(1))
                bad.append(tasks.create_task(refusal(client, literal)))
            assert (await client.generate("plain text", OPTIONS)).rollouts[0].num_tokens == 6
        load = await engine.check_alive()
    assert first.prompt_token_ids.tolist().count(IMAGE) == 4
    assert first.texts == again.result().texts
    assert first.texts != other.texts
    assert all("image" in task.result() for task in bad)
    assert (load.slots_busy, load.queued) == (0, 0)


async def refusal(client: AsyncClient, prompt: ChatWithImages) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        await client.generate(prompt, OPTIONS)
    return str(refused.value)
