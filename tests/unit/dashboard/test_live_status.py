"""What the page asks a run's services, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sluice.client.run_address import RunLocation
from sluice.client.wait_chain import Explanation, explain_run
from sluice.concurrency.process import mark_process
from sluice.dashboard.live_status import ASK_EVERY_S, SURVEY_EVERY_S, LiveStatus
from sluice.dashboard.overview import overview
from sluice.dashboard.step_history import StepHistory
from tests.support.dashboard_run import make_run
from tests.support.rpc_server import serving
from tests.support.scripted_trainer import ScriptedReward, ScriptedTrainer

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

LONG_S = 60.0


class Clock:
    """A clock that only the test advances."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def live_status(run_dir: Path, clock: Clock) -> AsyncIterator[LiveStatus]:
    live = LiveStatus(run_dir, clock, answer_within_s=LONG_S)
    try:
        yield live
    finally:
        await live.close()


async def test_a_run_that_answers_is_shown_and_asked_no_more_often_than_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, clock, explained = ScriptedTrainer(), Clock(), list[RunLocation]()

    async def counted(location: RunLocation) -> Explanation | None:
        explained.append(location)
        return await explain_run(location)

    monkeypatch.setattr("sluice.dashboard.live_status.explain_run", counted)
    async with serving(trainer=trainer) as server:
        make_run(tmp_path, f"sluice.trainer.endpoint.port={server.port}")
        async with live_status(tmp_path, clock) as live:
            async with asyncio.TaskGroup() as tasks:
                together = [tasks.create_task(live.ask()) for _ in range(5)]
            answers = [asked.result() for asked in together]
            assert all(answer is answers[0] for answer in answers)
            clock.now_s += ASK_EVERY_S
            later = await live.ask()
    assert answers[0] is not None
    assert later is not None
    assert later is not answers[0]
    assert later.run is not None
    assert (later.run.step, later.run.phase) == (2, "waiting for batch")
    assert len(explained) == 1  # every service is asked more seldom still
    shown = overview("run", None, {}, StepHistory(tmp_path), later)
    assert (shown["step"], shown["total_steps"]) == (2, 2)
    assert [replica["name"] for replica in shown["replicas"]] == ["rollout-0"]


async def test_prompts_that_a_running_reward_service_has_lost_are_shown(tmp_path: Path) -> None:
    async with serving(trainer=ScriptedTrainer(), reward=ScriptedReward(prompts_lost=2)) as server:
        here = f"endpoint.port={server.port}"
        run = make_run(tmp_path, f"sluice.trainer.{here}", f"sluice.reward.{here}")
        async with live_status(run, Clock()) as live:
            shown = overview("run", 5, {}, StepHistory(tmp_path), await live.ask())
    assert shown["health"] == "in trouble"
    assert "2 prompts are lost: neither pending nor ended" in shown["reasons"]


async def test_nothing_is_shown_of_a_run_without_services(tmp_path: Path) -> None:
    async with live_status(make_run(tmp_path), Clock()) as live:
        assert await live.ask() is None


async def test_a_run_at_the_addresses_of_one_that_has_ended_is_not_shown(tmp_path: Path) -> None:
    async with serving(trainer=ScriptedTrainer()) as server:
        run = make_run(tmp_path, f"sluice.trainer.endpoint.port={server.port}")
        (run / "processes").mkdir()
        async with live_status(run, Clock()) as live:
            assert await live.ask() is None


async def test_a_trainer_whose_process_is_there_and_silent_is_trouble_with_its_reason(
    tmp_path: Path,
) -> None:
    make_run(tmp_path)
    with mark_process(tmp_path, "trainer", "127.0.0.1:1"):
        async with live_status(tmp_path, Clock()) as live:
            answer = await live.ask()
    assert answer is not None
    assert answer.run is None
    shown = overview("run", 5, {}, StepHistory(tmp_path), answer)
    assert shown["health"] == "in trouble"
    assert "the trainer does not answer; trainer" in shown["reasons"][0]


async def test_a_restarted_run_is_found_at_its_new_address(tmp_path: Path) -> None:
    clock = Clock()
    async with live_status(make_run(tmp_path), clock) as live:
        assert await live.ask() is None
        async with serving(trainer=ScriptedTrainer()) as server:
            make_run(tmp_path, f"sluice.trainer.endpoint.port={server.port}")
            clock.now_s += SURVEY_EVERY_S
            answer = await live.ask()
    assert answer is not None
    assert answer.run is not None
