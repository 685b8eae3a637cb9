"""New weights for SGLang in the service's event loop, with calls that are cancelled."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.rollout.engines.protocol import StagedVersion
from services.rollout.engines.sglang import engine as sglang_engine
from services.rollout.engines.sglang.engine import SglangEngine, WeightHandover
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.vendor.thread import ClientThread
from sluice.errors import NotReadyError, WeightSyncError


class _Inbox:
    """Has whatever was staged last; its digest is the version in words."""

    def __init__(self) -> None:
        self.version = 0

    async def stage(self, epoch: int, version: int) -> StagedVersion:
        self.version = version
        return StagedVersion(version, _digest(version), 8, 0.1)

    def staged(self, epoch: int, version: int, digest: str) -> Any:
        if version != self.version:
            raise WeightSyncError("trainer", "committing", f"version {version} is not staged")
        return SimpleNamespace(tensors={"a": torch.ones(2)})

    def release(self, _: object) -> None:
        return


@dataclass
class _Core:
    version: int = 0
    digest: str = ""
    broken: None = None
    swaps: list[int] = field(default_factory=list)
    may_end: threading.Event = field(default_factory=threading.Event)

    async def swap(self, folder: str, version: int, digest: str) -> float:
        self.swaps.append(version)
        while not self.may_end.is_set():
            await asyncio.sleep(0.001)
        self.version, self.digest = version, digest
        return 0.5


class _SlowHandover(WeightHandover):
    made: list[WeightHandover]
    may_continue: threading.Event

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.made.append(self)
        assert self.may_continue.wait(20)


def _digest(version: int) -> str:
    return f"digest of {version}"


@pytest.fixture
async def core() -> _Core:
    core = _Core()
    core.may_end.set()
    return core


@pytest.fixture
async def engine(
    core: _Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SglangEngine]:
    _SlowHandover.made, _SlowHandover.may_continue = [], threading.Event()
    _SlowHandover.may_continue.set()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sglang_engine, "WeightHandover", _SlowHandover)
    engine = SglangEngine(SglangSettings("model"))
    thread, inbox, parts = ClientThread("SGLang"), _Inbox(), vars(engine)
    parts |= {"_thread": thread, "_core": core, "_inbox": inbox}
    yield engine
    await thread.stop()


async def _cancel_while_laid_out(engine: SglangEngine, version: int) -> None:
    made = len(_SlowHandover.made)
    _SlowHandover.may_continue.clear()
    async with asyncio.TaskGroup() as tasks:
        staging = tasks.create_task(engine.stage(1, version))
        while len(_SlowHandover.made) == made:
            await asyncio.sleep(0.001)
        staging.cancel()
    assert staging.cancelled()
    _SlowHandover.may_continue.set()


async def test_what_a_cancelled_stage_has_laid_out_is_freed(engine: SglangEngine) -> None:
    async with asyncio.timeout(20):
        await _cancel_while_laid_out(engine, 1)
        (handover,) = _SlowHandover.made
        while handover.folder.exists():
            await asyncio.sleep(0.001)


async def test_a_commit_of_what_was_not_laid_out_is_refused_after_an_earlier_versions_swap(
    engine: SglangEngine, core: _Core
) -> None:
    async with asyncio.timeout(20):
        await engine.stage(1, 1)
        assert (await engine.commit(1, 1, _digest(1))).stall_s == 0.5
        await _cancel_while_laid_out(engine, 2)
        with pytest.raises(NotReadyError, match="version 2 is not staged"):
            await engine.commit(1, 2, _digest(2))
    assert (core.version, core.swaps) == (1, [1])


async def test_a_commit_after_a_cancelled_one_waits_for_the_swap_that_has_begun(
    engine: SglangEngine, core: _Core
) -> None:
    core.may_end.clear()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        await engine.stage(1, 1)
        first = tasks.create_task(engine.commit(1, 1, _digest(1)))
        while not core.swaps:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        again = tasks.create_task(engine.commit(1, 1, _digest(1)))
        await asyncio.sleep(0)
        core.may_end.set()
        assert (await again).digest == _digest(1)
    assert core.swaps == [1]
