"""What a run does when a guard's rule is broken."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.trainer.learner.checkpoint import Checkpoint
from services.trainer.loop.guards import RunGuards, read_record
from services.trainer.loop.run_state import RunState
from services.trainer.metrics.sinks import ValidationReport
from sluice.algorithm.guards import GuardRecord, Rollback
from sluice.config.schema.service import GuardRuleConfig, GuardsConfig
from sluice.errors import BatchUnfillableError, PeerError
from sluice.types import DataProgress
from tests.support.loop_world import ACCURACY, World, batch_of, run, until

EVERY_STEP = {"test_freq": 1, "save_freq": 1, "validates": True}


def guards(action: str, **fields: object) -> GuardsConfig:
    rule = {"deviations": 3.0, **fields} if "target" not in fields else fields
    return GuardsConfig(rules=[GuardRuleConfig(action=action, **rule)])  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    world = World(steps=6)
    world.register("a")
    return world


def collapses_at(*versions: int) -> object:
    return lambda version: (0.1 if version in versions else 0.9, 0.01)


async def test_a_collapse_is_rolled_back_as_the_next_version_and_the_data_continues(
    world: World,
) -> None:
    world.accuracy_of = collapses_at(3, 4)
    world.holds["train 4"] = asyncio.Event()  # the validation of version 3 ends meanwhile
    loop = world.loop(guards=guards("rollback"), **EVERY_STEP)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        await until(lambda: "evaluated 3 under 3" in world.events)
        world.holds.pop("train 4").set()
    assert "evaluate 4" not in world.events  # one validation that shows the collapse is enough
    begin = world.events.index("load 2 at rate 0.5")
    assert world.events[begin : begin + 6] == [
        "load 2 at rate 0.5",
        "save 5 at 40",
        "freeze 5",
        "publish 5",
        "announce 5 on a from 40 with the weights of 2",
        "evaluate 5",
    ]
    assert world.recorded["step 5"]["guards/rollbacks"] == 1.0
    last = world.recorded["step 6"]
    assert last["guards/rollbacks"] == 1.0
    assert last["guards/learning_rate_factor"] == 0.5
    assert last["guards/steps_in_weights"] == 3.0


async def test_a_checkpoint_that_a_save_under_way_deletes_is_not_restored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.accuracy_of = collapses_at(3, 4)

    async def ends_and_deletes() -> None:
        world.saved_to.discard(2)

    monkeypatch.setattr(world, "wait_until_saved", ends_and_deletes)
    await run(world.loop(guards=guards("rollback"), **EVERY_STEP))
    assert [event for event in world.events if event.startswith("load")] == ["load 1 at rate 0.5"]


async def test_a_rule_holds_the_run_with_its_reason_until_the_operator_resumes(
    world: World,
) -> None:
    world.accuracy_of = collapses_at(2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("hold"), **EVERY_STEP)))
        await until(lambda: bool(world.state.hold_reason) and world.state.phase == "paused")
        assert "0.1 ± 0.01 at step 2, best 0.9 ± 0.01" in world.state.hold_reason
        world.state.resume("somebody else")
        assert world.state.is_paused
        world.state.resume()
    assert not world.state.hold_reason
    assert "train 6" in world.events


async def test_a_resumed_run_is_held_again_by_a_new_collapse_only(world: World) -> None:
    world.accuracy_of = collapses_at(2, 3, 4)
    reasons = list[str]()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("hold"), **EVERY_STEP)))
        for _ in range(2):
            await until(lambda: bool(world.state.hold_reason) and world.state.phase == "paused")
            reasons.append(world.state.hold_reason)
            world.state.resume()
    assert ["at step 2" in reasons[0], "at step 4" in reasons[1]] == [True, True]


async def test_a_run_that_another_holder_pauses_is_rolled_back_after_the_pause(
    world: World,
) -> None:
    world.accuracy_of = collapses_at(3, 4)
    world.holds["evaluate 3"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("rollback"), **EVERY_STEP)))
        await until(lambda: "evaluate 3" in world.events)
        world.state.pause(holder="sluice eval")
        world.holds.pop("evaluate 3").set()
        await until(lambda: world.state.phase == "paused")
        assert "load 2 at rate 0.5" not in world.events
        world.state.resume("sluice eval")
    assert "load 2 at rate 0.5" in world.events


async def test_a_policy_that_fills_no_batch_is_validated_and_rolled_back(world: World) -> None:
    world.accuracy_of = collapses_at(3)
    world.faults["take 4"] = BatchUnfillableError("hardly a group is kept")
    await run(world.loop(guards=guards("rollback"), **{**EVERY_STEP, "test_freq": 2}))
    begin = world.events.index("take 4")
    found = [event for event in world.events[begin:] if event.split()[0] in {"evaluate", "load"}]
    assert found[:2] == ["evaluate 3", "load 2 at rate 0.5"]
    assert world.state.step == 6


async def test_a_healthy_policy_that_fills_no_batch_ends_the_run(world: World) -> None:
    world.faults["take 4"] = BatchUnfillableError("hardly a group is kept")
    with pytest.raises(ExceptionGroup) as caught:
        await run(world.loop(guards=guards("rollback"), **EVERY_STEP))
    assert caught.group_contains(BatchUnfillableError)


async def test_a_target_ends_the_run_as_at_its_last_step(world: World) -> None:
    world.accuracy_of = lambda version: (0.1 * version, 0.01)
    await run(world.loop(guards=guards("stop", target=0.3), **EVERY_STEP))
    assert world.state.step < 6
    assert "reaches 0.3" in (world.state.stop_reason or "")


async def test_failed_validations_trigger_nothing_and_are_shown(world: World) -> None:
    world.faults["evaluate 6"] = world.faults["evaluate 5"] = PeerError("reward", "x", "away")
    world.accuracy_of = lambda _version: (0.9, 0.01)
    with pytest.raises(ExceptionGroup):  # as without guards: the last validation failed
        await run(world.loop(guards=guards("rollback"), **EVERY_STEP))
    assert not any(event.startswith("load") for event in world.events)
    [(_, found)] = world.state.judgements()
    assert (found.state, "failed" in found.detail) == ("no signal", True)


async def test_a_metric_that_never_appears_triggers_nothing_and_is_shown_with_its_neighbours(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    config = guards("hold", metric="val-core/s/acc/mean@2")
    await run(world.loop(guards=config, **EVERY_STEP))
    [(_, found)] = world.state.judgements()
    assert found.state == "no signal"
    assert "val-core/s/acc/mean@2" in found.detail
    assert f"nearest: {ACCURACY}" in caplog.text


def noted(folder: Path, record: GuardRecord = GuardRecord()) -> RunGuards:  # noqa: B008 - frozen
    file = folder / "guards.json"
    return RunGuards(guards("rollback"), file, RunState("t", 99, 0), record)


def report(value: float) -> ValidationReport:
    return ValidationReport({ACCURACY: value}, (), 1, {ACCURACY: 0.01})


def test_the_best_checkpoint_and_the_one_being_validated_are_protected(tmp_path: Path) -> None:
    found = noted(tmp_path)
    for step, accuracy in enumerate((0.95, 0.9, 0.5)):
        found.note_validated(step, report(accuracy))
    found.note_saved(1)
    found.note_saved(2)
    found.note_validating(3)
    # That of step 0 is an earlier run's.
    assert set(found.steps_to_protect({0, 1, 2, 3})) == {1, 3}


def test_a_restarted_run_finds_rule_rollbacks_and_rate_as_they_were(tmp_path: Path) -> None:
    before = noted(tmp_path, GuardRecord(rollbacks=(Rollback(4, 1, 0.5),)))
    before.note_validated(5, report(0.9))
    before.note_validated(6, report(0.1))
    at = Checkpoint(6, tmp_path / "global_step_6" / "actor", DataProgress(0))
    after = noted(tmp_path, read_record(at))
    assert after.is_due
    assert after.learning_rate_factor == 0.5
    earlier = Checkpoint(3, tmp_path / "global_step_3" / "actor", DataProgress(0))
    assert read_record(earlier) == GuardRecord({"held-out accuracy": ()}, saved=(3,))
    assert read_record(None) == GuardRecord()


def test_the_checkpoint_under_validation_stays_while_train_steps_end(tmp_path: Path) -> None:
    found = noted(tmp_path)
    found.note_validating(4)
    found.note_step(5, {"actor/entropy": 1.0})
    assert set(found.steps_to_protect({4, 5})) == {4}
    found.note_validated(4, report(0.9))
    found.note_validating(None)
    assert set(found.steps_to_protect({4, 5})) == set()


def test_a_rollback_that_was_killed_before_its_save_is_due_again(tmp_path: Path) -> None:
    before = noted(tmp_path)
    for step, accuracy in ((2, 0.9), (3, 0.1)):
        before.note_validated(step, report(accuracy))
        before.note_saved(step)
    verdict = before.verdict(lambda: {2, 3})
    assert verdict is not None
    before.note_rollback(verdict, 4)
    assert not before.is_due
    at = Checkpoint(3, tmp_path / "global_step_3" / "actor", DataProgress(0))
    assert noted(tmp_path, read_record(at)).is_due


def test_after_a_hold_was_ended_only_values_that_come_later_count(tmp_path: Path) -> None:
    state = RunState("t", 99, 4)
    found = RunGuards(guards("hold"), tmp_path / "guards.json", state, GuardRecord())
    for step, accuracy in ((2, 0.9), (3, 0.1)):
        found.note_validated(step, report(accuracy))
    assert found.verdict(set) is not None
    assert not found.is_due  # held
    assert found.verdict(set) is None  # resumed, while the validation of step 4 runs
    found.note_validated(4, report(0.1))
    assert found.is_due


def test_a_run_that_is_over_obeys_no_rule(tmp_path: Path) -> None:
    state = RunState("t", 3, 3)
    found = RunGuards(guards("rollback"), tmp_path / "guards.json", state, GuardRecord(saved=(2,)))
    for step, accuracy in ((2, 0.9), (3, 0.1)):
        found.note_validated(step, report(accuracy))
    assert found.is_broken
    assert found.verdict(lambda: {2}) is None


async def test_a_rollback_restores_no_checkpoint_of_the_collapse(world: World) -> None:
    world.accuracy_of = lambda version: (0.1 if version >= 3 else 0.9, 0.01)
    settings = {**EVERY_STEP, "save_freq": 3}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("rollback"), **settings)))
        await until(lambda: bool(world.state.hold_reason))
        assert "no checkpoint with a good validation" in world.state.hold_reason
        world.state.stop("seen")
    assert not any(event.startswith("load") for event in world.events)


async def test_a_pause_during_the_validation_out_of_turn_defers_the_rollback(world: World) -> None:
    world.accuracy_of = collapses_at(3)
    world.faults["take 4"] = BatchUnfillableError("hardly a group is kept")
    world.holds["evaluate 3"] = asyncio.Event()
    settings = {**EVERY_STEP, "test_freq": 2}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("rollback"), **settings)))
        await until(lambda: "evaluate 3" in world.events)
        world.state.pause(holder="sluice eval")
        world.holds.pop("evaluate 3").set()
        await until(lambda: world.state.phase == "paused")
        world.state.resume("sluice eval")
    assert "load 2 at rate 0.5" in world.events


async def test_a_restarted_run_that_fills_no_batch_validates_its_checkpoint(tmp_path: Path) -> None:
    world = World(steps=6, step=3)
    world.register("a")
    world.saved_to = {2, 3}
    before = noted(tmp_path)
    before.note_validated(2, report(0.9))
    before.note_saved(2)
    world.accuracy_of = collapses_at(3)
    world.faults["take 4"] = BatchUnfillableError("hardly a group is kept")
    at = Checkpoint(3, tmp_path / "global_step_3" / "actor", DataProgress(30))
    record = read_record(at)
    settings = {**EVERY_STEP, "test_freq": 2}
    await run(world.loop(at.progress, guards("rollback"), record, **settings))
    assert [one for one in world.events if one.split()[0] in {"evaluate", "load"}][:2] == [
        "evaluate 3",
        "load 2 at rate 0.5",
    ]


async def test_a_hold_of_a_policy_that_fills_no_batch_says_what_a_resume_does(world: World) -> None:
    world.accuracy_of = collapses_at(3)
    world.faults["take 4"] = BatchUnfillableError("hardly a group is kept")
    with pytest.raises(ExceptionGroup) as caught:
        await run_and_resume(world, "fills no batch, so that a resume ends the run")
    assert caught.group_contains(BatchUnfillableError)


async def run_and_resume(world: World, reason: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("hold"), **EVERY_STEP)))
        await until(lambda: reason in world.state.hold_reason)
        world.state.resume()


async def test_a_pause_while_a_rollback_awaits_a_transfer_comes_first(world: World) -> None:
    world.accuracy_of = collapses_at(3, 4)
    world.holds["train 4"] = asyncio.Event()
    world.holds["publish 4"] = asyncio.Event()
    settings = {**EVERY_STEP, "overlaps": True}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=guards("rollback"), **settings)))
        await until(lambda: "evaluated 3 under 3" in world.events)
        world.holds.pop("train 4").set()
        await until(lambda: "publish 4" in world.events and world.state.phase == "publishing")
        await pause_until_the_end_of(world, "publish 4")
    assert "load 2 at rate 0.5" in world.events


async def test_a_pause_while_a_rollback_awaits_a_validation_comes_first(world: World) -> None:
    kept = {3: 0.0}
    world.batch_of = lambda step: replace(
        batch_of(step), statistics={"train/groups_kept": kept.get(step, 1.0)}
    )
    world.accuracy_of = lambda version: (0.1 * version, 0.01)
    world.holds |= {event: asyncio.Event() for event in ("train 3", "evaluate 3")}
    rules = guards("rollback", metric="train/groups_kept", limit=0.5, deviations=None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(guards=rules, **EVERY_STEP)))
        await until(lambda: "train 3" in world.events)
        world.state.pause(holder="sluice")
        world.holds.pop("train 3").set()
        await until(lambda: "evaluate 3" in world.events and world.state.phase == "paused")
        world.state.resume("sluice")
        await until(lambda: world.state.phase == "evaluating")
        await pause_until_the_end_of(world, "evaluate 3")
    assert "load 2 at rate 0.5" in world.events


async def pause_until_the_end_of(world: World, event: str) -> None:
    """Pause, let an event end that a rollback awaits, and resume; no rollback comes before."""
    world.state.pause(holder="sluice eval")
    world.holds.pop(event).set()
    await until(lambda: world.state.phase == "paused" or "load 2 at rate 0.5" in world.events)
    assert "load 2 at rate 0.5" not in world.events
    world.state.resume("sluice eval")


async def test_a_trainer_that_starts_at_a_rollback_announces_it(world: World) -> None:
    world.state.step = 3
    world.saved_to = {3}
    record = GuardRecord(rollbacks=(Rollback(3, 1, 0.5),), saved=(3,))
    await run(world.loop(DataProgress(30), guards("rollback"), record, **EVERY_STEP))
    assert "announce 3 on a from 30 with the weights of 1" in world.events
