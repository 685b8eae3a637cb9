"""Whole runs whose trainer is killed: it resumes from its checkpoint, and replicas stay warm."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.report.run_record import read_progress
from sluice.service_contract import TRACKER_NAME
from tests.support.small_run import ENDLESS, GROUPS, WAIT_S, Assets, LiveRun, Record, run_to_end

SAVE_FREQ, KILL_AT = 2, 3
REPLICAS = ("rollout-0", "rollout-1")
OVERLAPPED = ("trainer.logger=[jsonl,tensorboard]", "sluice.asynchrony.max_staleness=2")
ONE_REPLICA = ("sluice.rollout.replicas=1", "sluice.trainer.min_replicas=1")


@dataclass
class Pids:
    """Process ids before the kill and near the end."""

    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)


async def until_recorded(run: LiveRun, step: int) -> None:
    """Returns at once when `step` is on record and in the metrics file, which a thread writes."""
    request = trainer_pb2.WatchStepsRequest(from_step=step)
    await run.until_step(1)
    async for message in run.trainer.WatchSteps(request, timeout=WAIT_S):
        if message.step >= step:
            break

    async def is_written() -> bool:
        file = run.run_dir / "metrics.jsonl"
        return file.is_file() and f'"step": {step}, ' in file.read_text(encoding="utf-8")

    await run.until(is_written, f"the metrics of step {step}")


async def end_after_restart(run: LiveRun, pids: Pids, instance_id: str) -> None:
    """Ends the run once the next instance is beyond every step that the killed one recorded."""

    async def another() -> bool:
        return (await run.status()).instance_id != instance_id

    await run.until(another, "another instance of the trainer")
    # The next instance may have cut the record to its checkpoint already.
    recorded = [int(row["step"] or 0) for row in read_progress(run.run_dir).steps]
    reached = max([KILL_AT, *recorded])

    async def has_advanced() -> bool:
        return (await run.status()).step > reached

    await run.until(has_advanced, "steps of another instance of the trainer")
    pids.after = {name: run.pid_of(name) for name in pids.before}
    await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)


def prompts_add_up(record: Record) -> bool:
    ends = ("trained", "filtered_", "dropped_", "skipped", "pending")
    accounts = record.accounts
    known = sum(count for name, count in accounts.items() if name.startswith(ends))
    return bool(accounts["submitted"] == known)


def recorded_steps(record: Record) -> list[int]:
    return [int(row["training/global_step"]) for row in record.steps]


def resumed_at(record: Record) -> int:
    """The step of the checkpoint from which the trainer resumed."""
    reported = re.search(r"restarted \(1 times so far\): .* from step (\d+)", record.log("trainer"))
    assert reported is not None
    return int(reported[1])


def last_before_kill(record: Record) -> int:
    """The last step that the killed trainer recorded."""
    steps = recorded_steps(record)
    return next((a for a, b in pairwise(steps) if b != a + 1), resumed_at(record))


def assert_each_once(shown: list[int], record: Record) -> None:
    """Every step is shown once. The kill may come when one is saved and not yet shown."""
    every = range(1, recorded_steps(record)[-1] + 1)
    assert shown in (list(every), [step for step in every if step != resumed_at(record)])


def assert_complete(record: Record) -> None:
    """The run has ended well, with every step trained and the last one saved."""
    assert (record.end.exit_code, record.end.failures) == (0, ())
    last = recorded_steps(record)[-1]
    assert last > KILL_AT
    assert f"the run ends at step {last}: seen enough" in record.log("trainer")
    read = [int(row["step"] or 0) for row in read_progress(record.run_dir).steps]
    assert_each_once(read, record)
    assert record.checkpoint(last).is_dir()
    assert prompts_add_up(record)
    assert record.accounts["prompts_lost"] == 0
    assert record.left_running == ()


def overrides(*further: str) -> list[str]:
    return [
        *ENDLESS,
        f"trainer.save_freq={SAVE_FREQ}",
        "sluice.rollout.replicas=2",
        "sluice.trainer.min_replicas=2",
        *further,
    ]


@pytest.fixture(scope="module")
def killed(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Pids]:
    """A run in a folder with a checkpoint of another run; its trainer is killed after step 3, while
    transfers overlap steps."""
    pids, run_dir = Pids(), tmp_path_factory.mktemp("killed") / "run"
    stranger = run_dir / "checkpoints"
    stranger.mkdir(parents=True)
    (stranger / TRACKER_NAME).write_text("700", encoding="ascii")

    async def kill(run: LiveRun) -> None:
        await until_recorded(run, KILL_AT)
        instance_id = (await run.status()).instance_id
        pids.before = {name: run.pid_of(name) for name in ("trainer", "reward", *REPLICAS)}
        run.send("trainer", signal.SIGKILL)
        await end_after_restart(run, pids, instance_id)

    return run_to_end(small_assets, run_dir, overrides(*OVERLAPPED), kill), pids


def test_a_killed_trainer_continues_from_its_runs_last_checkpoint_to_the_end(
    killed: tuple[Record, Pids],
) -> None:
    record, _ = killed
    assert_complete(record)
    log = record.log("trainer")
    assert resumed_at(record) >= SAVE_FREQ
    assert log.count("listening on") == 2


def test_replicas_and_the_reward_service_stay_up_while_the_trainer_is_started_again(
    killed: tuple[Record, Pids],
) -> None:
    record, pids = killed
    assert pids.after.pop("trainer") != pids.before.pop("trainer")
    assert pids.after == pids.before
    # With each trainer, and again where a heartbeat was late.
    assert all(record.log(name).count("registered as") >= 2 for name in REPLICAS)


def test_after_a_trainers_restart_no_prompt_is_lost_or_counted_twice(
    killed: tuple[Record, Pids],
) -> None:
    record, _ = killed
    last, accounts = recorded_steps(record)[-1], record.accounts
    assert prompts_add_up(record)
    assert accounts["prompts_lost"] == 0
    assert accounts["groups_trained"] == accounts["groups_acknowledged"]
    assert accounts["groups_trained"] == (last - resumed_at(record)) * GROUPS


def test_a_step_that_was_trained_again_counts_once_in_the_record(
    killed: tuple[Record, Pids],
) -> None:
    record, _ = killed
    steps = recorded_steps(record)
    resumed = resumed_at(record)
    last = last_before_kill(record)
    assert KILL_AT <= last < resumed + SAVE_FREQ
    assert steps == [*range(1, last + 1), *range(resumed + 1, steps[-1] + 1)]
    assert_each_once([int(row["step"] or 0) for row in read_progress(record.run_dir).steps], record)


def test_tensorboard_shows_each_step_once(killed: tuple[Record, Pids]) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events: Any = module.EventAccumulator(str(killed[0].run_dir / "tensorboard"))
    events.Reload()
    # Each logger has a thread of its own: the kill may come before this one wrote the last step.
    assert_each_once([event.step for event in events.Scalars("training/global_step")], killed[0])


def test_a_run_outlives_the_death_of_trainer_reward_service_and_a_replica_at_one_moment(
    small_assets: Assets, tmp_path: Path
) -> None:
    pids = Pids()

    async def kill(run: LiveRun) -> None:
        await until_recorded(run, KILL_AT)
        instance_id = (await run.status()).instance_id
        names = ("trainer", "reward", *REPLICAS)
        pids.before = {name: run.pid_of(name) for name in names}
        for name in ("trainer", "reward", "rollout-1"):
            run.send(name, signal.SIGKILL)
        await end_after_restart(run, pids, instance_id)

    record = run_to_end(small_assets, tmp_path / "run", overrides(), kill)
    assert_complete(record)
    assert pids.after["rollout-0"] == pids.before["rollout-0"]
    assert {n for n in pids.before if pids.after[n] != pids.before[n]} >= {"trainer", "reward"}
    assert record.accounts["tokens_residual_share"] < 0.01


def test_when_one_trainer_rank_is_killed_all_are_started_again_together(
    small_assets: Assets, tmp_path: Path
) -> None:
    pids = Pids()

    async def kill(run: LiveRun) -> None:
        await until_recorded(run, KILL_AT)
        instance_id = (await run.status()).instance_id
        names = ("trainer", "trainer-1", "reward", "rollout-0")
        pids.before = {name: run.pid_of(name) for name in names}
        run.send("trainer-1", signal.SIGKILL)
        await end_after_restart(run, pids, instance_id)

    two = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.checkpoint.async_save=true")
    record = run_to_end(small_assets, tmp_path / "run", overrides(*two, *ONE_REPLICA), kill)
    assert_complete(record)
    new = {name for name, pid in pids.before.items() if pids.after[name] != pid}
    assert new == {"trainer", "trainer-1"}
