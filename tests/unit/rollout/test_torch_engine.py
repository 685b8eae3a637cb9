"""What a caller of the embedded engine can rely on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.decoder import PrefilledPrompts, TokenRow
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import GenerationLoop
from services.rollout.engines.protocol import GenerationRequest
from sluice.errors import (
    ConfigError,
    EngineError,
    ExhaustedError,
    InvalidRequestError,
)
from tests.support.causal_lms import (
    VOCABULARY,
    chunks_of,
    engine_settings,
    generate,
    partial_sample,
    reference_model,
    request,
    running_engine,
    save_config,
)
from tests.unit.rollout.conftest import Steps

_ENDLESS = 20_000


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    return reference_model(model_path)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.002)


async def test_a_directory_without_weights_suffices_and_tied_tensors_travel_once(
    model_path: Path,
) -> None:
    assert [path.name for path in model_path.iterdir()] == ["config.json"]
    async with running_engine(model_path) as engine:
        names = [spec.name for spec in engine.weight_layout]
        assert names[0] == "model.embed_tokens.weight"
        assert "lm_head.weight" not in names
        assert "model.layers.1.self_attn.q_proj.weight" in names
        assert {spec.dtype for spec in engine.weight_layout} == {"float32"}


@pytest.mark.parametrize(
    "content", [None, "{", "{}", '{"model_type": "nonsense"}', '{"model_type": "t5"}']
)
async def test_a_path_that_holds_no_causal_language_model_is_named(
    content: str | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        await EmbeddedEngine(engine_settings(tmp_path)).start()


async def test_a_generation_config_decides_the_end_tokens(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    save_config("qwen3", tmp_path)
    wanted = request(samples=8, max_tokens=40, ignore_eos=False)
    async with running_engine(tmp_path, model) as engine:
        free = await generate(engine, request(samples=8, max_tokens=40))
    other = free[0][0][2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, 99]}))
    async with running_engine(tmp_path, model) as engine:
        assert (await generate(engine, wanted))[0][0][-1] in {other, 99}


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (request([3] * 48), "48 tokens"),
        (request([]), "0 tokens"),
        (request([3, VOCABULARY]), str(VOCABULARY)),
        (request(stop=(VOCABULARY,)), "stop_token_ids"),
        (request(stop=(1,) * 65), "stop_token_ids"),
        (request(partials=(partial_sample(5, [1]),)), "partials"),
    ],
)
async def test_a_request_that_cannot_be_generated_is_refused(
    wanted: GenerationRequest, named: str, model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        with pytest.raises(InvalidRequestError, match=named):
            await generate(engine, wanted)


async def test_too_many_waiting_samples_are_refused_and_the_rest_continues(
    model_path: Path, model: PreTrainedModel, steps: Steps
) -> None:
    async with running_engine(model_path, model, slots=2, max_queued=3) as engine:
        steps.left = 1
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(generate(engine, request(samples=5, max_tokens=40)))
            await _until(lambda: engine.load().slots_busy > 0)
            with pytest.raises(ExhaustedError):
                await generate(engine, request())
            steps.left = None
        assert len(running.result()) == 5
        with pytest.raises(InvalidRequestError, match="6 samples; the engine takes 2 in slots"):
            await generate(engine, request(samples=6))
        assert len(await generate(engine, request(samples=5))) == 5


async def test_an_idle_engine_uses_no_processor_time(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        await generate(engine, request())
        steps = engine.load().busy_seconds
        used = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - used < 0.1
        assert (await engine.check_alive()).busy_seconds == steps


async def _drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


def _break(loop: GenerationLoop) -> None:
    def decode(_: object) -> torch.Tensor:
        raise RuntimeError("boom")

    loop._decoder.decode = decode


async def test_an_error_in_the_step_loop_fails_what_runs_and_all_that_follows(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model, max_model_len=_ENDLESS) as engine:
        async with aclosing(
            engine.generate(request(samples=12, max_tokens=_ENDLESS), every_token=True)
        ) as stream:
            await anext(stream)
            _break(engine._in_thread()[1].loop)
            with pytest.raises(EngineError, match="boom"):
                await asyncio.wait_for(_drain(stream), 60)
        for call in (engine.check_alive(), generate(engine, request())):
            with pytest.raises(EngineError, match="boom"):
                await call
        with pytest.raises(EngineError, match="boom"):
            engine.load()  # heartbeats end with it, and so does the replica's process


async def test_a_groups_prompt_is_prefilled_once_however_its_samples_enter(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        decoder, prefilled = engine._in_thread()[1].loop._decoder, []
        original = decoder.prefill

        def prefill(prompts: Sequence[TokenRow], images: Sequence[Any]) -> PrefilledPrompts:
            prefilled.extend(prompt.tolist() for prompt in prompts)
            return original(prompts, images)

        decoder.prefill = prefill
        async with asyncio.TaskGroup() as tasks:
            for prompt in ([5, 9, 23], [8, 2, 4, 4]):
                tasks.create_task(generate(engine, request(prompt, samples=19)))
    assert sorted(prefilled) == [[5, 9], [8, 2, 4]]


async def test_the_event_loop_is_woken_at_most_once_a_step(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        thread, core = engine._in_thread()
        wakes, steps = [], []
        wake, step = thread._hand_over, core.loop.step
        thread._hand_over = lambda: (wakes.append(1), wake())
        core.loop.step = lambda: (steps.append(1), step())
        await chunks_of(engine, request(samples=8, max_tokens=20), every_token=True)
        assert 20 <= len(steps) <= 21
        assert len(wakes) <= len(steps)
