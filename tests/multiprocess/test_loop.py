"""A whole run in real processes: what it adds up to, and what replicas may do meanwhile."""

from __future__ import annotations

import asyncio
import re
import signal
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.rollout.registration import _WARNS_AFTER_S
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2
from sluice.service_contract import WEIGHTS_HEALTH
from tests.support.small_run import (
    ENDLESS,
    GROUPS,
    WAIT_S,
    Assets,
    LiveRun,
    Record,
    extra_replica,
    run_to_end,
)

MANY_STEPS = 1_000_000
SERVICES = {
    "trainer": {"sluice.api.trainer.v1.TrainerService"},
    "reward": {"sluice.api.reward.v1.RewardService"},
    "rollout": {
        "sluice.api.rollout.v1.RolloutService",
        "sluice.api.weights.v1.WeightSyncService",
    },
}


@dataclass
class Observed:
    """What was seen while the run trained."""

    health: dict[str, str] = field(default_factory=dict)
    reflected: dict[str, set[str]] = field(default_factory=dict)
    killed: str = ""
    step_at_kill: int = 0
    without_the_killed: tuple[int, set[str]] = (0, set())
    restarted: str = ""
    saved: Any = None
    step_while_paused: int = 0
    newcomer_tokens: int = 0
    watched: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def eventful(
    small_assets: Assets, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Record, Observed]:
    """One asynchronous run, in which a replica is killed and another one joins.

    It continues until everything has been seen, so that nothing depends on how fast it is.
    """
    seen = Observed()
    record = run_to_end(
        small_assets,
        tmp_path_factory.mktemp("eventful") / "run",
        [
            *ENDLESS,
            f"trainer.save_freq={MANY_STEPS}",
            "sluice.rollout.replicas=2",
            "sluice.trainer.min_replicas=2",
            "sluice.asynchrony.max_staleness=2",
        ],
        lambda run: disturb(run, seen),
    )
    return record, seen


async def disturb(run: LiveRun, seen: Observed) -> None:
    async with asyncio.TaskGroup() as tasks:
        await run.until_step(1)
        watching = tasks.create_task(watch(run, seen))
        await until_serving(run, "rollout-0", "rollout-1")
        await look_around(run, seen)
        await lose_a_replica(run, seen)
        await pause_and_grow(run, seen)
        await run.until(lambda: has_filtered(run), "a filtered group")
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)
        await watching


async def until_serving(run: LiveRun, *names: str) -> None:
    async def all_serve() -> bool:
        return set(await run.serving()) == set(names)

    await run.until(all_serve, f"{', '.join(names)} serving")


async def has_filtered(run: LiveRun) -> bool:
    ends = (await run.reward_status()).prompts_by_end
    return ends["filtered_all_right"] + ends["filtered_all_wrong"] > 0


async def watch(run: LiveRun, seen: Observed) -> None:
    async for message in run.trainer.WatchSteps(trainer_pb2.WatchStepsRequest(from_step=1)):
        seen.watched.append(message.step)


async def look_around(run: LiveRun, seen: Observed) -> None:
    (replica, *_) = (await run.status()).replicas
    async with grpc.aio.insecure_channel(replica.replica.address) as rollout:
        for service, channel in {
            "trainer": run.channel("trainer"),
            "reward": run.channel("reward"),
            "rollout": rollout,
        }.items():
            stub: Any = health_pb2_grpc.HealthStub(channel)
            if service == "rollout":
                # A replica looks for its weights every so often.
                watched = health_pb2.HealthCheckRequest(service=WEIGHTS_HEALTH)
                async for answer in stub.Watch(watched, timeout=WAIT_S):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
            for name in ("", *SERVICES[service]):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                seen.health[f"{service}/{name}"] = status
            seen.reflected[service] = await reflected(channel)


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request])):
        return {service.name for service in answer.list_services_response.service}
    return set()


async def lose_a_replica(run: LiveRun, seen: Observed) -> None:
    before = await run.serving()
    seen.killed, seen.step_at_kill = before["rollout-1"], (await run.status()).step
    run.send("rollout-1", signal.SIGKILL)

    async def has_continued() -> bool:
        status = await run.status()
        gone = seen.killed not in {r.replica.instance_id for r in status.replicas}
        if gone and status.step >= seen.step_at_kill + 3:
            names = {r.replica.name for r in status.replicas if r.state == "serving"}
            if "rollout-0" in names:
                seen.without_the_killed = (status.step, names)
        return bool(seen.without_the_killed[0])

    await run.until(has_continued, "steps without the killed replica")


async def pause_and_grow(run: LiveRun, seen: Observed) -> None:
    """While paused, the killed replica comes back and a new one joins; both get the weights."""
    await run.trainer.Pause(trainer_pb2.PauseRequest(), timeout=60)
    paused = trainer_pb2.RUN_PHASE_PAUSED

    async def is_paused() -> bool:
        return (await run.status()).phase == paused

    await run.until(is_paused, "the pause")
    seen.step_while_paused = (await run.status()).step
    seen.saved = await run.trainer.SaveCheckpoint(
        trainer_pb2.SaveCheckpointRequest(), timeout=WAIT_S
    )
    async with extra_replica(run, 7):
        await until_serving(run, "rollout-0", "rollout-1", "rollout-7")
        assert (await run.status()).step == seen.step_while_paused
        seen.restarted = (await run.serving())["rollout-1"]
        await run.trainer.Resume(trainer_pb2.ResumeRequest(), timeout=60)
        await run.until(lambda: newcomer_generates(run, seen), "tokens of the newcomer")
        await run.until_step(seen.step_while_paused + 2)


