"""One request's samples, over a client that is not vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.protocol import GenerationRequest, PartialSample, SampleChunk
from services.rollout.engines.vendor.samples import Delta, ModelLimits, Pace, SamplingChoice
from services.rollout.engines.vllm.client import PromptInputs
from services.rollout.engines.vllm.request import VllmRequest
from sluice.errors import EngineError
from sluice.types import FinishReason
from tests.support.causal_lms import EOS, request

_LIMITS = ModelLimits(48, (EOS,))
_WHOLE = Pace(every_token=False, interval_s=None)


class _Serving:
    def __init__(self) -> None:
        self.version: int | None = 1
        self.sampled = self.prefilled = 0

    def count(self, sampled: int, prefilled: int) -> None:
        self.sampled += sampled
        self.prefilled += prefilled

    async def wait_to_begin(self) -> None:
        return


class _Client:
    """Plays the same deltas to every sample; an int among them is the version from there on."""

    def __init__(self, script: Sequence[Delta | int | Exception], serving: _Serving) -> None:
        self._script, self._serving = script, serving
        self.asked: list[tuple[list[int], str, SamplingChoice]] = []
        self.priorities: list[int] = []

    async def generate(
        self, _: str, inputs: PromptInputs, choice: SamplingChoice, priority: int
    ) -> AsyncIterator[Delta]:
        self.priorities.append(priority)
        self.asked.append((list(inputs.token_ids), inputs.salt, choice))
        for one in self._script:
            if isinstance(one, int):
                self._serving.version = one
            elif isinstance(one, Exception):
                raise one
            else:
                yield one


def _delta(tokens: Sequence[int], finish: str | None = None, spans: tuple[Any, ...] = ()) -> Delta:
    return Delta(tokens, [-0.5 * token for token in tokens], finish, 2, spans)


async def _run(
    script: Sequence[Delta | int | Exception], wanted: GenerationRequest, pace: Pace = _WHOLE
) -> tuple[list[SampleChunk], _Client, _Serving]:
    serving = _Serving()
    client, chunks = _Client(script, serving), []
    run = VllmRequest(client, 7, wanted, None, _LIMITS, pace, serving, chunks.extend)  # type: ignore[arg-type]
    await run.run()
    assert run.sampled == serving.sampled
    return chunks, client, serving


def _reported(chunks: Sequence[SampleChunk]) -> list[tuple[list[int], int, FinishReason | None]]:
    return [(chunk.token_ids.tolist(), chunk.version, chunk.finish_reason) for chunk in chunks]


async def test_vllms_account_of_versions_corrects_what_was_not_handed_on() -> None:
    spans = (("1", 0, 2), ("2", 2, 4))
    script = [_delta([4]), 2, _delta([5]), _delta([6, 8], "length", spans)]
    chunks, _, _ = await _run(script, request())
    assert _reported(chunks) == [([4, 5], 1, None), ([6, 8], 2, FinishReason.LENGTH)]


async def test_tokens_handed_on_as_another_version_are_an_error() -> None:
    script = [_delta([4]), 2, _delta([5]), _delta([6], "length", (("1", 0, 2), ("2", 2, 3)))]
    with pytest.raises(EngineError, match="handed on as version 2"):
        await _run(script, request(), Pace(every_token=True, interval_s=None))


async def test_seeds_differ_by_seed_sample_and_first_token() -> None:
    partial = PartialSample(0, np.array([8], np.uint32))
    seeds = set()
    for wanted in (request(samples=3), request(seed=4), request(partials=(partial,))):
        _, client, _ = await _run([_delta([5], "stop")], wanted)
        seeds |= {choice.seed for _, _, choice in client.asked}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_every_sample_has_its_requests_priority() -> None:
    _, client, _ = await _run([_delta([5], "stop")], replace(request(samples=2), priority=-3))
    assert client.priorities == [-3, -3]


async def test_nothing_more_is_asked_for_of_a_sample_that_a_stop_string_ends() -> None:
    wanted = request(max_tokens=9)
    sampling = replace(wanted.sampling, stop=("56",))
    wanted = replace(wanted, sampling=sampling, decode=lambda ids: "".join(map(str, ids)))
    script = [_delta([4, 5]), _delta([6, 7, 8]), EngineError("nothing more is asked for")]
    chunks, _, serving = await _run(script, wanted)
    assert _reported(chunks) == [([4, 5, 6], 1, FinishReason.STOP)]
    assert serving.sampled == 5
