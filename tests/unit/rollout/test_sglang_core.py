"""A swap of weights in SGLang's event loop, over a client that is not SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import PauseMode
from services.rollout.engines.sglang.core import SglangCore
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.vendor.samples import Delta, Pace, SamplingChoice
from services.rollout.engines.vendor.thread import ChunkStream
from sluice.errors import EngineError
from tests.support.causal_lms import request

_EVERY_TOKEN = Pace(every_token=True, interval_s=None)


class _Thread:
    engine = "SGLang engine"

    def to_home(self, callback: Callable[[], None]) -> None:
        callback()


class _Client:
    """Draws token 5 for as long as it is not paused."""

    def __init__(self) -> None:
        self.failure: EngineError | None = None
        self.paused: EngineError | None = None
        self.resumed: EngineError | None = None
        self.salts: list[str] = []
        self.called: list[str] = []
        self.during_load: Callable[[], None] = lambda: None
        self.draws = asyncio.Event()
        self.draws.set()

    async def generate(
        self, _: str, prompt: Sequence[int], salt: str, choice: SamplingChoice, priority: int
    ) -> AsyncIterator[Delta]:
        self.salts.append(salt)
        while True:
            await self.draws.wait()
            yield Delta([5], [-0.5], None, 0, ())
            await asyncio.sleep(0)

    async def pause(self, *, retract: bool) -> None:
        if self.paused is not None:
            raise self.paused
        self.draws.clear()
        self.called.append("pause")

    async def resume(self) -> None:
        if self.resumed is not None:
            raise self.resumed
        self.draws.set()
        self.called.append("resume")

    async def load(self, folder: str, version: int, *, flush: bool) -> None:
        self.during_load()
        await _turns()
        if self.failure is not None:
            raise self.failure


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _core(client: Any) -> SglangCore:
    core = SglangCore(CheckpointLayout(9, (), ()), SglangSettings("model"))
    core._client = client
    core.version, core.digest = 1, "one"
    return core


def _begin(
    core: SglangCore, tasks: asyncio.TaskGroup, number: int = 0, samples: int = 1
) -> tuple[ChunkStream, asyncio.Task[None]]:
    stream = ChunkStream(_Thread(), samples)  # type: ignore[arg-type]
    wanted = request(max_tokens=40, samples=samples)
    run = core.new_run(number, wanted, _EVERY_TOKEN, stream.post)
    return stream, tasks.create_task(core.run(run, stream))


async def test_after_weights_that_could_not_be_read_nothing_is_drawn_and_what_runs_fails() -> None:
    client = _Client()
    client.failure = EngineError("SGLang: no room")
    core = _core(client)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        stream, running = _begin(core, tasks)
        await _turns()
        with pytest.raises(EngineError, match="no room; restart the replica"):
            await core.swap("folder", 2, "two")
        await asyncio.wait([running])
        assert await stream.next()
        late, _ = _begin(core, tasks, 1)
        for reported in (
            stream.next(),
            late.next(),
            core.resume(),
            core.swap("folder", 3, "three"),
        ):
            with pytest.raises(EngineError, match="no room; restart the replica"):
                await reported
    assert client.called == ["pause"]
    assert client.salts == ["0"]


async def test_an_engine_that_does_not_go_on_after_a_swap_is_broken_and_what_runs_fails() -> None:
    client = _Client()
    client.resumed = EngineError("SGLang: no answer to resume (60 s)")
    core = _core(client)
    reported = "after version 2 came; restart the replica"
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        stream, running = _begin(core, tasks)
        await _turns()
        with pytest.raises(EngineError, match=reported):
            await core.swap("folder", 2, "two")
        await asyncio.wait([running])
        assert await stream.next()
        for call in (stream.next(), core.swap("folder", 2, "two"), core.resume()):
            with pytest.raises(EngineError, match=reported):
                await call
    assert client.called == ["pause"]


async def test_a_sample_that_comes_during_a_swap_is_sent_after_it_with_the_new_weights_salt() -> (
    None
):
    client = _Client()
    core = _core(client)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        begun: list[tuple[ChunkStream, asyncio.Task[None]]] = []
        client.during_load = lambda: begun.append(_begin(core, tasks))
        await core.swap("folder", 2, "two")
        await _turns()
        assert client.salts == ["1"]
        ((stream, running),) = begun
        await core.cancel(stream)
        await asyncio.wait([running])
    assert {chunk.version for chunk in await stream.next()} == {2}


async def test_samples_that_follow_a_first_one_into_a_pause_wait_for_its_end() -> None:
    client = _Client()
    core = _core(client)
    client.draws.clear()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        stream, running = _begin(core, tasks, samples=3)
        await _turns()
        await core.pause(PauseMode.KEEP)
        client.draws.set()  # the first sample's token was under way
        await _turns()
        assert client.salts == ["0"]
        await core.swap("folder", 2, "two")
        await core.resume()
        await _turns()
        assert client.salts == ["0", "1", "1"]
        await core.cancel(stream)
        await asyncio.wait([running])


async def test_samples_that_come_after_a_pause_that_failed_are_begun() -> None:
    client = _Client()
    client.paused = EngineError("SGLang: no answer to pause (60 s)")
    core = _core(client)
    with pytest.raises(EngineError, match="no answer to pause"):
        await core.pause(PauseMode.KEEP)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        stream, running = _begin(core, tasks)
        assert await stream.next()
        await core.cancel(stream)
        await asyncio.wait([running])
