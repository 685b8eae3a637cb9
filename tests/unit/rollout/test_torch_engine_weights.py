"""New weights while samples run."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.protocol import SampleChunk
from sluice.device.cpu import CpuDevice
from sluice.errors import SluiceError, WeightSyncError
from sluice.types import SamplingParams
from sluice.weights.sender import WeightSender
from tests.support.causal_lms import (
    expected_logprobs,
    generate,
    load_weights,
    reference_model,
    request,
    running_engine,
    samples_of,
    save_config,
    weights_of,
)
from tests.support.engine_contract_world import Trainer
from tests.support.retired_threads import wait_for_retired_threads

_PROMPT = (5, 9, 23, 54)
_PLAIN = SamplingParams(1.0, 1.0, -1, 1, 0)


async def _swap_during(
    engine: EmbeddedEngine, new: PreTrainedModel, *, tokens: int, every_token: bool
) -> list[SampleChunk]:
    """Chunks of a request of 12 samples during which `new` begins to serve as version 2."""
    wanted = request(_PROMPT, samples=12, max_tokens=tokens)
    chunks: list[SampleChunk] = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:

        async def run() -> None:
            async with aclosing(engine.generate(wanted, every_token=every_token)) as stream:
                async for some in stream:
                    chunks.extend(some)

        tasks.create_task(run())
        while engine.load().generated_tokens < 8 * 20:
            await asyncio.sleep(0.002)
        await load_weights(engine, weights_of(new, engine), 2, "two")
    return chunks


@pytest.mark.parametrize(
    ("family", "every_token", "length"),
    [("qwen3", True, 150), ("qwen3", False, 150), ("gpt_neox", False, 100), ("bloom", False, 40)],
)
async def test_no_chunk_mixes_versions_and_each_token_is_its_versions(
    family: str, every_token: bool, length: int, tmp_path: Path
) -> None:
    old, new = (reference_model(save_config(family, tmp_path), seed) for seed in (1, 2))
    async with running_engine(tmp_path, old, max_model_len=length + 4, recompute_kv=True) as engine:
        chunks = await _swap_during(engine, new, tokens=length, every_token=every_token)
        assert (engine.load().version, engine.load().weight_digest) == (2, "two")
    whole = samples_of(chunks)
    both = 0
    for index in range(12):
        parts = {1: 0, 2: 0}
        for chunk in chunks:
            if chunk.sample_index == index:
                assert not (chunk.version == 1 and parts[2]), "version 1 after version 2"
                parts[chunk.version] += chunk.token_ids.size
        tokens, logprobs = whole[index]
        assert sum(parts.values()) == len(tokens) == length
        # With the cache recomputed, each part has the exact logprobs of its version.
        exact = expected_logprobs(old, _PROMPT, tokens, _PLAIN)[: parts[1]]
        exact += expected_logprobs(new, _PROMPT, tokens, _PLAIN)[parts[1] :]
        np.testing.assert_allclose(logprobs, exact, atol=1e-4)
        both += parts[1] > 0 and parts[2] > 0
    assert both == 8  # those that were running


async def test_without_recomputation_the_old_cache_is_kept(tmp_path: Path) -> None:
    old, new = (reference_model(save_config("qwen3", tmp_path), seed) for seed in (1, 2))
    async with running_engine(tmp_path, old, max_model_len=160) as engine:
        chunks = await _swap_during(engine, new, tokens=150, every_token=False)
    tokens, logprobs = samples_of(chunks)[0]
    start = sum(c.token_ids.size for c in chunks if c.sample_index == 0 and c.version == 1)
    exact = np.array(expected_logprobs(new, _PROMPT, tokens, _PLAIN))
    assert np.abs(exact - logprobs)[start:].max() > 1e-2


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
async def test_weights_that_do_not_fit_change_nothing(fault: str, tmp_path: Path) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    async with running_engine(tmp_path, model) as engine:
        before = await generate(engine, request())
        weights = weights_of(reference_model(tmp_path, seed=5), engine)
        name = "model.norm.weight"
        if fault == "missing":
            del weights[name]
        elif fault == "unknown":
            weights["model.other"] = torch.zeros(1)
        else:
            weights[name] = torch.zeros(3)
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight|model\.other"):
            await load_weights(engine, weights, 2, "two")
        assert engine.load().version == 1
        assert await generate(engine, request()) == before


async def test_the_other_name_of_a_tied_tensor_may_come_along(tmp_path: Path) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    async with running_engine(tmp_path) as engine:
        await load_weights(engine, model.state_dict(), 1, "one")
        tokens, logprobs = (await generate(engine, request(_PROMPT)))[0]
    exact = expected_logprobs(model, _PROMPT, tokens, _PLAIN)
    np.testing.assert_allclose(logprobs, exact, atol=1e-4)


async def test_cancelling_a_stage_leaves_the_group_and_a_new_epoch_works(tmp_path: Path) -> None:
    model = reference_model(save_config("qwen3", tmp_path))
    sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=60.0)
    async with running_engine(tmp_path) as engine:
        trainer = Trainer(engine, sender)
        await trainer.form()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.stage(1, 4)
        await trainer.form()
        await trainer.publish(model)
        assert engine.load().version == trainer.version
        sender.close()
    assert wait_for_retired_threads(120) == 0


async def test_an_engine_that_stops_ends_a_stage_that_waits_for_the_sender(tmp_path: Path) -> None:
    save_config("qwen3", tmp_path)
    sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=60.0)

    async def stage(engine: EmbeddedEngine) -> None:
        with pytest.raises(SluiceError):
            await engine.stage(1, 4)

    async with running_engine(tmp_path) as engine, asyncio.timeout(60):
        await Trainer(engine, sender).form()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage(engine))
            while not engine._in_thread()[1]._receiving:
                await asyncio.sleep(0.002)
            await engine.stop()
        sender.close()
    assert wait_for_retired_threads(120) == 0
