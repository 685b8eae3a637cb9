"""Processes of the user's code that the system cannot start, or cannot end, for the moment."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.reward.episodes import workers
from services.reward.episodes.drivers import EpisodeFailedError
from services.reward.grading import pool, scorer_worker
from services.reward.grading.messages import ScorerAnswer, ScorerNumber
from services.reward.grading.scorer_worker import (
    PEER,
    LoadingEndedError,
    ScorerFault,
    start_with_retries,
)
from sluice.config.schema.reward import CustomRewardFunctionConfig, ScorerPoolConfig
from sluice.config.schema.service import EnvironmentConfig
from sluice.data.scoring import ScorerInput
from sluice.environment.source import EnvironmentSource
from sluice.errors import DeadlineError
from sluice.types import Failed, FailureKind, Scored
from tests.support.reward_app import settled
from tests.support.scorer_pools import scorer_pool

ITEM = ScorerInput("gsm8k", "#### 1", "1", {})


def no_process() -> BlockingIOError:
    return BlockingIOError(11, "Resource temporarily unavailable")


async def test_an_environment_worker_starts_once_the_system_has_a_process_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [no_process(), no_process()]

    async def spawn(*_arguments: object, **_options: object) -> Any:
        if failures:
            raise failures.pop()
        return SimpleNamespace(wait=asyncio.Event().wait)

    async def started(_process: object) -> None:
        """It has loaded the environment."""

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    monkeypatch.setattr(workers, "_wait_until_started", started)
    monkeypatch.setattr(workers, "_FIRST_BACKOFF_S", 0.0)
    source = EnvironmentSource("world.py", None, None, None)
    found = workers.EnvironmentWorkers(source, EnvironmentConfig(workers=1), tmp_path, "f", {})
    with pytest.raises(EpisodeFailedError):
        found.address_for("episode")
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(found.watch())
        await settled(lambda: not failures)
        await asyncio.sleep(0)
        assert found.address_for("episode").startswith(f"unix:{tmp_path}")
        watching.cancel()


async def test_a_scorer_starts_once_the_system_has_a_process_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scorer_worker, "_FIRST_PAUSE_S", 0.0)
    failures = [no_process() for _ in range(20)]

    async def start() -> str:
        if failures:
            raise failures.pop()
        return "a scorer"

    assert await start_with_retries(start) == "a scorer"


async def test_an_error_that_no_waiting_mends_is_raised_at_once() -> None:
    async def start() -> str:
        raise OSError(errno.ENOEXEC, "Exec format error")

    with pytest.raises(OSError, match="Exec format error"):
        await start_with_retries(start)


class Stuck:
    """A scorer that hangs in the kernel at its first request; it is killed, and does not end."""

    mark = "a mark"

    def __init__(self, num_earlier: int, *, times_out: bool) -> None:
        self.is_stuck, self.times_out = num_earlier == 0, times_out

    async def score(self, items: Sequence[ScorerInput]) -> tuple[ScorerAnswer, ...]:
        if self.is_stuck and self.times_out:
            raise ScorerFault(FailureKind.SCORER_TIMEOUT, 0, "no answer")
        if self.is_stuck:
            await asyncio.Event().wait()
        return tuple(ScorerNumber(1.0, {}) for _ in items)

    def kill(self) -> None:
        """It stays."""

    async def wait_ended(self) -> None:
        if self.is_stuck:
            raise DeadlineError(PEER, "ending after SIGKILL", 5.0)


async def stuck_pool(monkeypatch: pytest.MonkeyPatch, *, times_out: bool) -> pool.ScorerPool:
    made: list[Stuck] = []

    async def start_worker(*_arguments: object) -> Stuck:
        made.append(Stuck(len(made), times_out=times_out))
        return made[-1]

    monkeypatch.setattr(pool, "start_worker", start_worker)
    found = scorer_pool(ScorerPoolConfig(num_workers=1), CustomRewardFunctionConfig())
    await found.start()
    return found


async def test_a_scorer_that_stays_though_it_is_killed_costs_its_item_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = await stuck_pool(monkeypatch, times_out=True)
    first, second = await found.score([ITEM, ITEM])
    assert isinstance(first, Failed)
    assert first.kind is FailureKind.SCORER_TIMEOUT
    assert isinstance(second, Scored)
    assert "a scorer process is left behind" in caplog.text


async def test_a_request_that_is_given_up_ends_as_such_though_its_scorer_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await stuck_pool(monkeypatch, times_out=False)
    async with asyncio.TaskGroup() as tasks:
        given_up = tasks.create_task(found.score([ITEM]))
        await asyncio.sleep(0)
        given_up.cancel()
    assert given_up.cancelled()
    assert isinstance((await found.score([ITEM]))[0], Scored)


@pytest.mark.parametrize(
    "error", [DeadlineError(PEER, "loading my_reward.py", 60.0), LoadingEndedError("killed", 9)]
)
async def test_a_scorer_that_cannot_be_replaced_for_the_moment_fails_samples_and_not_the_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await stuck_pool(monkeypatch, times_out=True)
    failures = [error] * 4

    async def start_slowly(*_arguments: object) -> Stuck:
        if failures:
            raise failures.pop()
        return Stuck(1, times_out=False)

    monkeypatch.setattr(pool, "start_worker", start_slowly)
    first, second = await found.score([ITEM, ITEM])
    assert isinstance(first, Failed)
    assert isinstance(second, Failed)
    assert (second.kind, second.detail) == (FailureKind.SCORER_CRASH, str(error))
    assert isinstance((await found.score([ITEM]))[0], Scored)


async def test_some_scorers_for_each_core_load_at_once_when_the_first_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_begun, release = 0, asyncio.Semaphore(0)

    async def start_worker(*_arguments: object) -> Stuck:
        nonlocal num_begun
        num_begun += 1
        await release.acquire()
        return Stuck(1, times_out=False)

    monkeypatch.setattr(pool, "start_worker", start_worker)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(pool, "LOADS_PER_CORE", 1)
    found = scorer_pool(ScorerPoolConfig(num_workers=6), CustomRewardFunctionConfig())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(found.start())
        await settled(lambda: num_begun == 1)
        release.release()
        await settled(lambda: num_begun == 4)
        release.release()
        await settled(lambda: num_begun == 5)
        for _ in range(4):
            release.release()
    assert isinstance((await found.score([ITEM]))[0], Scored)


async def test_a_later_scorer_that_does_not_load_ends_the_start_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Stuck] = []

    async def start_worker(*_arguments: object) -> Stuck:
        if made:
            raise DeadlineError(PEER, "loading my_reward.py", 60.0)
        made.append(Stuck(1, times_out=False))
        return made[0]

    monkeypatch.setattr(pool, "start_worker", start_worker)
    found = scorer_pool(ScorerPoolConfig(num_workers=3), CustomRewardFunctionConfig())
    with pytest.raises(DeadlineError, match="loading my_reward"):
        await found.start()
