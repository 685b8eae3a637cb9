"""New weights for SGLang: staged, laid out in memory, and committed; calls that are cancelled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from services.rollout.engines.protocol import StagedVersion
from services.rollout.engines.sglang import engine as sglang_engine
from services.rollout.engines.sglang.engine import SglangEngine, WeightHandover
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.thread import LoopThread
from sluice.errors import NotReadyError, WeightSyncError


class _Inbox:
    """Has whatever was staged last; its digest is the version in words."""

    epoch = 1

    def __init__(self) -> None:
        self.version = 0

    def stage(self, epoch: int, version: int) -> Future[StagedVersion]:
        self.version = version
        staged: Future[StagedVersion] = Future()
        staged.set_result(StagedVersion(version, _digest(version), 8, 0.1))
        return staged

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
    thread, inbox, parts = LoopThread("SGLang"), _Inbox(), vars(engine)
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
    async with asyncio.timeout(60):
        await _cancel_while_laid_out(engine, 1)
        (handover,) = _SlowHandover.made
        while handover.folder.exists():
            await asyncio.sleep(0.001)


async def test_a_commit_of_what_was_not_laid_out_is_refused_after_an_earlier_versions_swap(
    engine: SglangEngine, core: _Core
) -> None:
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
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


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4)
_READ = """
import sys
from safetensors.torch import load_file
print(sorted(load_file(sys.argv[1])))
"""


@given(shapes=_SHAPES, dtype=st.sampled_from(_DTYPES))
def test_what_is_read_is_what_was_handed_over(
    shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    memory = torch.arange(400).to(dtype)  # tensors that share memory, as staged ones do
    tensors = {
        f"layer.{place}": memory[place * 20 : place * 20 + rows * columns].view(rows, columns)
        for place, (rows, columns) in enumerate(shapes)
    }
    handover = WeightHandover(tensors)
    found = load_file(handover.folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)
    handover.close()


def test_another_process_can_read_it_until_it_is_closed() -> None:
    handover = WeightHandover({"a": torch.ones(3), "b": torch.zeros(2, 2)})
    file = handover.folder / "model.safetensors"
    read = subprocess.run(
        [sys.executable, "-c", _READ, str(file)], capture_output=True, text=True, check=True
    )
    assert read.stdout.strip() == "['a', 'b']"
    assert not Path(file).resolve().is_relative_to(handover.folder), "it takes no space on a disk"
    handover.close()
    handover.close()
    assert not handover.folder.exists()
