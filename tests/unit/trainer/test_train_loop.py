"""The order of a run's work, and its pauses, stops and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.trainer.loop.run_state import RunPhase
from services.trainer.loop.train_loop import TrainLoop
from sluice.algorithm.accounting import ReplicaCounters
from sluice.errors import BatchUnfillableError, DataExhaustedError, DeadlineError, leaves
from sluice.types import DataProgress
from tests.support.loop_world import WAIT_S, World, run, until


@pytest.fixture
def world() -> World:
    world = World()
    world.register("a")
    return world


@contextmanager
def only(kind: type[Exception]) -> Iterator[pytest.ExceptionInfo[ExceptionGroup[Any]]]:
    with pytest.raises(ExceptionGroup) as caught:
        yield caught
    assert caught.group_contains(kind)


async def test_a_step_is_taken_trained_published_acknowledged_and_only_then_announced(
    world: World,
) -> None:
    await run(world.loop())
    assert world.events == [
        *("freeze 0", "publish 0", "announce 0 on a", "accounts"),
        *("take 1", "train 1", "freeze 1", "publish 1", "acknowledge 1", "announce 1 on a from 10"),
        *("take 2", "train 2", "freeze 2", "publish 2", "acknowledge 2", "announce 2 on a from 20"),
        *("take 3", "train 3", "freeze 3", "publish 3", "acknowledge 3", "announce 3 on a from 30"),
        "accounts",
    ]
    assert world.state.phase is RunPhase.FINISHED


async def test_the_record_holds_every_step_and_the_accounts(world: World) -> None:
    await run(world.loop())
    assert [name for name in world.recorded if name.startswith("step")] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    metrics = world.recorded["step 2"]
    assert metrics["actor/pg_loss"] == 0.5
    assert metrics["training/global_step"] == 2
    assert (metrics["weights/stall_s"], metrics["weights/delivery_s"]) == (0.01, 0.1)
    accounts = world.recorded["accounts"]
    assert accounts["submitted"] == 9.0
    assert {"trainer_s/training", "trainer_s/waiting_for_batch"} <= accounts.keys()


async def test_steps_and_the_end_of_the_run_have_its_accounts(world: World) -> None:
    world.loads["a"] = ReplicaCounters(
        generated_tokens=70,
        unsent_tokens=10,
        running_tokens=5,
        wall_seconds=3.0,
        seconds_by_state={"idle": 3.0},
    )
    world.reported = {"reward/tokens/received": 55.0, "reward/tokens/trained": 55.0}
    await run(world.loop())
    step, accounts = world.recorded["step 1"], world.recorded["accounts"]
    for accounting in ({k.removeprefix("accounts/"): v for k, v in step.items()}, accounts):
        assert accounting["tokens_residual"] == 0
        assert (accounting["tokens/trained"], accounting["tokens/aborted"]) == (55, 10)
        assert (accounting["generated_tokens"], accounting["rollout_s/idle"]) == (70, 3.0)
    assert accounts["submitted"] == 9.0


async def test_a_steps_row_counts_no_work_of_replicas_from_before_the_step(world: World) -> None:
    """One waits for weights when the step begins, another outlived its trainer and returns."""

    def beat(name: str, tokens: int, busy_s: float) -> None:
        load = ReplicaCounters(generated_tokens=tokens, busy_seconds=busy_s, wall_seconds=busy_s)
        world.fleet.heartbeat(name, f"{name}-1", load, draining=False, now_s=0.0)

    for event in ("announce 1 on a from 10", "seed b", "train 2"):
        world.holds[event] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "announce 1 on a from 10" in world.events)
        world.register("b")
        beat("b", 1000, 4800.0)
        world.holds["announce 1 on a from 10"].set()
        await until(lambda: "train 2" in world.events)
        beat("b", 1100, 4890.0)
        world.register("c")
        beat("c", 90_000_000, 30_000.0)
        for held in world.holds.values():
            held.set()
    step = world.recorded["step 2"]
    assert step["rollout/replicas"] == 3
    assert step["timing_s/generation_timing/max"] == 90.0
    assert step["timing_s/generate_sequences"] == 30.0
    assert step["rollout/tokens_per_s"] * step["timing_s/step"] == pytest.approx(100.0)


async def test_engines_that_share_devices_sleep_from_the_batch_until_the_next_weights(
    world: World,
) -> None:
    await run(world.loop(engines_sleep=True))
    order = [event.split()[0] for event in world.events]
    first = order.index("take")
    assert order[first : first + 5] == ["take", "sleep", "train", "freeze", "publish"]
    assert order.count("sleep") == order.count("train") == 3


async def test_the_time_of_an_update_begins_when_engines_sleep(world: World) -> None:
    world.holds["sleep"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(engines_sleep=True)))
        await until(lambda: "sleep" in world.events)
        await asyncio.sleep(0.2)
        world.holds["sleep"].set()
    step = world.recorded["step 1"]
    assert step["timing_s/step"] - step["timing_s/train"] > 0.19


@pytest.mark.parametrize("engines_sleep", [True, False])
async def test_a_newcomer_gets_weights_beside_training_only_if_engines_do_not_sleep(
    world: World, engines_sleep: bool
) -> None:
    world.holds["train 1"] = asyncio.Event()
    gone = world.register("gone")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(engines_sleep=engines_sleep)))
        await until(lambda: "train 1" in world.events)
        world.register("late")
        world.fleet.expel(gone, "a test")  # which is announced meanwhile in any case
        await until(lambda: any(one.startswith("announce 0 on a ") for one in world.events))
        for _ in range(5):
            await asyncio.sleep(0)
        assert ("seed late" in world.events) != engines_sleep
        world.holds["train 1"].set()


async def test_no_version_is_frozen_while_a_newcomer_is_sent_what_it_overwrites(
    world: World,
) -> None:
    world.holds["train 2"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "train 2" in world.events)
        world.holds["snapshot"] = asyncio.Event()
        world.holds["train 2"].set()
        await until(lambda: world.state.phase is RunPhase.PUBLISHING)
        for _ in range(5):
            await asyncio.sleep(0)
        assert "freeze 2" not in world.events
        world.holds["snapshot"].set()
    assert "freeze 2" in world.events


async def test_no_engine_sleeps_while_a_version_is_evaluated(world: World) -> None:
    world.holds["evaluate 0"] = asyncio.Event()
    loop = world.loop(engines_sleep=True, validates=True, val_before_train=True, test_freq=2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        await until(lambda: world.state.phase is RunPhase.EVALUATING)
        assert "take 1" in world.events
        assert "sleep" not in world.events
        world.holds["evaluate 0"].set()
    assert world.events.index("evaluated 0 under 0") < world.events.index("sleep")


async def test_no_version_is_published_while_one_is_evaluated(world: World) -> None:
    world.holds["evaluate 0"] = asyncio.Event()
    loop = world.loop(validates=True, val_before_train=True, test_freq=2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        await until(lambda: world.state.phase is RunPhase.EVALUATING)
        # The next batch was trained meanwhile.
        assert "train 1" in world.events
        assert "publish 1" not in world.events
        world.holds["evaluate 0"].set()
    evaluated = [event for event in world.events if event.startswith("evaluated")]
    assert evaluated == ["evaluated 0 under 0", "evaluated 2 under 2", "evaluated 3 under 3"]
    assert world.recorded["evaluation 3"] == {"val-core/s/acc/mean@1": 0.5}


@pytest.mark.parametrize(
    ("save_freq", "saved"),
    [(-1, []), (2, ["save 2 at 20", "save 3 at 30"]), (3, ["save 3 at 30"])],
)
async def test_checkpoints_are_saved_every_so_often_and_at_the_end_with_the_data_cursor(
    world: World, save_freq: int, saved: list[str]
) -> None:
    await run(world.loop(save_freq=save_freq))
    assert [event for event in world.events if event.startswith("save")] == saved


async def test_a_resumed_run_continues_at_its_step_and_always_sends_the_cursor() -> None:
    world = World(steps=4, step=2)
    world.register("a")
    await run(world.loop(DataProgress(20)))
    announced = [event for event in world.events if event.startswith("announce")]
    assert announced == [f"announce {step} on a from {10 * step}" for step in (2, 3, 4)]
    assert world.events[0] == "freeze 2"
    assert "take 3" in world.events
    assert "take 2" not in world.events


async def test_a_resumed_run_that_is_complete_only_ends() -> None:
    world = World(steps=2, step=2)
    world.register("a")
    await run(world.loop(DataProgress(20), save_freq=1))
    assert not [event for event in world.events if event.startswith(("take", "save"))]


async def test_a_newcomer_is_seeded_and_announced_while_a_batch_is_awaited(world: World) -> None:
    world.holds["take 2"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        world.register("b")
        await until(lambda: "announce 1 on ab from 10" in world.events)
        world.holds["take 2"].set()
    assert world.events.count("seed b") == 1
    assert "announce 2 on ab from 20" in world.events


async def test_a_lost_replica_is_announced_at_once(world: World) -> None:
    lost = world.register("b")
    world.holds["take 2"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        world.fleet.expel(lost, "silent")
        await until(lambda: "announce 1 on a from 10" in world.events)
        world.holds["take 2"].set()


async def test_a_slow_newcomer_does_not_delay_the_news_of_a_lost_replica(world: World) -> None:
    lost = world.register("b")
    world.holds |= {"take 2": asyncio.Event(), "seed c": asyncio.Event()}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "take 2" in world.events)
        world.register("c")
        world.fleet.expel(lost, "silent")
        await until(lambda: "announce 1 on a from 10" in world.events)
        for hold in world.holds.values():
            hold.set()


async def test_nothing_is_announced_between_a_publication_and_its_acknowledgement(
    world: World,
) -> None:
    world.holds["acknowledge 1"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "acknowledge 1" in world.events)
        lost = world.register("b")
        world.fleet.expel(lost, "silent")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not [event for event in world.events if event.startswith("announce 1")]
        world.holds["acknowledge 1"].set()


async def test_an_announcement_during_a_step_counts_its_batch_as_trained(world: World) -> None:
    world.holds["train 2"] = asyncio.Event()
    lost = world.register("b")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "train 2" in world.events)
        world.fleet.expel(lost, "silent")
        await until(lambda: "announce 1 on a from 20" in world.events)
        world.holds["train 2"].set()
    assert "announce 1 on ab from 10" in world.events


async def test_a_service_that_restarts_during_a_step_learns_that_its_batch_is_in_hand(
    world: World,
) -> None:
    world.holds |= {"train 2": asyncio.Event(), "take 3": asyncio.Event()}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "train 2" in world.events)
        assert world.reported_progress() == DataProgress(20)
        world.holds["train 2"].set()
        await until(lambda: "take 3" in world.events)
        assert world.reported_progress() == DataProgress(20)
        world.holds["take 3"].set()


async def test_too_few_replicas_within_the_deadline_end_the_run_with_a_remedy() -> None:
    with only(DeadlineError) as caught:
        waits = ("sluice.trainer.replica_wait_timeout_s=0.05", "sluice.trainer.min_replicas=2")
        await run(World().loop(overrides=waits))
    (error,) = leaves(caught.value)
    assert "rollout fleet" in str(error)
    assert "waiting for 2 replicas" in str(error)
    assert "raise sluice.trainer.replica_wait_timeout_s" in str(error)


async def test_an_unfillable_batch_ends_the_run_with_its_own_message(world: World) -> None:
    world.faults["take 2"] = BatchUnfillableError("almost no group is mixed")
    with only(BatchUnfillableError):
        await run(world.loop())
    assert world.events.count("accounts") == 1  # those before the first step
    assert "accounts" not in world.recorded


ENDED = DataExhaustedError("the data set is exhausted with 1 of 4 groups")


async def test_the_end_of_the_data_set_is_the_end_of_a_run_that_has_trained(world: World) -> None:
    world.faults["take 3"] = ENDED
    loop = world.loop(save_freq=100, validates=True, test_freq=100)
    await run(loop)
    assert "save 2 at 20" in world.events
    assert {"evaluation 2", "accounts"} <= world.recorded.keys()
    assert world.state.stop_reason == "the data set has ended after 2 steps"
    assert world.state.phase is RunPhase.FINISHED
    assert loop.accounts["data_exhausted"] == 1


async def test_a_run_that_reaches_its_last_step_has_not_exhausted_its_data(world: World) -> None:
    loop = world.loop()
    await run(loop)
    assert loop.accounts["data_exhausted"] == 0


async def test_a_run_that_resumes_at_the_end_of_its_data_set_only_ends() -> None:
    world = World(steps=4, step=2)
    world.register("a")
    world.faults["take 3"] = ENDED
    await run(world.loop(DataProgress(20), save_freq=1))
    assert world.state.stop_reason == "the data set has ended after 2 steps"
    assert not [event for event in world.events if event.startswith("save")]


async def test_a_data_set_that_ends_before_the_first_step_is_an_error(world: World) -> None:
    world.faults["take 1"] = ENDED
    with only(DataExhaustedError):
        await run(world.loop())
    assert "accounts" not in world.recorded


FAILED = DeadlineError("reward service", "evaluating", 1.0)


async def test_a_failed_validation_is_recorded_and_the_run_continues(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.faults |= {"evaluate 0": FAILED, "evaluate 2": FAILED}
    await run(world.loop(validates=True, val_before_train=True, test_freq=1))
    assert {"failed evaluation 0", "failed evaluation 2"} <= world.recorded.keys()
    assert {"evaluation 1", "evaluation 3", "step 3"} <= world.recorded.keys()
    assert "no validation of version 2: reward service" in caplog.text


@pytest.mark.parametrize(
    ("failing", "settings"),
    [("evaluate 3", {"test_freq": 1}), ("evaluate 0", {"val_before_train": True})],
)
async def test_a_run_whose_last_validation_failed_ends_in_order_and_fails(
    world: World, failing: str, settings: dict[str, Any]
) -> None:
    world.faults[failing] = FAILED
    with only(DeadlineError):
        await run(world.loop(validates=True, save_freq=3, **settings))
    assert {"step 3", "accounts"} <= world.recorded.keys()
    assert "save 3 at 30" in world.events
    assert world.state.phase is RunPhase.FINISHED


async def test_a_run_that_only_validates_takes_no_batch(world: World) -> None:
    await run(world.loop(validates=True, val_only=True, save_freq=1))
    assert "evaluation 0" in world.recorded
    assert not [event for event in world.events if event.startswith(("take", "save"))]
    assert world.state.phase is RunPhase.FINISHED


async def test_a_run_that_only_validates_fails_with_its_validation(world: World) -> None:
    world.faults["evaluate 0"] = FAILED
    with only(DeadlineError):
        await run(world.loop(validates=True, val_only=True))
    assert "failed evaluation 0" in world.recorded


async def test_a_stop_ends_the_run_after_its_step_and_saves_if_it_saves_at_all(
    world: World,
) -> None:
    world.holds["train 2"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(save_freq=100)))
        await until(lambda: "train 2" in world.events)
        world.state.stop("enough")
        world.holds["train 2"].set()
    assert "take 3" not in world.events
    assert "save 2 at 20" in world.events


async def test_a_stop_without_validation_ends_the_running_one_and_saves(world: World) -> None:
    world.holds["evaluate 0"] = asyncio.Event()  # it never ends
    loop = world.loop(validates=True, val_before_train=True, test_freq=2, save_freq=100)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        await until(lambda: world.state.phase is RunPhase.EVALUATING)
        world.state.stop("interrupted", skips_validation=True)
    assert not [event for event in world.events if event.startswith("evaluated")]
    assert "save 1 at 10" in world.events
    assert world.state.phase is RunPhase.FINISHED


async def test_a_skipped_validation_protects_no_checkpoint(world: World) -> None:
    world.holds["evaluate 0"] = asyncio.Event()  # it never ends
    loop = world.loop(validates=True, val_before_train=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(loop))
        await until(lambda: "evaluate 0" in world.events)
        assert 0 in world.guards.steps_to_protect({0})
        world.state.stop("interrupted", skips_validation=True)
    assert 0 not in world.guards.steps_to_protect({0})


async def test_a_stop_that_saves_also_saves_a_run_that_saves_no_steps(world: World) -> None:
    world.holds["train 2"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop(save_freq=-1)))
        await until(lambda: "train 2" in world.events)
        world.state.stop("sluice stop", saves=True)
        world.holds["train 2"].set()
    assert [event for event in world.events if event.startswith("save")] == ["save 2 at 20"]
    assert "take 3" not in world.events


async def paused(world: World, tasks: asyncio.TaskGroup, loop: TrainLoop) -> None:
    """Start the loop and pause it after step 1."""
    world.holds["train 1"] = asyncio.Event()
    tasks.create_task(run(loop))
    await until(lambda: "train 1" in world.events)
    world.state.pause()
    world.holds["train 1"].set()
    await until(lambda: world.state.phase is RunPhase.PAUSED)
    assert "take 2" not in world.events


async def test_a_paused_run_continues_when_resumed(world: World) -> None:
    async with asyncio.TaskGroup() as tasks:
        await paused(world, tasks, world.loop())
        world.state.resume()
    assert "train 3" in world.events


async def test_a_paused_run_can_be_stopped(world: World) -> None:
    async with asyncio.TaskGroup() as tasks:
        await paused(world, tasks, world.loop())
        world.state.stop("enough")
    assert "take 2" not in world.events
    assert "accounts" in world.recorded


async def test_a_paused_run_saves_at_once_when_asked(world: World) -> None:
    async with asyncio.TaskGroup() as tasks:
        await paused(world, tasks, world.loop())
        async with asyncio.timeout(WAIT_S):
            assert await world.state.request_save() == (1, "folder-1")
        assert world.state.phase is RunPhase.PAUSED or "take 2" not in world.events
        world.state.resume()
    assert "save 1 at 10" in world.events


async def test_a_resume_during_a_save_is_not_lost(world: World) -> None:
    world.holds["save 1 at 10"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        await paused(world, tasks, world.loop())
        tasks.create_task(world.state.request_save())
        await until(lambda: "save 1 at 10" in world.events)
        world.state.resume()
        world.holds["save 1 at 10"].set()
    assert "train 3" in world.events


async def test_a_running_run_saves_after_the_step_when_asked(world: World) -> None:
    world.holds["train 2"] = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(world.loop()))
        await until(lambda: "train 2" in world.events)
        saving = tasks.create_task(world.state.request_save())
        await asyncio.sleep(0)
        world.holds["train 2"].set()
    assert saving.result() == (2, "folder-2")
    assert [event for event in world.events if event.startswith("save")] == ["save 2 at 20"]
