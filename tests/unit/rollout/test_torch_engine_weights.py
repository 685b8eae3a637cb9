"""New weights while samples run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.protocol import SampleChunk
from sluice.concurrency.threads import wait_for_retired_threads
from sluice.device.cpu import CpuDevice
from sluice.errors import SluiceError, WeightSyncError
from sluice.types import SamplingParams, TransferGroupSpec
from sluice.weights.sender import WeightSender
from tests.support.causal_lms import (
    chunks_of,
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
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest

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


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_neox"])
async def test_samples_started_after_a_swap_are_the_new_models(family: str, tmp_path: Path) -> None:
    old, new = (reference_model(save_config(family, tmp_path), seed) for seed in (1, 2))
    async with running_engine(tmp_path, old) as engine:
        await load_weights(engine, weights_of(new, engine), 2, "two")
        tokens, logprobs = (await generate(engine, request(_PROMPT)))[0]
    exact = expected_logprobs(new, _PROMPT, tokens, _PLAIN)
    np.testing.assert_allclose(logprobs, exact, atol=1e-4)


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


class _Trainer:
    """The sending end, in threads of this process."""

    def __init__(
        self, sender: WeightSender, engine: EmbeddedEngine, model: PreTrainedModel
    ) -> None:
        self.sender, self.engine = sender, engine
        self.weights = weights_of(model, engine)
        self.digest = plain_digest(self.weights)
        self._never = threading.Event()

    async def form(self, epoch: int) -> TransferGroupSpec:
        spec = self.sender.form_group(epoch, ["replica"], tuple(self.engine.weight_layout))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(self.sender.join, self._never))
            joined = tasks.create_task(self.engine.join_group(spec["replica"]))
        assert joined.result() == spec["replica"].plan_digest
        return spec["replica"]

    async def send(self, epoch: int, version: int) -> str:
        """Broadcasts and stages; returns the digest that the replica computed."""
        buffer = buffer_of(self.weights)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                asyncio.to_thread(self.sender.broadcast, buffer, version, self._never)
            )
            staged = tasks.create_task(self.engine.stage(epoch, version))
        assert staged.result().version == version
        assert staged.result().received_bytes > 0
        return staged.result().digest


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[_Trainer]:
    model = reference_model(save_config("qwen3", tmp_path))
    sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=5.0)
    async with running_engine(tmp_path) as engine:
        yield _Trainer(sender, engine, model)
        sender.close()
    assert wait_for_retired_threads(10) == 0


async def test_a_staged_version_serves_once_committed_and_committing_again_is_harmless(
    trainer: _Trainer,
) -> None:
    engine = trainer.engine
    await trainer.form(1)
    for version in (4, 5):
        assert await trainer.send(1, version) == trainer.digest
        assert engine.load().version != version
        assert await engine.commit(1, version, trainer.digest) > 0
        assert await engine.commit(1, version, trainer.digest) == 0
        assert (engine.load().version, engine.load().weight_digest) == (version, trainer.digest)
    chunks = await chunks_of(engine, request())
    assert {chunk.version for chunk in chunks} == {5}


async def test_what_was_not_staged_so_is_not_committed(trainer: _Trainer) -> None:
    engine = trainer.engine
    await trainer.form(1)
    with pytest.raises(WeightSyncError, match="nothing is staged"):
        await engine.commit(1, 4, trainer.digest)
    await trainer.send(1, 4)
    for call in (
        lambda: engine.commit(1, 3, trainer.digest),
        lambda: engine.commit(1, 4, "another digest"),
        lambda: engine.commit(2, 4, trainer.digest),
        lambda: engine.stage(2, 5),
    ):
        with pytest.raises(WeightSyncError):
            await call()
    assert engine.load().version is None
    await engine.commit(1, 4, trainer.digest)
    assert engine.load().version == 4


async def test_an_aborted_update_is_gone_and_a_new_epoch_works(trainer: _Trainer) -> None:
    engine = trainer.engine
    await trainer.form(1)
    await trainer.send(1, 4)
    for _ in range(2):
        await engine.abort_update(1, "a test")
    with pytest.raises(WeightSyncError):
        await engine.commit(1, 4, trainer.digest)
    await trainer.form(2)
    await engine.abort_update(1, "too late to matter")
    await trainer.send(2, 4)
    await engine.commit(2, 4, trainer.digest)
    assert engine.load().version == 4


async def test_aborting_ends_a_stage_that_waits_for_the_sender(trainer: _Trainer) -> None:
    await trainer.form(1)
    receiver = trainer.engine._in_thread()[1]._inbox._receiver
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        staged = tasks.create_task(_error_of(trainer.engine.stage(1, 4)))
        while not receiver._staging.locked():
            await asyncio.sleep(0.002)
        await trainer.engine.abort_update(1, "a test")
    assert isinstance(staged.result(), SluiceError)
    await trainer.form(2)
    assert await trainer.send(2, 7) == trainer.digest


async def test_cancelling_a_stage_leaves_the_group_and_a_new_epoch_works(
    trainer: _Trainer,
) -> None:
    await trainer.form(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await trainer.engine.stage(1, 4)
    await trainer.form(2)
    assert await trainer.send(2, 7) == trainer.digest


async def _error_of(call: Coroutine[None, None, object]) -> SluiceError | None:
    try:
        await call
    except SluiceError as error:
        return error
    return None
