"""What every inference engine promises of strings that end a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.rollout.engines.protocol import GenerationRequest, PartialSample, num_tokens
from sluice.errors import InvalidRequestError
from sluice.types import FinishReason, TokenIds
from tests.support.causal_lms import request, samples_of
from tests.support.engine_contract_calls import chunks_of, generate, settled
from tests.support.engine_contract_world import ContractWorld


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
        before = await world.engine.probe()
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
        assert wanted.tokens.yielded == num_tokens(chunks)
        # Tokens that the engine sampled beyond the string were not sent.
        world.engine.accounting.services.sent += 6 * 30 + num_tokens(chunks)
        after = await settled(world.engine, before)
        sampled = after.generated_tokens - before.generated_tokens
        assert sampled == 180 + num_tokens(chunks) + after.unsent_tokens - before.unsent_tokens

    async def test_a_stop_string_may_begin_in_the_part_that_is_continued(
        self, world: ContractWorld
    ) -> None:
        await world.serve(world.first)
        free = request(max_tokens=20, temperature=0.0)
        whole = (await generate(world.engine, free))[0][0]
        stop = text_of(whole[6:10])
        end = text_of(whole).index(stop) + 4
        for begun in (end - 2, end, end + 1):
            partials = (PartialSample(0, np.array(whole[:begun], np.uint32)),)
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
