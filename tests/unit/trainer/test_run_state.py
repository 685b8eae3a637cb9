"""The state of a run, as status calls, streams of steps and control calls see it."""

from __future__ import annotations

import asyncio

import pytest

from services.trainer.loop.run_state import RunPhase, RunState, StepRecord
from sluice.errors import NotReadyError


@pytest.fixture
def state() -> RunState:
    return RunState("trainer-1", total_steps=5, step=2)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_watcher_gets_past_steps_at_once_and_waits_for_the_next(state: RunState) -> None:
    await state.record(StepRecord(3, {"m": 3.0}))
    assert [r.step for r in await state.records_from(3)] == [3]
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(state.records_from(4))
        await settle()
        assert not waiting.done()
        await state.record(StepRecord(4, {"m": 4.0}))
    assert [r.metrics for r in waiting.result()] == [{"m": 4.0}]
    assert state.last_metrics == {"m": 4.0}


async def test_a_watcher_of_a_resumed_run_waits_for_its_first_step(state: RunState) -> None:
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(state.records_from(1))
        await settle()
        assert not waiting.done(), "the steps before the resume have no records: not the end"
        await state.record(StepRecord(3, {"m": 3.0}))
    assert [r.step for r in waiting.result()] == [3]


async def test_the_end_of_the_run_ends_every_watcher(state: RunState) -> None:
    async with asyncio.TaskGroup() as tasks:
        watchers = [tasks.create_task(state.records_from(3)) for _ in range(2)]
        await settle()
        await state.finish()
    assert [watcher.result() for watcher in watchers] == [(), ()]
    assert state.phase is RunPhase.FINISHED


async def test_a_late_watcher_still_gets_the_last_steps(state: RunState) -> None:
    await state.record(StepRecord(3, {}))
    await state.finish()
    assert [r.step for r in await state.records_from(3)] == [3]
    assert await state.records_from(4) == ()


async def test_all_who_wait_for_a_checkpoint_get_the_same_one(state: RunState) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(state.request_save()) for _ in range(2)]
        await settle()
        assert state.is_save_wanted
        state.answer_saves(3, "folder")
    assert [call.result() for call in calls] == [(3, "folder")] * 2
    assert not state.is_save_wanted


async def test_a_caller_that_went_away_wants_no_checkpoint(state: RunState) -> None:
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(state.request_save())
        await settle()
        call.cancel()
        await settle()
        assert not state.is_save_wanted
    state.answer_saves(3, "folder")


async def test_the_end_of_the_run_answers_who_waits_for_a_checkpoint(state: RunState) -> None:
    async def ask() -> str:
        try:
            await state.request_save()
        except NotReadyError as error:
            return str(error)
        return "saved"

    async with asyncio.TaskGroup() as tasks:
        before = tasks.create_task(ask())
        await settle()
        await state.finish()
        after = tasks.create_task(ask())
    for answer in (before.result(), after.result()):
        assert answer == "the run has ended and saves no more; its last checkpoint stands"


async def test_finishing_twice_is_harmless(state: RunState) -> None:
    await state.finish()
    state.answer_saves(3, "folder")
    await state.finish()
    assert state.phase is RunPhase.FINISHED


async def test_a_guards_hold_outlasts_a_lease_of_the_operator(state: RunState) -> None:
    state.hold("the reward has collapsed")
    state.pause(lease_s=0.01)
    async with asyncio.timeout(60):
        while "" in state.holders:
            await state.next_control_call()
    assert state.is_paused
    assert state.hold_reason == "the reward has collapsed"
    state.resume()
    assert not state.is_paused


@pytest.mark.parametrize("call", ["resume", "stop", "saved"])
async def test_a_paused_run_wakes_for_every_call_it_has_to_look_at(
    state: RunState, call: str
) -> None:
    state.pause()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(state.next_control_call())
        await settle()
        assert not waiting.done()
        if call == "saved":
            saving = tasks.create_task(state.request_save())
        elif call == "stop":
            state.stop("enough")
        else:
            state.resume()
        async with asyncio.timeout(60):
            await waiting
        if call == "saved":
            saving.cancel()
    assert state.is_paused is (call == "saved")


def test_the_run_is_over_after_the_last_step_or_a_stop(state: RunState) -> None:
    assert not state.is_over
    state.stop("enough")
    assert state.is_over
    assert RunState("trainer-1", total_steps=5, step=5).is_over


def test_seconds_of_all_phases_add_up(state: RunState, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = state._phase_since_s
    monkeypatch.setattr("services.trainer.loop.run_state.time.monotonic", lambda: now_s)
    for phase, seconds in ((RunPhase.TRAINING, 1.0), (RunPhase.PUBLISHING, 2.0)):
        now_s += seconds
        state.enter(phase)
    now_s += 4.0
    state.enter(RunPhase.TRAINING)
    now_s += 8.0
    assert state.seconds_by_phase() == {
        RunPhase.STARTING: 1.0,
        RunPhase.TRAINING: 2.0 + 8.0,
        RunPhase.PUBLISHING: 4.0,
    }
    assert state.phase_seconds == 8.0


def test_what_starting_took_before_counts_as_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.loop.run_state.time.monotonic", lambda: 100.0)
    state = RunState("trainer-1", total_steps=5, step=0, elapsed_s=7.0)
    assert state.seconds_by_phase() == {RunPhase.STARTING: 7.0}
