"""Stop strings from a request to its samples, with the embedded engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.rollout.engines.embedded.engine import TorchEngine
from services.rollout.generation import GenerationEvent, GenerationRunner, StreamOptions
from sluice.types import FinishReason, Rollout
from tests.support.causal_lms import reference_model, request, running_engine, save_config
from tests.support.replica_process import ToyEncoder


async def _samples(
    engine: TorchEngine, stop: tuple[str, ...], delivery: StreamOptions
) -> tuple[dict[int, Rollout], str]:
    """The samples, and the text that sample 0 streamed."""
    events: list[GenerationEvent] = []

    async def send(event: GenerationEvent) -> None:
        events.append(event)

    wanted = request(samples=3, max_tokens=20)
    wanted = replace(wanted, sampling=replace(wanted.sampling, stop=stop))
    async with asyncio.timeout(30):
        await GenerationRunner(engine, ToyEncoder()).run(wanted, (), delivery, send)
    deltas = [delta for event in events for delta in event.deltas]
    streamed = "".join(delta.text for delta in deltas if delta.chunk.sample_index == 0)
    return {one.sample_index: one for event in events for one in event.rollouts}, streamed


@pytest.mark.parametrize("every_token", [True, False])
async def test_a_stop_string_of_several_tokens_ends_a_sample(
    tmp_path: Path, every_token: bool
) -> None:
    folder, delivery = save_config("qwen3", tmp_path), StreamOptions(every_token=every_token)
    async with running_engine(folder, reference_model(folder)) as engine:
        free, _ = await _samples(engine, (), delivery)
        ids = free[0].token_ids.tolist()
        stop = f"{ids[7]} {ids[8]} "  # is there with the first digit after the space
        found, streamed = await _samples(engine, (stop, "never"), delivery)
    assert found[0].token_ids.tolist() == ids[:10]
    assert found[0].finish_reason is FinishReason.STOP
    assert found[0].text == free[0].text[: free[0].text.index(stop)]
    assert streamed == (found[0].text if every_token else "")
    for index in (1, 2):
        assert stop not in found[index].text
