"""Tokens of unfinished samples leave at intervals, so that another replica can continue them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from services.rollout.engines.protocol import (
    GenerationRequest,
    RequestTokens,
    SampleChunk,
)
from services.rollout.generation import GenerationEvent, GenerationRunner, StreamSettings
from sluice.algorithm.growing_sample import GrowingSample
from sluice.types import FinishReason, Rollout, TokenIds
from tests.support.causal_lms import (
    reference_model,
    request,
    running_engine,
    samples_of,
    save_config,
)

EVERY_STEP = 1e-9
STOP = FinishReason.STOP


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    return reference_model(model_path)


class Digits:
    """Text of tokens; notes how often it was asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def decode(self, token_ids: TokenIds) -> str:
        self.num_calls += 1
        return " ".join(map(str, token_ids.tolist()))


@dataclass
class Load:
    generated_tokens: int = 0
    queued: int = 1
    slots_may_wait: bool = False


class ScriptedEngine:
    """Yields chunks; waits for numbers of seconds; changes what its load says by calls."""

    def __init__(self, *script: Any, queued: int = 1, slots_may_wait: bool = False) -> None:
        self.script = script
        self.accounting = RequestTokens()
        self.tokens = Load(queued=queued, slots_may_wait=slots_may_wait)

    def load(self) -> Load:
        return self.tokens

    async def generate(
        self, request: GenerationRequest, *, every_token: bool, partial_interval_s: float | None
    ) -> AsyncIterator[tuple[SampleChunk, ...]]:
        for item in self.script:
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, int):
                self.tokens.generated_tokens = item
            else:
                await asyncio.sleep(0)
                yield (item,)


def chunk(index: int, *tokens: int, finish: FinishReason | None = None) -> SampleChunk:
    ids = np.array(tokens, np.uint32)
    return SampleChunk(index, ids, -ids.astype(np.float32), 0, finish)


async def events_of(
    engine: Any, wanted: GenerationRequest, options: StreamSettings
) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []

    async def send(event: GenerationEvent) -> None:
        events.append(event)

    async with asyncio.timeout(60):
        await GenerationRunner(engine, Digits().decode).run(wanted, options, send)
    return events


async def test_tokens_of_unfinished_samples_travel_without_text_and_the_whole_follows() -> None:
    engine = ScriptedEngine(chunk(0, 1, 2), chunk(1, 3), chunk(0, 4, finish=STOP))
    engine.script += (chunk(1, 5, finish=STOP),)
    events = await events_of(engine, request(samples=2), StreamSettings(partial_interval_s=9.0))
    deltas = [(d.chunk.sample_index, d.chunk.token_ids.tolist(), d.text)
              for event in events for d in event.deltas]  # fmt: skip
    assert deltas == [(0, [1, 2], ""), (1, [3], "")]
    wholes = {r.sample_index: (r.token_ids.tolist(), r.text) for e in events for r in e.rollouts}
    assert wholes == {0: ([1, 2, 4], "1 2 4"), 1: ([3, 5], "3 5")}


async def test_a_sample_that_ends_within_the_interval_is_sent_once() -> None:
    engine = ScriptedEngine(chunk(0, 1, 2, finish=STOP), chunk(1, 3, finish=STOP))
    events = await events_of(engine, request(samples=2), StreamSettings(partial_interval_s=9.0))
    assert [delta for event in events for delta in event.deltas] == []


@pytest.mark.usefixtures("waits_take_no_time")
async def test_a_group_that_waits_gets_a_sign_whether_the_engine_samples() -> None:
    engine = ScriptedEngine(7, 0.1, 9, 0.1, 0.1, chunk(0, 1, finish=STOP))
    events = await events_of(engine, request(), StreamSettings(partial_interval_s=0.01))
    signs = [event.engine_tokens for event in events if event.engine_tokens is not None]
    assert signs == [7, 9]
    assert events[-1].rollouts[0].num_tokens == 1


@pytest.mark.usefixtures("waits_take_no_time")
async def test_a_group_without_waiting_samples_gets_no_sign_of_others_tokens() -> None:
    engine = ScriptedEngine(7, 0.1, 9, 0.1, chunk(0, 1, finish=STOP), queued=0)
    events = await events_of(engine, request(), StreamSettings(partial_interval_s=0.01))
    assert [event.engine_tokens for event in events] == [None]