async def newcomer_generates(run: LiveRun, seen: Observed) -> bool:
    for replica in (await run.status()).replicas:
        if replica.replica.name == "rollout-7":
            async with grpc.aio.insecure_channel(replica.replica.address) as channel:
                stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
                status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=60)
                seen.newcomer_tokens = status.generated_tokens
    return seen.newcomer_tokens > 0


def last_step(record: Record) -> int:
    return len(record.steps)


def test_a_stopped_run_ends_well_after_its_step_and_leaves_nothing_running(
    eventful: tuple[Record, Observed],
) -> None:
    record, _ = eventful
    assert record.end.exit_code == 0, record.end.failures
    steps = [row["training/global_step"] for row in record.steps]
    assert steps == list(range(1, last_step(record) + 1))
    assert f"the run ends at step {last_step(record)}: seen enough" in record.log("trainer")
    assert record.left_running == ()


def test_every_submitted_prompt_is_trained_filtered_dropped_or_pending(
    eventful: tuple[Record, Observed],
) -> None:
    accounts = eventful[0].accounts
    ends = [
        count
        for name, count in accounts.items()
        if name.startswith(("trained", "filtered_", "dropped_", "pending"))
    ]
    assert accounts["submitted"] == sum(ends)
    assert accounts["trained"] == last_step(eventful[0]) * GROUPS
    assert accounts["filtered_all_right"] + accounts["filtered_all_wrong"] > 0
    assert accounts["dropped_failed"] == accounts["dropped_stale"] == 0


def test_no_trained_sample_is_staler_than_allowed(eventful: tuple[Record, Observed]) -> None:
    stale = [row["train/staleness_max"] for row in eventful[0].steps]
    assert max(stale) <= 2
    assert max(stale) > 0  # or the bound was never put to the test


def test_every_server_answers_health_and_reflection(eventful: tuple[Record, Observed]) -> None:
    _, seen = eventful
    assert set(seen.health.values()) == {"SERVING"}
    for service, names in SERVICES.items():
        assert names <= seen.reflected[service]
        assert "grpc.health.v1.Health" in seen.reflected[service]


def test_a_killed_replica_is_dropped_and_its_samples_come_from_others(
    eventful: tuple[Record, Observed],
) -> None:
    record, seen = eventful
    step, names = seen.without_the_killed
    assert step >= seen.step_at_kill + 3
    assert "rollout-0" in names
    # Or its next process registers before anybody has called the killed one.
    noticed = r"replica rollout-1 (dropped|at \S+ takes the place of)"
    assert re.search(noticed, record.log("trainer"))


def test_a_killed_replica_that_is_started_again_joins_under_a_new_instance(
    eventful: tuple[Record, Observed],
) -> None:
    _, seen = eventful
    assert seen.restarted
    assert seen.restarted != seen.killed


def test_a_replica_started_in_the_middle_of_the_run_joins_and_generates(
    eventful: tuple[Record, Observed],
) -> None:
    record, seen = eventful
    assert seen.newcomer_tokens > 0
    assert max(row["rollout/replicas"] for row in record.steps) == 3


def test_a_paused_run_saves_when_asked_and_continues_when_resumed(
    eventful: tuple[Record, Observed],
) -> None:
    record, seen = eventful
    assert seen.saved.step == seen.step_while_paused < last_step(record)
    assert Path(seen.saved.path) == record.checkpoint(seen.saved.step)
    assert record.data(seen.saved.step)["step"] == seen.saved.step
    assert record.checkpoint(last_step(record)).is_dir()


def test_a_watcher_sees_every_step_and_the_end(eventful: tuple[Record, Observed]) -> None:
    record, seen = eventful
    assert seen.watched == list(range(1, last_step(record) + 1))


def test_a_policy_is_announced_once_for_each_change(eventful: tuple[Record, Observed]) -> None:
    lines = [
        line.rsplit(": ", 1)[1]
        for line in eventful[0].log("reward").splitlines()
        if "services.reward.groups.loop: version" in line
    ]
    repeated = [line for line, after in pairwise(lines) if line == after]
    assert len(lines) > last_step(eventful[0])
    assert repeated == []


def test_replicas_say_nothing_of_a_trainer_that_starts_later_and_leaves_first(
    eventful: tuple[Record, Observed],
) -> None:
    record, _ = eventful
    before, _, after = record.log("rollout-0").partition("registered as")
    assert after
    # A busy machine may take longer for the trainer than a replica waits in silence.
    late = listening_at(record, "trainer") - listening_at(record, "rollout-0")
    assert "out of reach" not in before or late.total_seconds() >= _WARNS_AFTER_S - 1.0
    assert "did not learn of the drain" not in after


def listening_at(record: Record, name: str) -> datetime:
    line = next(one for one in record.log(name).splitlines() if "listening on" in one)
    return datetime.strptime(line[: len("00:00:00")], "%H:%M:%S")
