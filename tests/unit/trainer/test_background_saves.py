"""Checkpoints written beside training: what waits for them, and what a failed one ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.learner.checkpoint import CheckpointStore
from services.trainer.loop.learner_thread import LearnerThread
from sluice.errors import CheckpointError
from sluice.types import DataProgress, TrainBatch

WAIT_S = 30.0


class Leader:
    """Copies at once; writes when it may."""

    saves_aside = True

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.fails = False
        self.did: list[str] = []

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        self.did.append(f"train {step}")
        return {}

    def begin_save(self, folder: Path) -> Callable[[], None]:
        self.did.append("copy")

        def write() -> None:
            assert self.may_write.wait(WAIT_S)
            if self.fails:
                raise OSError("no space left")
            folder.mkdir()
            (folder / "weights").write_text("w", encoding="utf-8")
            self.did.append("write")

        return write

    def stop(self) -> None:
        self.did.append("stop")


@asynccontextmanager
async def running(leader: Leader, root: Path) -> AsyncIterator[LearnerThread]:
    store, nothing = CheckpointStore(root), cast("Any", None)
    thread = LearnerThread(cast("Any", leader), nothing, store, 1.0, dict)
    try:
        yield thread
    finally:
        leader.may_write.set()
        await thread.close()


def latest_step(root: Path) -> int | None:
    found = CheckpointStore(root).latest()
    return None if found is None else found.step


async def test_training_continues_and_the_checkpoint_is_the_latest_once_it_is_complete(
    tmp_path: Path,
) -> None:
    leader = Leader()
    async with running(leader, tmp_path) as learner:
        assert await learner.save(1, DataProgress(4)) == str(tmp_path / "global_step_1")
        await learner.train(cast("Any", None), 2)
        assert (leader.did, latest_step(tmp_path)) == (["copy", "train 2"], None)
        leader.may_write.set()
        await learner.saved()
        assert (leader.did[-1], latest_step(tmp_path)) == ("write", 1)


async def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    leader = Leader()
    async with running(leader, tmp_path) as learner:
        await learner.save(1, DataProgress(0))
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(learner.save(2, DataProgress(0)))
            await learner.train(cast("Any", None), 2)
            assert leader.did == ["copy", "train 2"]
            leader.may_write.set()
            await second
        await learner.saved()
    assert leader.did == ["copy", "train 2", "write", "copy", "write", "stop"]
    assert latest_step(tmp_path) == 2


async def test_a_save_that_fails_ends_the_next_step_and_leaves_the_former_checkpoint(
    tmp_path: Path,
) -> None:
    leader = Leader()
    async with running(leader, tmp_path) as learner:
        leader.may_write.set()
        await learner.save(1, DataProgress(0))
        await learner.saved()
        leader.fails = True
        await learner.save(2, DataProgress(0))
        with pytest.raises(CheckpointError, match=r"step 2 cannot .* \(no space left\)"):
            await learner.saved()
        with pytest.raises(CheckpointError, match="step 2 cannot"):
            await learner.train(cast("Any", None), 3)
    assert leader.did == ["copy", "write", "copy", "stop"]
    assert latest_step(tmp_path) == 1


async def test_the_end_of_the_run_completes_a_checkpoint_before_the_ranks_stop(
    tmp_path: Path,
) -> None:
    leader = Leader()
    async with running(leader, tmp_path) as learner:
        await learner.save(1, DataProgress(0))
    assert leader.did == ["copy", "write", "stop"]
    assert latest_step(tmp_path) == 1
