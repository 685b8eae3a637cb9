"""Pauses of a vendor's engine that fail, or whose end is awaited; over clients of no vendor's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from services.rollout.engines.causal_lm import CheckpointLayout
from services.rollout.engines.protocol import PauseMode
from services.rollout.engines.sglang.core import SglangCore
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.vendor.thread import ClientThread
from services.rollout.engines.vllm.core import VllmCore
from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from sluice.errors import EngineError

_LAYOUT = CheckpointLayout(9, (), ())
_NO_ANSWER = EngineError("no answer within 60 s")


class _Client:
    """What both cores ask of their vendor's client in a swap and in a pause."""

    is_broken = False

    def __init__(self) -> None:
        self.draws = True
        self.is_asked_to_resume = False
        self.failures: dict[str, EngineError] = {}
        self.may_resume = threading.Event()
        self.may_resume.set()

    async def pause(self, *_: object, **__: object) -> None:
        if "pause" in self.failures:
            raise self.failures["pause"]
        self.draws = False

    async def resume(self) -> None:
        self.is_asked_to_resume = True
        while not self.may_resume.is_set():
            await asyncio.sleep(0.001)
        if "resume" in self.failures:
            raise self.failures["resume"]
        self.draws = True

    async def load(self, *_: object, **__: object) -> None:
        return

    async def forget_encoded_images(self) -> None:
        return

    async def tag_version(self, _: str) -> None:
        return

    async def call_workers(self, *_: object, **__: object) -> list[object]:
        return [{"seconds": 0.1}]


class _Vendor:
    """An engine, its core, and how that swaps to version 2."""

    def __init__(self, client: Any, *, is_vllm: bool) -> None:
        self.swap: Callable[[], Coroutine[Any, Any, float]]
        self.core: VllmCore | SglangCore
        self.engine: VllmEngine | SglangEngine
        if is_vllm:
            vllm = VllmCore(client, _LAYOUT, VllmSettings("model"))
            self.swap = lambda: vllm.swap(2, "two")
            self.core, self.engine = vllm, VllmEngine(VllmSettings("model"))
        else:
            sglang = SglangCore(_LAYOUT, SglangSettings("model"))
            sglang._client = client
            self.swap = lambda: sglang.swap("folder", 2, "two")
            self.core, self.engine = sglang, SglangEngine(SglangSettings("model"))
        self.core.version, self.core.digest = 1, "one"


@pytest.fixture
def client() -> _Client:
    return _Client()


@pytest.fixture(params=[True, False], ids=["vllm", "sglang"])
async def vendor(client: _Client, request: pytest.FixtureRequest) -> AsyncIterator[_Vendor]:
    async with asyncio.timeout(20):
        yield _Vendor(client, is_vllm=request.param)


async def _swap_that_does_not_end(client: _Client, vendor: _Vendor) -> ClientThread:
    """Begun in the engine's thread by a commit that was cancelled, until `may_resume`."""
    thread, parts = ClientThread("Vendor"), vars(vendor.engine)
    parts |= {"_thread": thread, "_core": vendor.core, "_epoch": 1}
    client.may_resume.clear()
    thread.begin(vendor.swap())
    while not client.is_asked_to_resume:
        await asyncio.sleep(0.001)
    return thread


async def test_a_repeated_commit_is_no_success_before_the_engine_draws_on(
    client: _Client, vendor: _Vendor
) -> None:
    thread = await _swap_that_does_not_end(client, vendor)
    async with asyncio.TaskGroup() as tasks:
        again = tasks.create_task(vendor.engine.commit(1, 2, "two"))
        await asyncio.wait([again], timeout=0.05)
        assert not again.done()
        client.may_resume.set()
    assert (again.result().version, client.draws) == (2, True)
    await thread.stop()


async def test_a_repeated_commit_fails_where_the_engine_does_not_draw_on(
    client: _Client, vendor: _Vendor
) -> None:
    thread = await _swap_that_does_not_end(client, vendor)
    client.failures["resume"] = _NO_ANSWER

    async def commit() -> None:
        with pytest.raises(EngineError, match="after version 2 came; restart the replica"):
            await vendor.engine.commit(1, 2, "two")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(commit())
        await asyncio.sleep(0)
        client.may_resume.set()
    await thread.stop()


async def test_an_engine_that_could_not_be_paused_draws_on_after_a_swap(
    client: _Client, vendor: _Vendor
) -> None:
    client.failures["pause"] = _NO_ANSWER
    with pytest.raises(EngineError, match="no answer"):
        await vendor.core.pause(PauseMode.KEEP)
    client.failures.clear()
    await vendor.swap()
    assert client.draws


async def test_an_engine_that_could_not_go_on_after_a_pause_stays_paused_over_a_swap(
    client: _Client, vendor: _Vendor
) -> None:
    await vendor.core.pause(PauseMode.KEEP)
    client.failures["resume"] = _NO_ANSWER
    with pytest.raises(EngineError, match="no answer"):
        await vendor.core.resume()
    client.failures.clear()
    await vendor.swap()
    assert not client.draws
    await vendor.core.resume()
    assert client.draws