@pytest.mark.usefixtures("waits_take_no_time")
@pytest.mark.parametrize("every_token", [False, True])
async def test_a_group_whose_slots_wait_for_cache_space_gets_a_sign_that_the_engine_samples(
    every_token: bool,
) -> None:
    script = (7, 0.1, 9, 0.1, chunk(0, 1, finish=STOP))
    engine = ScriptedEngine(*script, queued=0, slots_may_wait=True)
    options = StreamSettings(every_token=every_token, partial_interval_s=0.01)
    events = await events_of(engine, request(), options)
    assert [e.engine_tokens for e in events if e.engine_tokens is not None] == [7, 9]


@pytest.mark.usefixtures("waits_take_no_time")
async def test_without_an_interval_there_is_no_sign_of_the_engine() -> None:
    engine = ScriptedEngine(7, 0.1, chunk(0, 1, finish=STOP))
    assert len(await events_of(engine, request(), StreamSettings())) == 1


@pytest.mark.parametrize(
    ("interval_s", "samples", "tokens"), [(EVERY_STEP, 4, 16), (0.01, 12, 40), (1e9, 12, 40)]
)
async def test_partial_tokens_and_whole_samples_say_the_same(
    interval_s: float, samples: int, tokens: int, model_path: Path, model: PreTrainedModel
) -> None:
    wanted = request(samples=samples, max_tokens=tokens, ignore_eos=False)
    async with running_engine(model_path, model, max_model_len=64) as engine:
        events = await events_of(engine, wanted, StreamSettings(partial_interval_s=interval_s))
    grown: dict[int, GrowingSample] = {}
    wholes: dict[int, Rollout] = {}
    for event in events:
        for delta in event.deltas:
            part = delta.chunk
            assert part.sample_index not in wholes
            sample = grown.setdefault(part.sample_index, GrowingSample())
            sample.append(part.token_ids, part.behavior_logprobs, part.version)
        wholes |= {rollout.sample_index: rollout for rollout in event.rollouts}
    assert sorted(wholes) == list(range(samples))
    for index, sample in grown.items():
        partial, whole = sample.rollout(index), wholes[index]
        assert partial.token_ids.tolist() == whole.token_ids.tolist()[: partial.num_tokens]
        assert (
            partial.behavior_logprobs.tolist()
            == whole.behavior_logprobs.tolist()[: partial.num_tokens]
        )
    assert bool(grown) == (interval_s < 1)


async def test_samples_broken_off_anywhere_continue_as_if_nothing_had_happened(
    model_path: Path, model: PreTrainedModel
) -> None:
    wanted = request(samples=4, max_tokens=30)
    async with running_engine(model_path, model) as engine:
        (unbroken,) = [await events_of(engine, wanted, StreamSettings())]
        wholes = {r.sample_index: r for event in unbroken for r in event.rollouts}
        for cut in (1, 7, 29):
            partials = [_first(wholes[index], cut + index % 2) for index in (0, 2, 3)]
            again = request(
                samples=4,
                max_tokens=30,
                partials=tuple(partials),
            )
            events = await events_of(engine, again, StreamSettings())
            for rollout in (r for event in events for r in event.rollouts):
                whole = wholes[rollout.sample_index]
                assert rollout.token_ids.tolist() == whole.token_ids.tolist()
                np.testing.assert_allclose(
                    rollout.behavior_logprobs, whole.behavior_logprobs, atol=1e-4
                )


def _first(rollout: Rollout, size: int) -> Rollout:
    grown = GrowingSample()
    grown.append(rollout.token_ids[:size], rollout.behavior_logprobs[:size], 1)
    return grown.rollout(rollout.sample_index)


async def test_tokens_are_handed_out_once_an_interval_no_matter_what_else_runs(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, model: PreTrainedModel
) -> None:
    clock = _Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    async with running_engine(model_path, model, slots=2, max_model_len=64) as engine:
        wanted = request(samples=3, max_tokens=20)
        async with aclosing(
            engine.generate(wanted, every_token=False, partial_interval_s=5.0)
        ) as stream:
            chunks = [one async for some in stream for one in some]
    assert all(len(tokens) == 20 for tokens, _ in samples_of(chunks).values())
    handed_out = [one for one in chunks if one.finish_reason is None]
    assert {one.sample_index for one in handed_out} == {0, 1, 2}
    assert len(handed_out) < 3 * 20 / 2


class _Clock:
    """A second passes whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
