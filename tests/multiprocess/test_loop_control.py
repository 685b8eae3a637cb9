"""Control calls to a run that waits for a batch, in real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.api.trainer.v1 import trainer_pb2
from sluice.cli.main import commands
from tests.support.small_run import ENDLESS, WAIT_S, Assets, LiveRun, Record, run_to_end

MANY_STEPS, NAME = 1_000_000, "rollout-0"
EXPLAINED: list[dict[str, Any]] = []


@pytest.fixture(scope="module")
def starved(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, int]:
    """A run whose only replica stands still, which is then asked to save and to stop."""
    steps: list[int] = []
    EXPLAINED.clear()
    record = run_to_end(
        small_assets,
        tmp_path_factory.mktemp("starved") / "run",
        [
            *ENDLESS,
            f"trainer.save_freq={MANY_STEPS}",
            "trainer.test_freq=-1",
            "sluice.trainer.replica_ttl_s=6",
        ],
        lambda run: starve(run, steps),
    )
    return record, steps[0]


async def starve(run: LiveRun, steps: list[int]) -> None:
    await run.until_step(1)
    run.send("rollout-0", signal.SIGSTOP)
    try:

        async def waits() -> bool:
            status = await run.status()
            waiting = status.phase == trainer_pb2.RUN_PHASE_WAITING_FOR_BATCH
            # What was generated before might fill a batch yet.
            is_graded = (await run.reward_status()).groups_grading == 0
            return waiting and is_graded and not status.replicas and status.phase_seconds > 1.0

        await run.until(waits, "the wait for a batch that does not come")

        async def all_else_answers() -> bool:
            EXPLAINED[:] = [await asyncio.to_thread(explained, run)]
            return all(one["waits"] for one in EXPLAINED[0]["services"] if one["name"] != NAME)

        await run.until(all_else_answers, "the waits of trainer and reward service")
        request = trainer_pb2.SaveCheckpointRequest()
        steps.append((await run.trainer.SaveCheckpoint(request, timeout=WAIT_S)).step)
        assert (await run.status()).phase == trainer_pb2.RUN_PHASE_WAITING_FOR_BATCH
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)

        async def has_reported() -> bool:
            log = Path(run.config.sluice.run_dir) / "logs" / "trainer.log"
            return "the run ends at step" in log.read_text(encoding="utf-8")

        await run.until(has_reported, "the end of the run")
    finally:
        run.send("rollout-0", signal.SIGCONT)


def explained(run: LiveRun) -> dict[str, Any]:
    """What `sluice status --why` says, and the replica's process id as its ``pid``."""
    arguments = ["status", "--why", "--json", run.config.sluice.run_dir]
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 0, result.output
    return {**json.loads(result.output), "pid": run.pid_of(NAME)}


def test_a_replica_that_was_stopped_is_named_as_what_the_run_waits_for(
    starved: tuple[Record, int],
) -> None:
    (said,) = EXPLAINED
    assert said["root"] == "rollout-0"
    assert f"its process {said['pid']} is stopped by a signal" in said["cause"]
    assert "reward service is waiting for the rollout fleet" in said["cause"]
    waits = {
        service["name"]: [(wait["peer"], wait["phase"]) for wait in service["waits"]]
        for service in said["services"]
    }
    assert list(waits) == ["rollout-0", "reward service", "trainer"]
    assert ("reward service", "filling a batch") in waits["trainer"]
    assert waits["rollout-0"] == []


def test_a_run_that_waits_for_a_batch_saves_when_asked(starved: tuple[Record, int]) -> None:
    record, saved_step = starved
    assert record.data(saved_step)["step"] == saved_step == len(record.steps)


def test_a_run_that_waits_for_a_batch_ends_in_order_when_asked(starved: tuple[Record, int]) -> None:
    record, saved_step = starved
    assert record.end.exit_code == 0, record.end.failures
    assert f"the run ends at step {saved_step}: seen enough" in record.log("trainer")
    assert record.left_running == ()


def test_no_group_is_lost_between_the_two_services(starved: tuple[Record, int]) -> None:
    accounts = starved[0].accounts
    assert accounts["groups_trained"] == accounts["groups_acknowledged"] == accounts["trained"]
    assert accounts["prompts_lost"] == 0
