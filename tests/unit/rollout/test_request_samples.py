"""One request's samples, drawn by a script in place of a vendor's engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.protocol import GenerationRequest, PartialSample, SampleChunk
from services.rollout.engines.vendor.samples import (
    Delta,
    ModelLimits,
    Pace,
    RequestSamples,
    VendorSample,
    VersionSpans,
)
from sluice.errors import EngineError
from sluice.types import FinishReason
from tests.support.causal_lms import EOS, request

_LIMITS = ModelLimits(48, (EOS,))
_WHOLE = Pace(every_token=False, interval_s=None)
_SINGLE = Pace(every_token=True, interval_s=None)
_Script = Sequence[Delta | int | Exception | None]


class _Serving:
    def __init__(self) -> None:
        self.version: int | None = 1
        self.sampled = self.prefilled = 0

    def count(self, sampled: int, prefilled: int) -> None:
        self.sampled += sampled
        self.prefilled += prefilled


class _Generation:
    """Plays the same deltas to every sample.

    An int among them is the version from there on, a ``None`` waits for tokens to be handed on, and
    an error is that of the first sample, while the others wait for good.
    """

    def __init__(self, script: _Script, wanted: GenerationRequest, pace: Pace = _WHOLE) -> None:
        self._script, self.serving = script, _Serving()
        self.chunks: list[SampleChunk] = []
        self.asked: list[VendorSample] = []
        self.settled: list[VersionSpans] = []
        self.refusal: EngineError | None = None
        self.waiting, self.cancelled = 0, 0
        self._posted = asyncio.Event()
        self.samples = RequestSamples(
            "Vendor", wanted, _LIMITS, pace, self.serving, self._settle, self._post
        )

    def _settle(self, _: VendorSample, spans: VersionSpans) -> None:
        self.settled.append(spans)
        if self.refusal is not None:
            raise self.refusal

    def _post(self, chunks: list[SampleChunk]) -> None:
        self.chunks += chunks
        self._posted.set()

    async def _sample(self, sample: VendorSample) -> None:
        self.asked.append(sample)
        try:
            for one in self._script:
                await asyncio.sleep(0)
                if one is None:
                    self.waiting += 1
                    await self._posted.wait()
                elif isinstance(one, int):
                    self.serving.version = one
                elif isinstance(one, Exception):
                    if sample.index == 0:
                        raise one
                    await asyncio.Event().wait()
                elif self.samples.take(sample, one):
                    return
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def end(self) -> _Generation:
        """Draws to the end."""
        self.samples.enter(lambda index, continued: 100 * index + continued)
        async with asyncio.timeout(10):
            await self.samples.run(self._sample)
        assert self.samples.sampled == self.serving.sampled
        return self

    @property
    def reported(self) -> list[tuple[list[int], int, FinishReason | None]]:
        return [
            (chunk.token_ids.tolist(), chunk.version, chunk.finish_reason) for chunk in self.chunks
        ]


def _delta(tokens: Sequence[int], finish: str | None = None, spans: tuple[Any, ...] = ()) -> Delta:
    return Delta(tokens, [-0.5 * token for token in tokens], finish, 2, spans)


async def test_tokens_come_in_one_chunk_a_version_when_the_sample_ends() -> None:
    script = [_delta([4]), _delta([5, 6]), 2, _delta([8]), _delta([9], "stop")]
    generating = await _Generation(script, request()).end()
    assert generating.reported == [([4, 5, 6], 1, None), ([8, 9], 2, FinishReason.STOP)]
    np.testing.assert_array_equal(generating.chunks[1].behavior_logprobs, np.float32([-4, -4.5]))
    assert (generating.serving.sampled, generating.serving.prefilled) == (5, 2)


async def test_every_token_goes_on_as_it_comes_when_asked_for() -> None:
    script = [_delta([4]), _delta([5]), _delta([], "abort")]
    generating = await _Generation(script, request(), _SINGLE).end()
    assert generating.reported == [([4], 1, None), ([5], 1, None), ([], 1, FinishReason.ABORTED)]


async def test_tokens_that_came_together_go_on_one_by_one_when_asked_for() -> None:
    generating = await _Generation(
        [_delta([4, 5]), _delta([6, 7], "stop")], request(), _SINGLE
    ).end()
    parts = [([4], 1, None), ([5], 1, None), ([6], 1, None), ([7], 1, FinishReason.STOP)]
    assert generating.reported == parts
    assert [chunk.behavior_logprobs.tolist() for chunk in generating.chunks] == [
        [-2.0],
        [-2.5],
        [-3.0],
        [-3.5],
    ]


async def test_tokens_of_unfinished_samples_go_on_at_the_interval_asked_for() -> None:
    script = [_delta([4]), 2, _delta([5]), None, _delta([6], "length")]
    pace = Pace(every_token=False, interval_s=0.001)
    generating = await _Generation(script, request(), pace).end()
    assert generating.reported == [([4], 1, None), ([5], 2, None), ([6], 2, FinishReason.LENGTH)]


async def test_a_finished_sample_is_held_against_the_engines_account_before_it_goes_on() -> None:
    spans = (("1", 0, 1), ("2", 1, 2))
    script = [_delta([4]), 2, _delta([5], "length", spans)]
    generating = await _Generation(script, request()).end()
    assert generating.settled == [spans]
    refusing = _Generation(script, request())
    refusing.refusal = EngineError("other weights")
    with pytest.raises(EngineError, match="other weights"):
        await refusing.end()
    assert refusing.chunks == []


async def test_a_partial_is_part_of_the_prompt_and_of_the_limit() -> None:
    partial = PartialSample(1, np.array([8, 9], np.uint32))
    wanted = request([3, 4], samples=2, max_tokens=5, partials=(partial,), ignore_eos=False)
    generating = await _Generation([_delta([5], "stop")], wanted).end()
    by_prompt = {tuple(sample.prompt): sample.choice for sample in generating.asked}
    assert (by_prompt[3, 4].max_tokens, by_prompt[3, 4].seed) == (5, 0)
    assert (by_prompt[3, 4, 8, 9].max_tokens, by_prompt[3, 4, 8, 9].seed) == (3, 102)
    assert by_prompt[3, 4].stop_token_ids == (EOS,)


async def test_the_context_bounds_max_tokens() -> None:
    generating = await _Generation([_delta([5], "length")], request([3] * 40, max_tokens=20)).end()
    assert generating.asked[0].choice.max_tokens == 8


@pytest.mark.parametrize(
    ("partial", "reason"), [([4, EOS], FinishReason.STOP), ([4, 5, 6], FinishReason.LENGTH)]
)
async def test_a_complete_partial_is_not_drawn(partial: list[int], reason: FinishReason) -> None:
    partials = (PartialSample(0, np.array(partial, np.uint32)),)
    wanted = request(max_tokens=3, partials=partials, ignore_eos=False)
    generating = await _Generation([], wanted).end()
    assert (generating.reported, generating.asked) == ([([], 1, reason)], [])


@pytest.mark.parametrize("finish", [None, "length"])
async def test_a_stop_string_ends_a_sample_in_the_middle_of_what_came(finish: str | None) -> None:
    wanted = request(max_tokens=9)
    sampling = replace(wanted.sampling, stop=("56",))
    wanted = replace(wanted, sampling=sampling, decode=lambda ids: "".join(map(str, ids)))
    script = [_delta([4, 5]), _delta([6, 7, 8], finish), EngineError("nothing more is wanted")]
    generating = await _Generation(script, wanted).end()
    assert generating.reported == [([4, 5, 6], 1, FinishReason.STOP)]
    assert generating.serving.sampled == 5


async def test_a_failing_sample_fails_its_request_and_the_others_are_cancelled() -> None:
    generating = _Generation([_delta([4]), EngineError("boom")], request(samples=3))
    with pytest.raises(EngineError, match="boom"):
        await generating.end()
    assert (len(generating.asked), generating.cancelled) == (3, 2)


async def test_samples_end_with_what_they_have_and_once_only() -> None:
    generating = _Generation([_delta([4]), _delta([5]), None], request(samples=2))
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(generating.end())
        async with asyncio.timeout(10):
            while generating.waiting < 2:
                await asyncio.sleep(0)
        generating.samples.end(FinishReason.ABORTED)
        generating.samples.end(FinishReason.ABORTED)
        await ended
    assert generating.reported == [([4, 5], 1, FinishReason.ABORTED)] * 2


async def test_without_weights_nothing_is_drawn() -> None:
    generating = _Generation([_delta([4], "stop")], request())
    generating.serving.version = None
    with pytest.raises(EngineError, match="Vendor: a sample runs before the first weights"):
        await generating.end()
