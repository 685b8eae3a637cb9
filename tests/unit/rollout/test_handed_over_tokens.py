"""Every token that an engine sampled was sent, is unsent, or is on its way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.protocol import (
    EngineLoad,
    GenerationRequest,
    RequestTokens,
    SampleChunk,
)
from services.rollout.generation import (
    GenerationEvent,
    GenerationRunner,
    StreamSettings,
)
from sluice.errors import InvalidRequestError
from sluice.types import FinishReason, Logprobs, Rollout, TokenIds, VersionSpan
from tests.support.causal_lms import (
    load_weights,
    reference_model,
    request,
    running_engine,
    save_config,
    weights_of,
)
from tests.support.engine_contract_world import num_tokens

MAX_TOKENS = 30
WAYS_TO_TRAVEL = (
    StreamSettings(),
    StreamSettings(every_token=True),
    StreamSettings(linger_s=0.005),
    StreamSettings(partial_interval_s=0.002),
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    return reference_model(model_path)


class Digits:
    """Text of tokens."""

    def decode(self, token_ids: TokenIds) -> str:
        return " ".join(map(str, token_ids.tolist()))


class Caller:
    """What one caller got, counted by looking at the longest it has seen of each sample."""

    def __init__(self, partials: Sequence[Rollout], delay_s: float) -> None:
        self._given = {p.sample_index: p.num_tokens for p in partials}
        self._longest = dict(self._given)
        self._delay_s = delay_s

    async def send(self, event: GenerationEvent) -> None:
        await asyncio.sleep(self._delay_s)
        for delta in event.deltas:
            index = delta.chunk.sample_index
            known = self._longest.get(index, 0)
            self._longest[index] = known + int(delta.chunk.token_ids.size)
        for rollout in event.rollouts:
            assert rollout.num_tokens >= self._longest.get(rollout.sample_index, 0)
            self._longest[rollout.sample_index] = rollout.num_tokens

    @property
    def num_tokens(self) -> int:
        return sum(self._longest.values()) - sum(self._given.values())


def partial(index: int, length: int) -> Rollout:
    ids = np.arange(1, length + 1, dtype=np.uint32)
    spans = (VersionSpan(0, 0, length),) if length else ()
    return Rollout.of_one_turn(
        index, ids, np.zeros(length, np.float32), spans, FinishReason.ABORTED, ""
    )


async def call(
    generation: GenerationRunner, rng: random.Random, callers: list[Caller], seed: int
) -> None:
    """One call of any kind, which may be broken off at any moment."""
    given = [partial(0, rng.randint(1, 5))] if rng.random() < 0.3 else []
    caller = Caller(given, rng.choice((0.0, 0.0, 0.003)))
    callers.append(caller)
    wanted = request(
        samples=rng.randint(1, 5),
        max_tokens=rng.randint(6, MAX_TOKENS),
        seed=seed,
        partials=tuple(given),
    )
    options = rng.choice(WAYS_TO_TRAVEL)
    ends_s = rng.choice((0.0, 0.002, 0.01, 0.03, 30.0))
    try:
        async with asyncio.timeout(ends_s):
            await generation.run(wanted, options, caller.send)
    except TimeoutError:
        return


async def break_off(engine: EmbeddedEngine, generation: GenerationRunner) -> None:
    """A call that ends after tokens were sampled for it and before any was sent."""

    async def send(_event: GenerationEvent) -> None:
        await asyncio.Event().wait()

    await at_rest(engine)
    async with asyncio.TaskGroup() as tasks:
        wanted = request(samples=3, max_tokens=20)
        running = tasks.create_task(generation.run(wanted, StreamSettings(), send))
        async with asyncio.timeout(30):
            while engine.load().running_tokens == 0:
                await asyncio.sleep(0.001)
        running.cancel()


async def at_rest(engine: EmbeddedEngine) -> EngineLoad:
    """Counters once everything that was asked of the engine before is done."""
    for _ in range(3):
        load = await engine.check_alive()
    return load


@pytest.mark.parametrize("seed", range(4))
async def test_what_was_handed_over_is_generated_minus_unsent_minus_running(
    model_path: Path, model: PreTrainedModel, seed: int
) -> None:
    rng, callers = random.Random(seed), list[Caller]()
    async with running_engine(model_path, model, max_queued=1000) as engine:
        generation, over = GenerationRunner(engine, Digits().decode), asyncio.Event()

        async def look() -> None:
            while not over.is_set():
                for load in (engine.load(), await engine.check_alive()):
                    assert load.running_tokens >= 0
                    assert load.unsent_tokens <= load.generated_tokens
                await asyncio.sleep(0.001)

        async def swap() -> None:
            for version in range(2, 6):
                await asyncio.sleep(0.02)
                await load_weights(engine, weights_of(model, engine), version, f"v{version}")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look())
            async with asyncio.TaskGroup() as calls:
                calls.create_task(swap())
                for number in range(40):
                    calls.create_task(call(generation, rng, callers, number))
                    await asyncio.sleep(rng.choice((0.0, 0.004)))
            await break_off(engine, generation)
            load = await at_rest(engine)
            over.set()
        handed_over = sum(caller.num_tokens for caller in callers)
        assert handed_over > 0
        assert load.unsent_tokens > 0
        assert load.running_tokens == 0
        assert load.generated_tokens - load.unsent_tokens == handed_over


async def test_while_a_call_runs_its_unsent_tokens_are_running(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        generation, release = GenerationRunner(engine, Digits().decode), asyncio.Event()
        got: list[GenerationEvent] = []

        async def send(event: GenerationEvent) -> None:
            await release.wait()
            got.append(event)

        async with asyncio.TaskGroup() as tasks:
            wanted = request(samples=2, max_tokens=10)
            tasks.create_task(generation.run(wanted, StreamSettings(), send))
            async with asyncio.timeout(30):
                while engine.load().generated_tokens < 20:
                    await asyncio.sleep(0.002)
            held = await at_rest(engine)
            release.set()
        assert (held.generated_tokens, held.running_tokens, held.unsent_tokens) == (20, 20, 0)
        done = await at_rest(engine)
        assert (done.generated_tokens, done.running_tokens, done.unsent_tokens) == (20, 0, 0)


async def test_what_could_not_be_sent_is_unsent(model_path: Path, model: PreTrainedModel) -> None:
    async def send(event: GenerationEvent) -> None:
        raise ConnectionError("the caller is gone")

    async with running_engine(model_path, model) as engine:
        generation = GenerationRunner(engine, Digits().decode)
        with pytest.raises(ExceptionGroup):
            await generation.run(request(samples=2, max_tokens=10), StreamSettings(), send)
        load = await at_rest(engine)
    assert load.generated_tokens == load.unsent_tokens > 0
    assert load.running_tokens == 0


async def test_tokens_of_direct_clients_are_counted_apart_those_of_cancelled_calls_included(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        generation, got = GenerationRunner(engine, Digits().decode), asyncio.Event()

        async def stall(_event: GenerationEvent) -> None:
            got.set()
            await asyncio.Event().wait()

        def direct(samples: int) -> GenerationRequest:
            return replace(request(samples=samples, max_tokens=10), for_direct_client=True)

        ours, theirs = Caller((), 0.0), Caller((), 0.0)
        await generation.run(request(samples=2, max_tokens=10), StreamSettings(), ours.send)
        await generation.run(direct(3), StreamSettings(), theirs.send)
        async with asyncio.TaskGroup() as tasks:
            cancelled = tasks.create_task(
                generation.run(direct(1), StreamSettings(every_token=True), stall)
            )
            await got.wait()
            cancelled.cancel()
        load = await at_rest(engine)
    assert (ours.num_tokens, theirs.num_tokens, load.direct_sent_tokens) == (20, 30, 30)
    assert load.direct_unsent_tokens == load.unsent_tokens > 0
    assert load.running_tokens == 0
    assert load.generated_tokens == 20 + 30 + load.direct_unsent_tokens


async def test_what_was_sampled_and_not_delivered_to_a_direct_client_is_counted_apart(
    model_path: Path, model: PreTrainedModel
) -> None:
    """Whole samples stay in the engine until they end; this one is cancelled before."""
    async with running_engine(model_path, model) as engine:
        wanted = replace(request(samples=2, max_tokens=60), for_direct_client=True)
        caller = Caller((), 0.0)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(
                GenerationRunner(engine, Digits().decode).run(wanted, StreamSettings(), caller.send)
            )
            async with asyncio.timeout(30):
                while engine.load().generated_tokens == 0:
                    await asyncio.sleep(0)
            running.cancel()
        load = await at_rest(engine)
    assert caller.num_tokens == 0
    assert load.direct_unsent_tokens == load.unsent_tokens == load.generated_tokens > 0


async def test_a_refused_call_changes_nothing(model_path: Path, model: PreTrainedModel) -> None:
    async def send(event: GenerationEvent) -> None:
        raise AssertionError("nothing to send")

    async with running_engine(model_path, model) as engine:
        with pytest.raises(ExceptionGroup) as refused:
            await GenerationRunner(engine, Digits().decode).run(
                request(prompt=[1] * 500), StreamSettings(), send
            )
        assert refused.group_contains(InvalidRequestError)
        load = await at_rest(engine)
    assert (load.generated_tokens, load.running_tokens, load.unsent_tokens) == (0, 0, 0)


class ScriptedEngine:
    """Yields chunks; samples of the given numbers of tokens, cut and mixed as hypothesis draws."""

    def __init__(self, chunks: Sequence[tuple[SampleChunk, ...]]) -> None:
        self.accounting = RequestTokens()
        self._chunks = chunks

    async def generate(
        self, request: GenerationRequest, **_: object
    ) -> AsyncIterator[tuple[SampleChunk, ...]]:
        for chunks in self._chunks:
            await asyncio.sleep(0)
            yield chunks
        request.tokens.sampled += sum(num_tokens(chunks) for chunks in self._chunks)

    def load(self) -> EngineLoad:
        """For the sign of life of a stream that a slow machine leaves without a sample."""
        return EngineLoad(slots=8, version=None, weight_digest="")


@given(st.data())
def test_a_sample_counts_once_however_it_travels(data: st.DataObject) -> None:
    known = data.draw(st.dictionaries(st.integers(0, 3), st.integers(1, 5), max_size=3))
    given = [partial(index, length) for index, length in known.items()]
    reasons = st.sampled_from((FinishReason.STOP, FinishReason.ABORTED))
    pieces = []
    for index in range(4):
        sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        own = [SampleChunk(index, *zeros(size), 0, None) for size in sizes]
        own[-1] = replace(own[-1], finish_reason=data.draw(reasons))
        pieces.append(own)
    order = data.draw(st.permutations([i for i, own in enumerate(pieces) for _ in own]))
    chunks = [pieces[index].pop(0) for index in order]
    cut = data.draw(st.integers(0, len(chunks)))
    engine = ScriptedEngine([tuple(chunks[:cut]), *((chunk,) for chunk in chunks[cut:])])
    settings = data.draw(st.sampled_from(WAYS_TO_TRAVEL))
    wanted, caller = request(samples=4, partials=tuple(given)), Caller(given, 0.0)
    runner = GenerationRunner(engine, Digits().decode)  # type: ignore[arg-type]
    asyncio.run(runner.run(wanted, settings, caller.send))
    counted = engine.accounting.services
    assert counted.sent == wanted.tokens.sent == num_tokens(chunks) == caller.num_tokens
    assert counted.unsent == 0


def zeros(size: int) -> tuple[TokenIds, Logprobs]:
    return np.zeros(size, np.uint32), np.zeros(size, np.float32)
