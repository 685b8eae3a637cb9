"""Checkpoints written beside training: what waits for them, and what a failed one ends."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.learner.checkpoint import CheckpointStore
from services.trainer.learner.rank_command import follow
from services.trainer.learner.step_measures import MemoryPeaks
from services.trainer.loop.learner_thread import LearnerThread
from sluice.device.cpu import CpuDevice
from sluice.errors import CheckpointError
from sluice.types import DataProgress, TrainBatch
from tests.support.taken_samples import MadeSamples

WAIT_S = 60.0


class Leader:
    """Copies at once; writes when it may."""

    saves_in_background = True

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.failure: Exception | None = None
        self.did: list[str] = []

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        self.did.append(f"train {step}")
        return {}

    def begin_save(self, folder: Path) -> Callable[[], None]:
        self.did.append("copy")

        def write() -> None:
            assert self.may_write.wait(WAIT_S)
            if self.failure is not None:
                raise self.failure
            folder.mkdir()
            (folder / "weights").write_text("w", encoding="utf-8")
            self.did.append("write")

        return write

    def stop(self) -> None:
        self.did.append("stop")


@asynccontextmanager
async def running(leader: Leader, root: Path) -> AsyncIterator[LearnerThread]:
    store = CheckpointStore(root)
    thread = LearnerThread(cast("Any", leader), store, MemoryPeaks(CpuDevice()))
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
        await learner.wait_until_saved()
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
        await learner.wait_until_saved()
    assert leader.did == ["copy", "train 2", "write", "copy", "write", "stop"]
    assert latest_step(tmp_path) == 2


async def test_a_save_that_fails_ends_the_next_step_and_leaves_the_former_checkpoint(
    tmp_path: Path,
) -> None:
    leader = Leader()
    async with running(leader, tmp_path) as learner:
        leader.may_write.set()
        await learner.save(1, DataProgress(0))
        await learner.wait_until_saved()
        leader.failure = OSError("no space left")
        await learner.save(2, DataProgress(0))
        with pytest.raises(CheckpointError, match=r"step 2 cannot .* \(no space left\)"):
            await learner.wait_until_saved()
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


async def test_a_save_whose_caller_is_cancelled_is_completed_as_other_ranks_wait_for_it(
    tmp_path: Path,
) -> None:
    copying, may_continue = threading.Event(), threading.Event()

    class Slow(Leader):
        def begin_save(self, folder: Path) -> Callable[[], None]:
            copying.set()
            assert may_continue.wait(WAIT_S)
            return super().begin_save(folder)

    leader = Slow()
    async with running(leader, tmp_path) as learner, asyncio.TaskGroup() as tasks:
        saving = tasks.create_task(learner.save(1, DataProgress(0)))
        await asyncio.to_thread(copying.wait, WAIT_S)
        saving.cancel()
        await asyncio.wait([saving])
        assert saving.cancelled()
        may_continue.set()
    assert leader.did == ["copy", "write", "stop"]
    assert latest_step(tmp_path) == 1


async def test_a_wait_for_a_checkpoint_that_is_cancelled_loses_none(tmp_path: Path) -> None:
    leader = Leader()
    async with running(leader, tmp_path) as learner, asyncio.TaskGroup() as tasks:
        learner._writer.submit(lambda: leader.may_write.wait(WAIT_S))  # the thread begins late
        await learner.save(1, DataProgress(0))
        waiting = tasks.create_task(learner.wait_until_saved())
        await asyncio.sleep(0)
        waiting.cancel()
    assert leader.did == ["copy", "write", "stop"]
    assert latest_step(tmp_path) == 1


async def test_a_checkpoint_that_fails_in_any_way_does_not_keep_the_ranks_from_stopping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader = Leader()
    leader.failure = RuntimeError("a bug")
    async with running(leader, tmp_path) as learner:
        await learner.save(1, DataProgress(0))
    assert leader.did == ["copy", "stop"]
    assert "the last checkpoint is not complete: a bug" in caplog.text


class Copies:
    """What a save holds on the host."""


class Following:
    """A rank above 0 without a model; its saves do as `write` says."""

    def __init__(self, write: Callable[[], None], *, saves_in_background: bool) -> None:
        self.saves_in_background = saves_in_background
        self.write = write
        self.copies: list[weakref.ref[Copies]] = []
        self.was_freed = False

    def begin_save(self, _: Path) -> Callable[[], None]:
        copies = Copies()
        self.copies.append(weakref.ref(copies))

        def write() -> None:
            assert copies is not None
            self.write()

        return write

    def load(self, _: Path, _factor: float) -> None:
        """Wait until the copies of the last save are gone."""
        ends_s = time.monotonic() + WAIT_S
        while not self.was_freed and time.monotonic() < ends_s:
            time.sleep(0.01)
            self.was_freed = self.copies[-1]() is None


NO_SAMPLES = MadeSamples(cast("Any", None))


class Commands:
    """Rank 0's, one after the other."""

    timeout_s = 60.0

    def __init__(self, *kinds: str) -> None:
        self._kinds = list(kinds)

    def broadcast_bytes(self, *_: object) -> bytes:
        fields = {"kind": self._kinds.pop(0), "directory": "folder", "rate_factor": 1.0}
        header = json.dumps(fields).encode()
        return len(header).to_bytes(4, "little") + header


