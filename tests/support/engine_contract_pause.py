"""What every inference engine promises of a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from services.rollout.engines.protocol import (
    Engine,
    GenerationRequest,
    PauseMode,
    SampleChunk,
    num_tokens,
)
from sluice.types import FinishReason
from tests.support.causal_lms import Samples, expected_logprobs, request, samples_of
from tests.support.engine_contract_calls import (
    BATCH,
    ENDLESS,
    PLAIN,
    TOLERANCE,
    WAIT_S,
    chunks_of,
    generate,
    until,
)
from tests.support.engine_contract_weights import check_versions
from tests.support.engine_contract_world import SLOTS, ContractWorld

_STANDSTILL_S = 0.2


@asynccontextmanager
async def _paused(engine: Engine, mode: PauseMode) -> AsyncIterator[None]:
    """Pauses, sees that nothing is drawn for as long as the block, and resumes."""
    async with asyncio.timeout(WAIT_S):
        await engine.pause(mode)
        sampled = (await engine.probe()).generated_tokens
        try:
            yield
            await asyncio.sleep(_STANDSTILL_S)
            assert (await engine.probe()).generated_tokens == sampled
        finally:
            await engine.resume()


async def _some_tokens(engine: Engine, running: asyncio.Task[object]) -> None:
    before = engine.load().generated_tokens
    await until(lambda: engine.load().generated_tokens > before + 20 or running.done())
    assert not running.done()


class PauseContract:
    """Rules that one running engine can be asked for in any order."""

    @pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
    async def test_kept_samples_continue_after_a_pause_and_later_ones_begin(
        self, world: ContractWorld, mode: PauseMode
    ) -> None:
        await world.serve(world.first)
        wanted, later = request(samples=3, max_tokens=200), request(samples=2, seed=9)
        alone = [await generate(world.engine, one) for one in (wanted, later)]
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(generate(world.engine, wanted))
            await _some_tokens(world.engine, running)
            async with _paused(world.engine, mode):
                waiting = tasks.create_task(generate(world.engine, later))
        assert waiting.result().keys() == alone[1].keys()
        if mode is PauseMode.KEEP:
            assert _tokens(running.result()) == _tokens(alone[0])
            assert _tokens(waiting.result()) == _tokens(alone[1])
        assert {len(tokens) for tokens, _ in running.result().values()} == {200}
        tokens, logprobs = running.result()[2]
        exact = expected_logprobs(world.first, (5, 9, 23, 54), tokens, PLAIN)
        np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)

    async def test_a_pause_that_aborts_ends_samples_with_what_they_have(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(
                chunks_of(world.engine, request(samples=3, max_tokens=ENDLESS))
            )
            await _some_tokens(world.engine, running)
            async with _paused(world.engine, PauseMode.ABORT):
                chunks = await running
                later = tasks.create_task(generate(world.engine, request()))
        assert [chunk.finish_reason for chunk in chunks] == 3 * [FinishReason.ABORTED]
        assert all(chunk.token_ids.size > 0 for chunk in chunks)
        tokens, logprobs = samples_of(chunks)[1]
        exact = expected_logprobs(world.first, (5, 9, 23, 54), tokens, PLAIN)
        np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)
        assert len(later.result()[0][0]) == 12

    async def test_a_pause_that_aborts_ends_samples_that_wait_since_an_earlier_pause(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        async with asyncio.TaskGroup() as tasks, _paused(world.engine, PauseMode.KEEP):
            waiting = tasks.create_task(chunks_of(world.engine, request(samples=3)))
            await until(lambda: world.engine.load().slots_busy + world.engine.load().queued == 3)
            while not waiting.done():  # a sample may still be on its way into the engine
                await world.engine.pause(PauseMode.ABORT)
            chunks = waiting.result()
        assert [chunk.finish_reason for chunk in chunks] == 3 * [FinishReason.ABORTED]
        assert num_tokens(chunks) == 0

    async def test_a_pause_that_drains_lets_samples_end_and_no_others_begin(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        wanted = request(samples=3, max_tokens=200)
        alone = await generate(world.engine, wanted)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(generate(world.engine, wanted))
            await _some_tokens(world.engine, running)
            tasks.create_task(world.engine.pause(PauseMode.DRAIN))
            later = tasks.create_task(generate(world.engine, request()))
            async with _paused(world.engine, PauseMode.DRAIN):
                assert not later.done()
                assert _tokens(await running) == _tokens(alone)
        assert len(later.result()[0][0]) == 12

    async def test_samples_that_wait_for_a_slot_while_others_are_drained_begin_after_the_pause(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        wanted = request(samples=2 * BATCH, max_tokens=150, seed=9)
        alone = await generate(world.engine, wanted)
        before = (await world.engine.probe()).generated_tokens
        seen: list[SampleChunk] = []
        async with asyncio.TaskGroup() as tasks:
            most = request(samples=SLOTS - BATCH, max_tokens=150)
            running = tasks.create_task(generate(world.engine, most))
            await until(lambda: world.engine.load().slots_busy == SLOTS - BATCH or running.done())
            ending = tasks.create_task(_collect(world.engine, wanted, seen))
            await until(lambda: len(_indexes(seen)) == BATCH or running.done())
            assert not running.done()
            async with _paused(world.engine, PauseMode.DRAIN):
                sampled = (await world.engine.probe()).generated_tokens - before
                assert sampled == SLOTS * 150
                assert len((await running)[0][0]) == 150
                await until(lambda: len(_ended(seen)) == BATCH)
                assert _indexes(seen) == _ended(seen)
                assert not ending.done()
        assert _tokens(samples_of(seen)) == _tokens(alone)

    async def test_weights_that_come_during_a_pause_serve_after_it(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        old = world.trainer.version
        wanted = request(samples=4, max_tokens=400)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(chunks_of(world.engine, wanted))
            await _some_tokens(world.engine, running)
            async with _paused(world.engine, PauseMode.KEEP):
                await world.serve(world.second)
        check_versions(world, running.result(), wanted, old)

    async def test_a_call_that_ends_during_a_pause_frees_its_slots(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        stream = world.engine.generate(request(samples=5, max_tokens=ENDLESS), every_token=True)
        async with aclosing(stream) as parts:
            await anext(parts)
            async with _paused(world.engine, PauseMode.KEEP):
                await stream.aclose()  # type: ignore[attr-defined]
                load = await world.engine.probe()
                assert (load.slots_busy, load.queued) == (0, 0)
        assert len((await generate(world.engine, request()))[0][0]) == 12

    async def test_pausing_and_resuming_again_is_harmless(self, world: ContractWorld) -> None:
        await world.serve(world.first)
        await world.engine.resume()
        async with _paused(world.engine, PauseMode.KEEP):
            await world.engine.pause(PauseMode.DRAIN)
        await world.engine.resume()
        assert len((await generate(world.engine, request()))[0][0]) == 12


async def _collect(engine: Engine, wanted: GenerationRequest, seen: list[SampleChunk]) -> None:
    """Appends what comes of a request as it comes."""
    async with (
        asyncio.timeout(WAIT_S),
        aclosing(engine.generate(wanted, every_token=True)) as parts,
    ):
        async for chunks in parts:
            seen += chunks


def _indexes(chunks: Sequence[SampleChunk]) -> set[int]:
    return {chunk.sample_index for chunk in chunks}


def _ended(chunks: Sequence[SampleChunk]) -> set[int]:
    return _indexes([chunk for chunk in chunks if chunk.finish_reason is not None])


def _tokens(samples: Samples) -> dict[int, list[int]]:
    return {index: tokens for index, (tokens, _) in samples.items()}
