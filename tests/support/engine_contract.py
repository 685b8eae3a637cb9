"""What every inference engine promises of its samples, one rule a test.

An adapter's test module has a class that extends `engine_contract_suite.RunningContract`, then one
that extends `LifecycleContract`. Its fixtures `world` and `fresh` are two engines that last for the
module; `engine_contract_world` makes them. All run in one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from services.rollout.engines.protocol import (
    GenerationRequest,
    SampleChunk,
)
from sluice.errors import InvalidRequestError
from sluice.types import FinishReason, TokenIds
from tests.support.causal_lms import (
    EOS,
    VOCABULARY,
    expected_logprobs,
    partial_sample,
    request,
    samples_of,
)
from tests.support.engine_contract_world import (
    BATCH,
    ENDLESS,
    MAX_MODEL_LEN,
    PLAIN,
    PROMPTS,
    SLOTS,
    TOLERANCE,
    WAIT_S,
    ContractWorld,
    chunks_of,
    generate,
    greedy_tokens,
    num_tokens,
    settled,
    until,
)


class SamplingContract:
    """Rules that one running engine can be asked for in any order."""

    async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        for prompt in PROMPTS:
            wanted = request(prompt, temperature=0.0, max_tokens=24)
            tokens, logprobs = (await generate(world.engine, wanted))[0]
            assert len(tokens) == 24
            assert greedy_tokens(world.first, prompt, tokens)
            exact = expected_logprobs(world.first, prompt, tokens, PLAIN)
            np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)

    @pytest.mark.parametrize(
        ("temperature", "top_p", "top_k"),
        [(1.0, 1.0, -1), (0.7, 1.0, -1), (1.0, 0.9, -1), (0.6, 0.8, 20), (1.4, 0.7, -1)],
    )
    async def test_logprobs_are_those_of_the_sampled_distribution(
        self, world: ContractWorld, temperature: float, top_p: float, top_k: int
    ) -> None:
        await world.serve(world.first)
        wanted = request(
            samples=4, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=40
        )
        prompt = wanted.prompt_token_ids.tolist()
        for tokens, logprobs in (await generate(world.engine, wanted)).values():
            exact = expected_logprobs(world.first, prompt, tokens, wanted.sampling)
            np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)

    async def test_logprobs_of_a_prompt_are_those_of_a_plain_forward_and_come_once(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        for prompt in PROMPTS:
            plain = request(prompt, samples=3, max_tokens=4, temperature=0.7, top_k=5)
            tokens = {i: t for i, (t, _) in (await generate(world.engine, plain)).items()}
            both = []
            for every_token in (False, True):
                wanted = replace(plain, with_prompt_logprobs=True)
                chunks = await chunks_of(world.engine, wanted, every_token=every_token)
                assert {i: t for i, (t, _) in samples_of(chunks).items()} == tokens
                both += [one.prompt_logprobs for one in chunks if one.prompt_logprobs]
            found, with_every_token = both
            exact = expected_logprobs(world.first, prompt[:1], prompt[1:], PLAIN)
            np.testing.assert_allclose(found.logprobs, exact, atol=TOLERANCE)
            np.testing.assert_allclose(with_every_token.logprobs, exact, atol=TOLERANCE)
            assert with_every_token.top_token_ids.tolist() == found.top_token_ids.tolist()
            for place, top in enumerate(found.top_token_ids.tolist(), start=1):
                assert greedy_tokens(world.first, prompt[:place], [top])
                exact = expected_logprobs(world.first, prompt[:place], [top], PLAIN)
                for one in both:
                    assert abs(one.top_logprobs[place - 1] - exact[0]) < TOLERANCE

    async def test_logprobs_of_a_prompt_are_of_the_prompt_alone_where_samples_continue(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        # Greedy: a continued sample need not draw the numbers of a whole one.
        wanted = request(PROMPTS[1], samples=2, max_tokens=8, temperature=0.0)
        whole = await generate(world.engine, wanted)
        partials = tuple(partial_sample(i, tokens[:3]) for i, (tokens, _) in whole.items())
        continued = replace(wanted, partials=partials, with_prompt_logprobs=True)
        chunks = await chunks_of(world.engine, continued)
        assert {i: t for i, (t, _) in samples_of(chunks).items()} == {
            i: tokens[3:] for i, (tokens, _) in whole.items()
        }
        (found,) = (one.prompt_logprobs for one in chunks if one.prompt_logprobs)
        exact = expected_logprobs(world.first, PROMPTS[1][:1], PROMPTS[1][1:], PLAIN)
        np.testing.assert_allclose(found.logprobs, exact, atol=TOLERANCE)

    async def test_a_seed_decides_a_samples_tokens_whatever_else_runs(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        alone = await generate(world.engine, request(samples=3, max_tokens=30))
        async with asyncio.TaskGroup() as tasks:
            for seed in (11, 12):
                tasks.create_task(
                    generate(world.engine, request(samples=6, max_tokens=30, seed=seed))
                )
            again = tasks.create_task(generate(world.engine, request(samples=3, max_tokens=30)))
        assert {i: t for i, (t, _) in again.result().items()} == {
            i: t for i, (t, _) in alone.items()
        }
        assert len({tuple(tokens) for tokens, _ in alone.values()}) == 3
        other = await generate(world.engine, request(samples=3, max_tokens=30, seed=4))
        assert all(other[index][0] != alone[index][0] for index in range(3))

    async def test_a_sample_alone_gets_the_same_tokens_as_in_its_group(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        group = await generate(world.engine, request(samples=4, max_tokens=20))
        lone = await generate(world.engine, request(samples=(2,), max_tokens=20))
        assert lone[2][0] == group[2][0]

    async def test_a_stop_token_ends_a_sample_which_includes_it(self, world: ContractWorld) -> None:
        await world.serve(world.first)
        free = await generate(world.engine, request(samples=6, max_tokens=30))
        stop = free[0][0][4]
        chunks = await chunks_of(world.engine, request(samples=6, max_tokens=30, stop=(stop,)))
        for index, (tokens, logprobs) in samples_of(chunks).items():
            whole = free[index][0]
            end = whole.index(stop) + 1 if stop in whole else len(whole)
            assert (tokens, len(logprobs)) == (whole[:end], end)
        reasons = {chunk.sample_index: chunk.finish_reason for chunk in chunks}
        assert reasons[0] is FinishReason.STOP

    async def test_the_models_end_token_ends_a_sample_unless_it_is_ignored(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        ignored = await generate(world.engine, request(samples=16, max_tokens=60))
        ended = await generate(world.engine, request(samples=16, max_tokens=60, ignore_eos=False))
        assert any(EOS in tokens[:-1] for tokens, _ in ignored.values())
        for index, (tokens, _) in ended.items():
            whole = ignored[index][0]
            assert tokens == (whole[: whole.index(EOS) + 1] if EOS in whole else whole)

    async def test_samples_end_at_max_tokens_or_where_the_context_ends(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        most = MAX_MODEL_LEN
        for prompt, max_tokens, expected in (
            (4, 1, 1),
            (4, 9, 9),
            (most - 6, 20, 6),
            (most - 1, 9, 1),
        ):
            chunks = await chunks_of(world.engine, request([3] * prompt, max_tokens=max_tokens))
            assert len(samples_of(chunks)[0][0]) == expected
            assert chunks[-1].finish_reason is FinishReason.LENGTH

    async def test_the_samples_of_a_group_share_the_prompts_prefill(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        prompt = np.random.default_rng(0).integers(8, VOCABULARY, 200).tolist()
        before = world.engine.load()
        await generate(world.engine, request(prompt, samples=16, max_tokens=4))
        after = world.engine.load()
        reused = after.reused_tokens - before.reused_tokens
        computed = after.prompt_tokens - before.prompt_tokens - reused
        assert 100 < computed < 3 * len(prompt), "16 prefills of their own would be 3200"

    async def test_every_token_comes_alone_when_asked_for(self, world: ContractWorld) -> None:
        await world.serve(world.first)
        wanted = request(samples=3, max_tokens=12)
        streamed = await chunks_of(world.engine, wanted, every_token=True)
        whole = await chunks_of(world.engine, wanted)
        assert [chunk.token_ids.size for chunk in whole] == [12, 12, 12]
        assert len(streamed) >= 30
        assert {i: t for i, (t, _) in samples_of(streamed).items()} == {
            i: t for i, (t, _) in samples_of(whole).items()
        }
        assert sum(chunk.finish_reason is not None for chunk in streamed) == 3

    async def test_tokens_of_unfinished_samples_come_at_intervals_when_asked_for(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        wanted = request(samples=2, max_tokens=ENDLESS)
        stream = world.engine.generate(wanted, every_token=False, partial_interval_s=0.02)
        async with asyncio.timeout(WAIT_S), aclosing(stream) as parts:
            seen = 0
            async for chunks in parts:
                assert all(chunk.finish_reason is None for chunk in chunks)
                seen += num_tokens(chunks)
                if seen > 20:
                    break
        assert seen > 20

    async def test_closing_the_iterator_frees_the_slots(self, world: ContractWorld) -> None:
        await world.serve(world.first)
        wanted = request(samples=SLOTS, max_tokens=ENDLESS)
        async with asyncio.timeout(WAIT_S):
            async with aclosing(world.engine.generate(wanted, every_token=True)) as stream:
                await anext(stream)
                assert world.engine.load().slots_busy == SLOTS
            load = await world.engine.check_alive()
            assert (load.slots_busy, load.queued) == (0, 0)
            other = world.engine.generate(request(max_tokens=ENDLESS), every_token=True)
            async with aclosing(other) as stream:
                await anext(stream)
                assert await world.insight.running_samples() == 1
            assert len(await generate(world.engine, request(samples=SLOTS, max_tokens=2))) == SLOTS

    async def test_cancelling_the_consumer_frees_the_slots_and_others_continue(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        other = request(samples=4, max_tokens=60, seed=8)
        alone = await generate(world.engine, other)
        async with asyncio.TaskGroup() as tasks:
            before = world.engine.load().generated_tokens
            expired = tasks.create_task(
                generate(world.engine, request(samples=4, max_tokens=ENDLESS))
            )
            await until(lambda: world.engine.load().generated_tokens > before or expired.done())
            kept = tasks.create_task(generate(world.engine, other))
            await until(lambda: world.engine.load().slots_busy == 8 or kept.done())
            expired.cancel()
        assert expired.cancelled()
        assert {i: t for i, (t, _) in kept.result().items()} == {
            i: t for i, (t, _) in alone.items()
        }
        assert (await world.engine.check_alive()).slots_busy == 0

    @pytest.mark.parametrize("every_token", [True, False])
    async def test_what_came_of_a_call_before_it_ended_is_what_it_would_have_begun_with(
        self, world: ContractWorld, every_token: bool
    ) -> None:
        await world.serve(world.first)
        wanted = request(samples=2, max_tokens=300, temperature=0.0)
        whole = await generate(world.engine, wanted)
        stream = world.engine.generate(wanted, every_token=every_token, partial_interval_s=0.02)
        taken: list[SampleChunk] = []
        async with asyncio.timeout(WAIT_S), aclosing(stream) as parts:
            async for chunks in parts:
                taken += chunks
                if {chunk.sample_index for chunk in taken} == {0, 1} and num_tokens(taken) > 20:
                    break
        assert all(chunk.finish_reason is None for chunk in taken)
        kept = samples_of(taken)
        partials = tuple(partial_sample(index, tokens) for index, (tokens, _) in kept.items())
        rest = await generate(world.engine, replace(wanted, partials=partials))
        for index, (tokens, logprobs) in kept.items():
            assert [*tokens, *rest[index][0]] == whole[index][0]
            np.testing.assert_allclose(
                [*logprobs, *rest[index][1]], whole[index][1], atol=TOLERANCE
            )

    async def test_a_greedy_sample_that_is_continued_ends_as_it_would_have(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        whole = await generate(world.engine, request(samples=3, max_tokens=20, temperature=0.0))
        partial = partial_sample(1, whole[1][0][:8])
        wanted = request(samples=3, max_tokens=20, temperature=0.0, partials=(partial,))
        continued = await generate(world.engine, wanted)
        assert continued[1][0] == whole[1][0][8:]
        np.testing.assert_allclose(continued[1][1], whole[1][1][8:], atol=TOLERANCE)
        assert continued[0][0] == whole[0][0]

    async def test_a_continued_sample_has_the_logprobs_of_its_whole_prefix(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        begun = [int(token) for token in np.random.default_rng(1).integers(8, VOCABULARY, 37)]
        partial = partial_sample(0, begun)
        wanted = request(max_tokens=60, temperature=0.8, top_p=0.9, partials=(partial,))
        tokens, logprobs = (await generate(world.engine, wanted))[0]
        assert len(tokens) == 60 - 37
        prefix = [*wanted.prompt_token_ids.tolist(), *begun]
        exact = expected_logprobs(world.first, prefix, tokens, wanted.sampling)
        np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)

    @pytest.mark.parametrize(
        ("partial", "reason"),
        [([4, 5, 6], FinishReason.LENGTH), ([4, EOS], FinishReason.STOP)],
    )
    async def test_a_continued_sample_that_is_complete_ends_at_once(
        self, world: ContractWorld, partial: list[int], reason: FinishReason
    ) -> None:
        await world.serve(world.first)
        partials = (partial_sample(0, partial),)
        wanted = request(max_tokens=3, ignore_eos=False, partials=partials)
        (chunk,) = await chunks_of(world.engine, wanted)
        assert (chunk.token_ids.size, chunk.finish_reason) == (0, reason)

    @pytest.mark.parametrize(
        ("wanted", "named"),
        [
            (request([]), "0 tokens"),
            (request([3] * MAX_MODEL_LEN), f"{MAX_MODEL_LEN} tokens"),
            (request([3, VOCABULARY]), str(VOCABULARY)),
        ],
    )
    async def test_a_request_that_cannot_be_generated_is_refused_and_others_continue(
        self, world: ContractWorld, wanted: GenerationRequest, named: str
    ) -> None:
        await world.serve(world.first)
        with pytest.raises(InvalidRequestError, match=named):
            await generate(world.engine, wanted)
        assert len((await generate(world.engine, request()))[0][0]) == 12

    async def test_128_samples_run_at_once_and_all_are_exact(self, world: ContractWorld) -> None:
        await world.serve(world.first)
        random = np.random.default_rng(3)
        wanted = [
            request(random.integers(8, VOCABULARY, int(length)).tolist(), samples=8, max_tokens=24)
            for length in random.integers(1, 60, 16)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(generate(world.engine, one)) for one in wanted]
            await until(
                lambda: world.engine.load().slots_busy == 128 or all(t.done() for t in running)
            )
        for one, task in zip(wanted, running, strict=True):
            assert sorted(task.result()) == list(range(8))
            for tokens, logprobs in task.result().values():
                exact = expected_logprobs(world.first, one.prompt_token_ids.tolist(), tokens, PLAIN)
                assert len(tokens) == 24
                np.testing.assert_allclose(logprobs, exact, atol=TOLERANCE)

    async def test_every_sampled_token_is_sent_unsent_or_on_its_way(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        before = world.engine.load()
        wanted = request(samples=4, max_tokens=10)
        chunks = await chunks_of(world.engine, wanted)
        assert wanted.tokens.sampled == num_tokens(chunks) == 40
        world.engine.accounting.services.sent += 40
        endless = request(max_tokens=ENDLESS)
        stream = world.engine.generate(endless, every_token=True)
        async with asyncio.timeout(WAIT_S), aclosing(stream) as parts:
            await anext(parts)
        world.engine.accounting.services.unsent += endless.tokens.sampled
        after = await settled(world.engine, before)
        sampled = after.generated_tokens - before.generated_tokens
        assert sampled == 40 + endless.tokens.sampled > 40
        assert after.unsent_tokens - before.unsent_tokens == endless.tokens.sampled
        assert after.busy_seconds > before.busy_seconds

    async def test_what_a_direct_client_did_not_take_is_entered_for_direct_clients(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        before = world.engine.load()
        wanted = replace(request(max_tokens=ENDLESS), for_direct_client=True)
        stream = world.engine.generate(wanted, every_token=True)
        counted = world.engine.accounting.direct
        async with asyncio.timeout(WAIT_S), aclosing(stream) as parts:
            taken = num_tokens(await anext(parts))
            enough = before.generated_tokens + taken + 5
            while world.engine.load().generated_tokens < enough:
                await asyncio.sleep(0)
        counted.sent += taken
        counted.unsent += wanted.tokens.sampled - taken
        after = await settled(world.engine, before)
        sampled = after.generated_tokens - before.generated_tokens
        sent = after.direct_sent_tokens - before.direct_sent_tokens
        unsent = after.direct_unsent_tokens - before.direct_unsent_tokens
        assert sampled == sent + unsent > 0
        assert unsent == after.unsent_tokens - before.unsent_tokens
        assert after.running_tokens == before.running_tokens


def text_of(token_ids: TokenIds | Sequence[int]) -> str:
    """One character a token."""
    return "".join(chr(0x100 + int(token)) for token in token_ids)


def stopped_by(wanted: GenerationRequest, *stops: str) -> GenerationRequest:
    """The request with strings that end its samples."""
    return replace(wanted, sampling=replace(wanted.sampling, stop=stops), decode=text_of)


class StopStringContract:
    """Rules that one running engine can be asked for in any order."""

    @pytest.mark.parametrize("every_token", [True, False])
    async def test_a_sample_ends_with_the_token_that_completes_a_stop_string(
        self, world: ContractWorld, every_token: bool
    ) -> None:
        await world.serve(world.first)
        before = await world.engine.check_alive()
        free = await generate(world.engine, request(samples=6, max_tokens=30))
        stops = (text_of(free[0][0][4:7]), text_of(free[3][0][9:10]), "never sampled")
        wanted = stopped_by(request(samples=6, max_tokens=30), *stops)
        chunks = await chunks_of(world.engine, wanted, every_token=every_token)
        reasons = {chunk.sample_index: chunk.finish_reason for chunk in chunks}
        for index, (tokens, logprobs) in samples_of(chunks).items():
            whole = free[index][0]
            ends = [n for n in range(31) if any(stop in text_of(whole[:n]) for stop in stops)]
            assert tokens == whole[: min(ends, default=30)]
            assert len(logprobs) == len(tokens)
            assert reasons[index] is (FinishReason.STOP if ends else FinishReason.LENGTH)
        assert len(samples_of(chunks)[0][0]) <= 7
        # Tokens that the engine sampled beyond the string were not sent.
        counted, beyond = (
            world.engine.accounting.services,
            wanted.tokens.sampled - num_tokens(chunks),
        )
        counted.sent += 6 * 30 + num_tokens(chunks)
        counted.unsent += beyond
        after = await settled(world.engine, before)
        sampled = after.generated_tokens - before.generated_tokens
        assert sampled == 180 + wanted.tokens.sampled
        assert beyond >= 0

    async def test_a_stop_string_may_begin_in_the_part_that_is_continued(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        free = request(max_tokens=20, temperature=0.0)
        whole = (await generate(world.engine, free))[0][0]
        stop = text_of(whole[6:10])
        end = text_of(whole).index(stop) + 4
        for begun in (end - 2, end, end + 1):
            partials = (partial_sample(0, whole[:begun]),)
            wanted = stopped_by(replace(free, partials=partials), stop)
            chunks = await chunks_of(world.engine, wanted)
            assert samples_of(chunks)[0][0] == whole[begun:end]
            assert chunks[-1].finish_reason is FinishReason.STOP

    async def test_stop_strings_need_a_decoder_and_are_not_empty(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        wanted = stopped_by(request(), "x")
        for broken in (replace(wanted, decode=None), stopped_by(request(), "x", "")):
            with pytest.raises(InvalidRequestError, match=r"sampling\.stop"):
                await generate(world.engine, broken)


class PriorityContract:
    """Rules of priorities, on a running engine that any rule may have used before."""

    async def test_of_samples_that_wait_the_one_of_the_highest_priority_goes_first(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        running: set[tuple[int, int]] = set()
        ended: list[int] = []

        async def occupy(slots: int) -> None:
            endless = request(samples=slots, max_tokens=ENDLESS)
            stream = world.engine.generate(endless, every_token=True, partial_interval_s=None)
            async with aclosing(stream) as all_chunks:  # type: ignore[type-var]
                async for chunks in all_chunks:
                    running.update((slots, chunk.sample_index) for chunk in chunks)

        async def draw(priority: int) -> None:
            # Requests of one sample: an engine may send the others after the first has its prompt.
            wanted = replace(request(max_tokens=3), priority=priority)
            async with asyncio.TaskGroup() as drawing:
                for _ in range(BATCH):
                    drawing.create_task(chunks_of(world.engine, wanted))
            ended.append(priority)

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            most = tasks.create_task(occupy(SLOTS - BATCH))
            last = tasks.create_task(occupy(BATCH))
            await until(lambda: len(running) == SLOTS)
            async with asyncio.TaskGroup() as waiting:
                for queued, priority in enumerate((0, -5, 7, 3), start=1):
                    waiting.create_task(draw(priority))
                    await until(lambda n=queued: world.engine.load().queued == n * BATCH)  # type: ignore[misc]
                for _ in range(2):  # what was sent before has reached the engine then
                    await world.engine.check_alive()
                last.cancel()
            most.cancel()
        assert ended == [7, 3, 0, -5]