def test_a_follower_frees_its_copies_once_they_are_written() -> None:
    learner = Following(lambda: None, saves_in_background=True)
    follow(cast("Any", learner), cast("Any", Commands("save", "load", "stop")), NO_SAMPLES)
    assert learner.was_freed


def test_a_followers_log_says_why_it_did_not_write(caplog: pytest.LogCaptureFixture) -> None:
    def write() -> None:
        raise OSError("no space left")

    learner = Following(write, saves_in_background=True)
    with caplog.at_level(logging.ERROR):
        follow(cast("Any", learner), cast("Any", Commands("save", "stop")), NO_SAMPLES)
    assert "the checkpoint cannot be written: no space left" in caplog.text


class KeptAlive(Commands):
    """Rank 0 waits for the follower's part of a checkpoint."""

    def __init__(self) -> None:
        super().__init__("save")
        self._ends_s = time.monotonic() + WAIT_S

    def broadcast_bytes(self, *_: object) -> bytes:
        assert time.monotonic() < self._ends_s
        self._kinds = self._kinds or ["keep_alive"]
        return super().broadcast_bytes()


@pytest.mark.parametrize("made", [KeptAlive, partial(Commands, "save", "stop")])
def test_a_follower_whose_save_beside_training_fails_for_another_reason_ends(
    made: Callable[[], Commands], caplog: pytest.LogCaptureFixture
) -> None:
    def write() -> None:
        raise MemoryError("no memory left on the host")

    learner = Following(write, saves_in_background=True)
    with caplog.at_level(logging.ERROR), pytest.raises(MemoryError, match="no memory left"):
        follow(cast("Any", learner), cast("Any", made()), NO_SAMPLES)
    assert "the checkpoint cannot be written" in caplog.text


def test_a_follower_that_fails_ends_after_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    fails, written = threading.Event(), tmp_path / "part"

    def write() -> None:
        assert fails.wait(WAIT_S)
        time.sleep(0.2)  # by then the follower waits
        written.write_text("w", encoding="utf-8")

    class Failing(Following):
        def load(self, _: Path, _factor: float) -> None:
            fails.set()
            raise RuntimeError("no memory left on the device")

    learner = Failing(write, saves_in_background=True)
    with pytest.raises(RuntimeError, match="no memory left"):
        follow(cast("Any", learner), cast("Any", Commands("save", "load")), NO_SAMPLES)
    assert written.exists()


def test_a_save_that_training_waits_for_sends_from_the_thread_of_all_other_commands() -> None:
    threads: list[threading.Thread] = []
    learner = Following(
        lambda: threads.append(threading.current_thread()), saves_in_background=False
    )
    follow(cast("Any", learner), cast("Any", Commands("save", "stop")), NO_SAMPLES)
    assert threads == [threading.current_thread()]
