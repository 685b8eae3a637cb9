"""A swap of weights in vLLM's event loop, over a client that is not vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.vendor.samples import Delta, Pace, SamplingChoice
from services.rollout.engines.vendor.thread import ChunkStream
from services.rollout.engines.vllm.client import PromptInputs
from services.rollout.engines.vllm.core import VllmCore
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.errors import EngineError, WeightSyncError
from tests.support.causal_lms import request

_HALF_WAY: dict[str, object] = {"error": "no room", "kind": "EngineError", "broken": True}
_NOT_STAGED: dict[str, object] = {"error": "nothing is staged here", "kind": "WeightSyncError"}
_EVERY_TOKEN = Pace(every_token=True, interval_s=None)


class _Thread:
    engine = "vLLM engine"

    def to_home(self, callback: Callable[[], None]) -> None:
        callback()


class _Client:
    """Draws token 5 for as long as it is not paused."""

    is_broken = False

    def __init__(self) -> None:
        self.applied: dict[str, object] = {"seconds": 0.1}
        self.tagged: EngineError | None = None
        self.resumed: EngineError | None = None
        self.salts: list[str] = []
        self.called: list[str] = []
        self.taken: list[str] = []
        self.forgotten: EngineError | None = None
        self.during_apply: Callable[[], None] = lambda: None
        self._draws = asyncio.Event()
        self._draws.set()

    async def generate(
        self, _: str, inputs: PromptInputs, choice: SamplingChoice, priority: int
    ) -> AsyncIterator[Delta]:
        self.salts.append(inputs.salt)
        while True:
            await self._draws.wait()
            yield Delta([5], [-0.5], None, 0, ())
            await asyncio.sleep(0)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        self._draws.clear()
        self.called.append("pause")

    async def resume(self) -> None:
        if self.resumed is not None:
            raise self.resumed
        self._draws.set()
        self.called.append("resume")

    async def forget_encoded_images(self) -> None:
        if self.forgotten is not None:
            raise self.forgotten
        self.taken.append("forget")

    async def tag_version(self, version: str) -> None:
        self.taken.append("tag")
        if self.tagged is not None:
            raise self.tagged

    async def call_workers(self, method: str, *_: object, timeout_s: float) -> list[object]:
        if method == "sluice_apply":
            self.taken.append("apply")
            self.during_apply()
            await _turns()
            return [self.applied]
        return [{}]


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _core(client: Any) -> VllmCore:
    core = VllmCore(client, CheckpointLayout(9, (), ()), VllmSettings("model"))
    core.version, core.digest = 1, "one"
    return core


def _begin(
    core: VllmCore, tasks: asyncio.TaskGroup, number: int = 0
) -> tuple[ChunkStream, asyncio.Task[None]]:
    stream = ChunkStream(_Thread(), 1)  # type: ignore[arg-type]
    run = core.new_run(number, request(max_tokens=40), None, _EVERY_TOKEN, stream.post)
    return stream, tasks.create_task(core.run(run, stream))


async def _rest(stream: ChunkStream) -> set[int]:
    """The versions that drew what came, until the stream fails."""
    versions: set[int] = set()
    while True:
        try:
            versions |= {chunk.version for chunk in await stream.next()}
        except EngineError:
            return versions


async def _check_broken(client: _Client) -> None:
    core = _core(client)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        stream, running = _begin(core, tasks)
        await _turns()
        with pytest.raises(EngineError) as failed:
            await core.swap(2, "two")
        assert core.broken is failed.value
        await asyncio.wait([running])
        assert await _rest(stream) == {1}
        sampled = core.generated_tokens
        late, _ = _begin(core, tasks, 1)
        await _rest(late)
        for call in (core.resume(), core.swap(3, "three")):
            with pytest.raises(EngineError):
                await call
    assert core.generated_tokens == sampled > 0
    assert client.called == ["pause"], "a model that is a mixture draws nothing"


async def test_after_an_apply_that_ends_half_way_nothing_is_drawn_and_what_runs_fails() -> None:
    client = _Client()
    client.applied = _HALF_WAY
    await _check_broken(client)


async def test_weights_whose_version_cannot_be_named_draw_nothing() -> None:
    client = _Client()
    client.tagged = EngineError("vLLM: naming the version failed")
    await _check_broken(client)


async def test_encoded_images_are_forgotten_before_the_new_weights_have_a_name() -> None:
    client = _Client()
    await _core(client).swap(2, "two")
    assert client.taken == ["apply", "forget", "tag"]


async def test_an_engine_that_cannot_forget_encoded_images_draws_nothing() -> None:
    client = _Client()
    client.forgotten = EngineError("vLLM: no answer to forgetting images within 60 s")
    await _check_broken(client)


async def test_an_engine_that_does_not_go_on_after_a_swap_is_broken() -> None:
    client = _Client()
    client.resumed = EngineError("vLLM: no answer to resume within 60 s")
    await _check_broken(client)


async def test_a_swap_that_is_repeated_on_an_engine_that_stayed_paused_fails_again() -> None:
    client = _Client()
    client.resumed = EngineError("vLLM: no answer to resume within 60 s")
    core = _core(client)
    for _ in range(2):
        with pytest.raises(EngineError, match="after version 2 came; restart the replica"):
            await core.swap(2, "two")


async def test_when_no_worker_took_the_new_weights_the_old_ones_go_on() -> None:
    client = _Client()
    client.applied = _NOT_STAGED
    core = _core(client)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        stream, running = _begin(core, tasks)
        with pytest.raises(WeightSyncError):
            await core.swap(2, "two")
        assert client.taken == ["apply"], "no worker has lost what it encoded"
        assert core.broken is None
        sampled = core.generated_tokens
        await _turns()
        assert core.generated_tokens > sampled
        await core.cancel(stream)
        await asyncio.wait([running])
    assert {chunk.version for chunk in await stream.next()} == {1}


async def test_a_sample_that_comes_during_a_swap_is_sent_after_it_as_one_of_the_new_version() -> (
    None
):
    client = _Client()
    core = _core(client)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        begun: list[tuple[ChunkStream, asyncio.Task[None]]] = []
        client.during_apply = lambda: begun.append(_begin(core, tasks))
        await core.swap(2, "two")
        await _turns()
        assert client.salts == ["2"]
        ((stream, running),) = begun
        await core.cancel(stream)
        await asyncio.wait([running])
    assert {chunk.version for chunk in await stream.next()} == {2}
