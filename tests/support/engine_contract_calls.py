"""How the engine contract calls an engine, and what it measures answers by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np
import torch
from transformers import PreTrainedModel

from services.rollout.engines.protocol import Engine, EngineLoad, GenerationRequest, SampleChunk
from sluice.types import SamplingParams
from tests.support.causal_lms import Samples, expected_logprobs, samples_of
from tests.support.engine_contract_world import MAX_MODEL_LEN, SLOTS

TOLERANCE = 1e-4
ENDLESS = MAX_MODEL_LEN - 200
WAIT_S = 120
BATCH = SLOTS // 16
"""Slots that an engine may wait for before it fills them."""
PROMPTS = ([5], [5, 9, 23, 54], list(range(8, 48)), [3, 3, 3, 90, 91, 92, 17])
PLAIN = SamplingParams(1.0, 1.0, -1, 1, 0)


async def chunks_of(
    engine: Engine,
    wanted: GenerationRequest,
    *,
    every_token: bool = False,
    interval_s: float | None = None,
) -> list[SampleChunk]:
    """All chunks of a request, in order."""
    stream = engine.generate(wanted, every_token=every_token, partial_interval_s=interval_s)
    async with asyncio.timeout(WAIT_S), aclosing(stream) as all_chunks:
        return [chunk async for chunks in all_chunks for chunk in chunks]


async def generate(engine: Engine, wanted: GenerationRequest) -> Samples:
    """Runs a request to its end."""
    return samples_of(await chunks_of(engine, wanted))


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)


async def settled(engine: Engine, before: EngineLoad) -> EngineLoad:
    """The load once no more tokens are on their way than were `before`.

    What was sampled when a call ended may still be on its way to the event loop.
    """
    async with asyncio.timeout(WAIT_S):
        while (load := await engine.probe()).running_tokens != before.running_tokens:
            pass
    return load


def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each token is the most likely one of a full forward pass, or as likely as that."""
    best = expected_logprobs(model, prompt, tokens, PLAIN)
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return np.allclose(logits.log_softmax(-1).max(-1).values.numpy(), best, atol=TOLERANCE)
