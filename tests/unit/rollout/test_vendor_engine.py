"""What the vendors' engines have in common, over a core that is no vendor's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from services.rollout.engines.settings import EngineSettings, VendorSettings
from services.rollout.engines.threaded_engine import ThreadedEngine
from services.rollout.engines.vendor_engines.engine import VendorCore
from services.rollout.engines.vendor_engines.request import RequestRun
from sluice.errors import EngineError, ExhaustedError, InvalidRequestError, NotReadyError
from sluice.types import FinishReason
from tests.support.causal_lms import request

_SETTINGS = EngineSettings("model", slots=2, max_model_len=64, max_queued=1)


class _Core(VendorCore):
    """Samples token 5 for each sample and ends it, unless it is to run for ever."""

    name = "Vendor"

    def __init__(self) -> None:
        no_client: Any = None  # no weights come
        settings = VendorSettings("model", max_model_len=64)
        super().__init__(no_client, CheckpointLayout(100, (), ()), settings)
        self.version, self.digest = 3, "three"
        self.is_endless = False
        self.sampled_ahead = 0
        self.running = 0
        self.heeds_cancels = True
        self.cancelled: set[RequestRun] = set()

    async def run(self, run: RequestRun) -> None:
        reason = None if self.is_endless else FinishReason.STOP
        token, logprob = np.array([5], np.uint32), np.float32([-0.5])
        samples = len(run.request.sample_indexes)
        run.sampled = samples + self.sampled_ahead
        self.generated_tokens += run.sampled
        run.stream.post([SampleChunk(index, token, logprob, 3, reason) for index in range(samples)])
        self.running += 1
        while self.is_endless and not (self.heeds_cancels and run in self.cancelled):
            await asyncio.sleep(0.001)
        self.running -= 1
        run.stream.end(None)

    async def cancel(self, run: RequestRun) -> None:
        self.cancelled.add(run)

    async def close(self) -> None:
        self.is_endless = False
        while self.running:
            await asyncio.sleep(0.001)

    async def unused(self, *_: Any) -> None:
        raise NotImplementedError

    check_alive = unused
    seed = deltas = check_versions = unused  # type: ignore[assignment]


class _Engine(ThreadedEngine[_Core]):
    def __init__(self, core: _Core) -> None:
        async def build() -> _Core:
            return core

        super().__init__("Vendor", _SETTINGS, build)

    def sample(self, wanted: GenerationRequest) -> AsyncGenerator[tuple[SampleChunk, ...], None]:
        return self.generate(wanted, every_token=False)


@pytest.fixture
async def core() -> _Core:
    return _Core()


@pytest.fixture
async def engine(core: _Core) -> AsyncIterator[_Engine]:
    engine = _Engine(core)
    await engine.start()
    async with asyncio.timeout(60):
        yield engine
    await engine.stop()


async def test_a_call_that_ended_has_counted_all_that_was_sampled_for_it(
    engine: _Engine, core: _Core
) -> None:
    core.is_endless, core.sampled_ahead = True, 3
    wanted = request(samples=2)
    async with aclosing(engine.sample(wanted)) as generating:
        assert len(await anext(generating)) == 2
    load = engine.load()
    assert wanted.tokens.sampled == load.generated_tokens == load.running_tokens == 5
    assert (load.version, load.weight_digest) == (3, "three")


async def test_an_abandoned_call_frees_its_slots_once_its_samples_were_aborted(
    engine: _Engine, core: _Core
) -> None:
    core.is_endless = True
    async with aclosing(engine.sample(request(samples=3))) as generating:
        await anext(generating)
        load = engine.load()
        assert (load.slots_busy, load.queued, load.busy_seconds > 0) == (2, 1, True)
        assert not core.cancelled
    assert len(core.cancelled) == 1
    assert (engine.load().slots_busy, engine.load().queued) == (0, 0)


async def test_samples_beyond_the_slots_and_the_queue_are_refused(
    engine: _Engine, core: _Core
) -> None:
    core.is_endless = True
    async with aclosing(engine.sample(request(samples=2))) as generating:
        await anext(generating)
        with pytest.raises(ExhaustedError, match=r"4 samples .* 2 in slots and 1 waiting"):
            await anext(engine.sample(request(samples=2)))


async def test_more_samples_than_an_idle_engine_takes_are_not_asked_to_come_back(
    engine: _Engine,
) -> None:
    reported = r"4 samples; .* 2 in slots .*max_num_seqs.* 1 waiting .*max_queued"
    with pytest.raises(InvalidRequestError, match=reported):
        await anext(engine.sample(request(samples=4)))


async def test_an_engine_that_does_not_abort_samples_is_broken(
    engine: _Engine, core: _Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Core, "abort_timeout_s", 0.01)
    core.is_endless, core.heeds_cancels = True, False
    async with aclosing(engine.sample(request())) as generating:
        await anext(generating)
    with pytest.raises(EngineError, match="Vendor: samples were not aborted"):
        engine.load()


async def test_calls_end_with_the_engine_and_none_begins_after_it(
    engine: _Engine, core: _Core
) -> None:
    core.is_endless = True
    async with aclosing(engine.sample(request())) as generating:
        await anext(generating)
        await engine.stop()
        with pytest.raises(EngineError):
            await anext(generating)
    with pytest.raises(NotReadyError, match="the Vendor engine is not running"):
        await anext(engine.sample(request()))


async def test_without_weights_nothing_is_admitted(engine: _Engine, core: _Core) -> None:
    core.version = None
    with pytest.raises(NotReadyError, match="has no weights yet"):
        await anext(engine.sample(request()))
