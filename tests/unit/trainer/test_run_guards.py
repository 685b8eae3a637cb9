"""What a run does when a guard's rule is broken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.trainer.learner.checkpoint import Checkpoint
from services.trainer.loop.guards import RunGuards, check_guards, read_record
from services.trainer.loop.run_state import RunState
from services.trainer.metrics.validation import ValidationReport
from sluice.algorithm.guards import GuardRecord, Rollback
from sluice.config.schema.guards import GuardRuleConfig, GuardsConfig
from sluice.errors import BatchUnfillableError, ConfigError, PeerError
from sluice.types import DataProgress
from tests.support.loop_world import ACCURACY, World, run, until

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
    world.accuracy_of = collapses_at(3)
    world.holds["train 4"] = asyncio.Event()  # the validation of version 3 ends meanwhile
    loop = world.loop(guards=guards("rollback"), **EVERY_STEP)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        await until(lambda: "evaluated 3 under 3" in world.events)
        world.holds.pop("train 4").set()
    begin = world.events.index("load 2 at rate 0.5")
    assert world.events[begin : begin + 6] == [
        "load 2 at rate 0.5",
        "save 5 at 40",
        "freeze 5",
        "publish 5",
        "announce 5 on a from 40 with the weights of 2",
        "evaluate 5",
    ]
    assert world.recorded["rollback 5"]["guards/rollbacks"] == 1.0
    last = world.recorded["step 6"]
    assert last["guards/rollbacks"] == 1.0
    assert last["guards/learning_rate_factor"] == 0.5
    assert last["guards/steps_in_weights"] == 3.0


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
    world.accuracy_of = collapses_at(2, 4)
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


def test_a_metric_that_no_run_has_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"rules\[0\].metric=actor/entrpy.*actor/entropy"):
        check_guards(guards("hold", metric="actor/entrpy"))


def noted(folder: Path, record: GuardRecord = GuardRecord()) -> RunGuards:  # noqa: B008 - frozen
    file = folder / "guards.json"
    return RunGuards(guards("rollback"), file, RunState("t", 99, 0), record)


def report(value: float) -> ValidationReport:
    return ValidationReport({ACCURACY: value}, (), 1, {ACCURACY: 0.01})


def test_the_best_checkpoint_and_the_one_being_validated_are_protected(tmp_path: Path) -> None:
    found = noted(tmp_path)
    for step, accuracy in enumerate((0.95, 0.9, 0.5)):
        found.validated(step, report(accuracy))
    found.saved(1)
    found.saved(2)
    found.validating(3)
    # That of step 0 is an earlier run's.
    assert set(found.protected({0, 1, 2, 3})) == {1, 3}


def test_a_restarted_run_finds_rule_rollbacks_and_rate_as_they_were(tmp_path: Path) -> None:
    before = noted(tmp_path, GuardRecord(rollbacks=(Rollback(4, 1, 0.5),)))
    before.validated(5, report(0.9))
    before.validated(6, report(0.1))
    at = Checkpoint(6, tmp_path / "global_step_6" / "actor", DataProgress(0))
    after = noted(tmp_path, read_record(at))
    assert after.is_due
    assert after.learning_rate_factor == 0.5
    earlier = Checkpoint(3, tmp_path / "global_step_3" / "actor", DataProgress(0))
    assert read_record(earlier) == GuardRecord({"held-out accuracy": ()}, (), -1)
    assert read_record(None) == GuardRecord()
