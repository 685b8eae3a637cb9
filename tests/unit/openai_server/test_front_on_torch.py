"""The HTTP front on a real engine, asked by plain HTTP and by OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("aiohttp")

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.generation import GenerationRunner
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.rpc.server import RpcServer
from tests.support.causal_lms import reference_model, running_engine, save_config
from tests.support.http_front import HttpFront, http_front
from tests.support.replica_process import ToyEncoder

TURNS = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def front_on_torch(folder: Path) -> AsyncIterator[tuple[HttpFront, EmbeddedEngine]]:
    """A front on one replica with a tiny model, in this process, over real sockets."""
    save_config("qwen3", folder)
    model = reference_model(folder)
    async with running_engine(folder, model, slots=8, max_model_len=128) as engine:
        encoder = ToyEncoder()
        servicer = RolloutServicer(
            ReplicaIdentity("rollout-0", str(uuid4())),
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
            async with http_front(server.address) as front:
                yield front, engine
        finally:
            await server.stop(0)


async def test_a_real_engine_answers_the_same_streamed_or_not_and_obeys_stops(
    tmp_path: Path,
) -> None:
    async with front_on_torch(tmp_path) as (front, engine):
        asked = {
            "model": "policy",
            "messages": TURNS,
            "seed": 5,
            "max_tokens": 20,
            "logprobs": True,
        }
        status, whole = await front.post("/v1/chat/completions", **asked, n=3)
        assert status == 200, whole
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert len(set(texts)) == 3
        events = await front.events("/v1/chat/completions", **asked, n=3, stream=True)
        for index, text in enumerate(texts):
            chunks = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
            assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == text
            tokens = [t for chunk in chunks for t in (chunk["logprobs"] or {}).get("content", ())]
            expected = whole["choices"][index]["logprobs"]["content"]
            assert [t["logprob"] for t in tokens] == pytest.approx(
                [t["logprob"] for t in expected], abs=1e-4
            )
        stop = texts[0][5:8]
        _, stopped = await front.post("/v1/chat/completions", **asked, stop=stop)
        assert stopped["choices"][0]["message"]["content"] == texts[0][: texts[0].index(stop)]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        tokens = stopped["choices"][0]["logprobs"]["content"]
        assert len(tokens) == stopped["usage"]["completion_tokens"] < 20
        events = await front.events("/v1/chat/completions", **asked, n=3, stop=stop, stream=True)
        for index, text in enumerate(texts):
            chunks = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
            reported = "".join(chunk["delta"].get("content", "") for chunk in chunks)
            assert reported == text.partition(stop)[0]
        async with asyncio.timeout(60):
            while engine.load().slots_busy:
                await asyncio.sleep(0.01)


async def texts(front: HttpFront, prompt: object, **fields: object) -> list[str]:
    status, body = await front.post(
        "/v1/completions", model="policy", prompt=prompt, max_tokens=12, **fields
    )
    assert status == 200, body
    return [choice["text"] for choice in body["choices"]]


async def test_the_same_prompt_twice_draws_different_samples_which_a_seed_repeats(
    tmp_path: Path,
) -> None:
    async with front_on_torch(tmp_path) as (front, _):
        twice = ["a", "a"]
        # Without a seed some may be alike by chance, as those that end at once.
        first, second = await texts(front, twice, n=2), await texts(front, twice, n=2)
        assert first != second
        assert len(set(first)) > 1
        seeded = await texts(front, twice, n=2, seed=5)
        assert len(set(seeded)) == 4
        assert await texts(front, twice, n=2, seed=5) == seeded
        assert await texts(front, "a", n=4, seed=5) == seeded
        assert len(set(await texts(front, twice, temperature=0))) == 1


async def test_openais_own_client_reads_every_answer(tmp_path: Path) -> None:
    openai: Any = pytest.importorskip("openai")
    async with (
        front_on_torch(tmp_path) as (front, _),
        openai.AsyncOpenAI(
            base_url=f"{front.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["policy"]
        chat = await client.chat.completions.create(
            model="policy", messages=TURNS, n=2, logprobs=True, max_tokens=8, seed=1
        )
        assert [choice.index for choice in chat.choices] == [0, 1]
        sampled = sum(len(choice.logprobs.content) for choice in chat.choices)
        assert chat.usage.completion_tokens == sampled
        stream = await client.chat.completions.create(
            model="policy", messages=TURNS, max_tokens=8, seed=1, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == chat.choices[0].message.content
        completion = await client.completions.create(
            model="policy", prompt=[[5, 6, 7]], max_tokens=8, logprobs=1, temperature=0
        )
        assert completion.usage.prompt_tokens == 3
        assert (
            len(completion.choices[0].logprobs.token_logprobs) == completion.usage.completion_tokens
        )
        with pytest.raises(openai.NotFoundError, match="is not served"):
            await client.completions.create(model="gpt", prompt="a")
        echoed = await client.completions.create(
            model="policy", prompt=[[5, 6, 7]], max_tokens=8, logprobs=1, temperature=0, echo=True
        )
        whole = completion.choices[0].logprobs
        # One number a token, joined here without spaces.
        assert echoed.choices[0].logprobs.tokens == ["5", " 6", " 7", *whole.tokens]
        assert echoed.choices[0].logprobs.token_logprobs[3:] == pytest.approx(
            whole.token_logprobs, abs=1e-4
        )
        assert echoed.choices[0].text == "5 6 7" + completion.choices[0].text
        with pytest.raises(openai.BadRequestError, match="echo"):
            await client.completions.create(model="policy", prompt="a", echo=True, stream=True)
