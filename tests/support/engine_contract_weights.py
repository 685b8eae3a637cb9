"""What every engine promises of new weights, one rule a test."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from services.rollout.engines.protocol import (
    GenerationRequest,
    SampleChunk,
)
from sluice.errors import NotReadyError, WeightSyncError
from sluice.types import FinishReason
from tests.support.causal_lms import Samples, expected_logprobs, request, samples_of
from tests.support.engine_contract_world import (
    ENDLESS,
    PLAIN,
    PROMPTS,
    TOLERANCE,
    WAIT_S,
    ContractWorld,
    chunks_of,
    generate,
    until,
)


class UpdateContract:
    """Rules of updates that one running engine can be asked for in any order."""

    @pytest.mark.parametrize("every_token", [True, False])
    async def test_each_token_is_its_versions_across_an_update(
        self, world: ContractWorld, every_token: bool
    ) -> None:
        await world.serve(world.first)
        old = world.trainer.version
        digest = await world.trainer.stage(world.second)
        wanted, chunks = request(samples=4, max_tokens=400), []
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:

            async def run() -> None:
                stream = world.engine.generate(wanted, every_token=every_token)
                async with aclosing(stream) as parts:
                    async for some in parts:
                        chunks.extend(some)

            before = world.engine.load().generated_tokens
            running = tasks.create_task(run())
            await until(
                lambda: world.engine.load().generated_tokens > before + 100 or running.done()
            )
            await world.engine.commit(world.trainer.epoch, world.trainer.version, digest)
            world.serving = world.second
        check_versions(world, chunks, wanted, old)

    async def test_samples_after_an_update_are_the_new_models(self, world: ContractWorld) -> None:
        for model in (world.second, world.first, world.second):
            await world.serve(model)
            # The same prompt each time: a cache of the old weights must not serve it.
            prompt = list(range(8, 80))
            wanted = request(prompt, samples=2, max_tokens=20)
            for tokens, logprobs in (await generate(world.engine, wanted)).values():
                exact = expected_logprobs(model, prompt, tokens, PLAIN)
                np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)

    async def test_what_was_not_staged_so_is_not_committed_and_committing_again_is_harmless(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        before = world.trainer.version
        digest = await world.trainer.stage(world.second)
        epoch, version = world.trainer.epoch, world.trainer.version
        for wrong in (
            (epoch, version + 1, digest),
            (epoch, version, "another"),
            (epoch + 1, version, digest),
        ):
            with pytest.raises(WeightSyncError):
                await world.engine.commit(*wrong)
        assert world.engine.load().version == before
        stall_s = await world.engine.commit(epoch, version, digest)
        world.serving = world.second
        assert stall_s > 0
        assert await world.engine.commit(epoch, version, digest) == 0
        load = world.engine.load()
        assert (load.version, load.weight_digest) == (version, digest)

    async def test_an_aborted_update_is_gone_and_the_next_epoch_works(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        before = world.trainer.version
        digest = await world.trainer.stage(world.second)
        for _ in range(2):
            await world.engine.abort_update(world.trainer.epoch, "a test")
        with pytest.raises(WeightSyncError):
            await world.engine.commit(world.trainer.epoch, world.trainer.version, digest)
        assert world.engine.load().version == before
        await world.trainer.form()
        await world.serve(world.second)
        assert world.engine.load().version == world.trainer.version

    async def test_aborting_ends_a_stage_that_waits_for_the_sender(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            staged = tasks.create_task(_raised(world, world.trainer.version + 1))
            await world.engine.check_alive()  # by then the engine has begun to stage
            await world.engine.abort_update(world.trainer.epoch, "a test")
        assert staged.result()
        await world.trainer.form()
        await world.serve(world.second)


def check_versions(
    world: ContractWorld, chunks: list[SampleChunk], wanted: GenerationRequest, old: int
) -> None:
    """Check samples of 400 tokens: first `old` is their version, then that of `world.second`."""
    prompt, both = wanted.prompt_token_ids.tolist(), 0
    for index, (tokens, logprobs) in samples_of(chunks).items():
        versions = [
            chunk.version
            for chunk in chunks
            if chunk.sample_index == index
            for _ in range(chunk.token_ids.size)
        ]
        assert versions == sorted(versions)
        assert set(versions) <= {old, old + 1}
        assert len(tokens) == 400
        sampled_by_old = versions.count(old)
        both += 0 < sampled_by_old < 400
        if index > 1:
            continue  # two will do
        # With the cache recomputed, each part has the exact logprobs of its version.
        exact = expected_logprobs(world.first, prompt, tokens, PLAIN)[:sampled_by_old]
        exact += expected_logprobs(world.second, prompt, tokens, PLAIN)[sampled_by_old:]
        np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)
    assert both == 4


async def _raised(world: ContractWorld, version: int) -> bool:
    try:
        await world.engine.stage(world.trainer.epoch, version)
    except Exception:  # noqa: BLE001 - any error of the tree will do; the next epoch is the rule
        return True
    return False


def check_same(found: Samples, expected: Samples, rounding: float) -> None:
    """Check that samples have the same tokens, and logprobs that differ by `rounding` at most."""
    assert {i: tokens for i, (tokens, _) in found.items()} == {
        i: tokens for i, (tokens, _) in expected.items()
    }
    for index, (_, logprobs) in found.items():
        np.testing.assert_allclose(logprobs, expected[index][1], rtol=0, atol=rounding)


class LifecycleContract:
    """Rules of an engine from its start to its end.

    `fresh` was only started so far, in a folder with a checkpoint of its `second`.
    """

    rounding = 0.0
    """By how much logprobs of one engine differ when it is asked the same again."""

    async def test_after_updates_outputs_equal_those_of_an_engine_started_from_a_checkpoint(
        self, world: ContractWorld, fresh: ContractWorld
    ) -> None:
        wanted = [request(prompt, samples=3, max_tokens=30) for prompt in PROMPTS]
        wanted += [request(prompt, temperature=0.0, max_tokens=30) for prompt in PROMPTS]
        for model in (world.first, world.second, world.first):
            await world.serve(model)
            await generate(world.engine, wanted[0])
        await world.serve(world.second)
        after = [await generate(world.engine, one) for one in wanted]
        assert (fresh.engine.load().version, fresh.engine.load().weight_digest) == (0, "files")
        for one, expected in zip(wanted, after, strict=True):
            check_same(await generate(fresh.engine, one), expected, self.rounding)

    async def test_stopping_ends_running_samples_as_aborted_with_what_they_have(
        self, fresh: ContractWorld
    ) -> None:
        await fresh.serve(fresh.first)
        async with asyncio.TaskGroup() as tasks:
            before = fresh.engine.load().generated_tokens
            running = tasks.create_task(
                chunks_of(fresh.engine, request(samples=9, max_tokens=ENDLESS))
            )
            await until(
                lambda: fresh.engine.load().generated_tokens > before + 100 or running.done()
            )
            await fresh.engine.stop()
        chunks = running.result()
        assert sorted(chunk.sample_index for chunk in chunks) == list(range(9))
        assert {chunk.finish_reason for chunk in chunks} == {FinishReason.ABORTED}
        assert all(chunk.token_ids.size > 0 for chunk in chunks)
        for tokens, logprobs in list(samples_of(chunks).values())[:2]:
            exact = expected_logprobs(fresh.first, (5, 9, 23, 54), tokens, PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)
        await fresh.engine.stop()
        with pytest.raises(NotReadyError):
            await fresh.engine.check_alive()
