"""A whole run whose reward service is killed: it is started again, and the accounts are right."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from tests.support.small_run import ENDLESS, SLOWLY, Assets, LiveRun, run_to_end

STEPS_AFTER = 7


async def kill_in_the_middle(run: LiveRun) -> None:
    """Kills the reward service once a first step is heard of; ends the run some steps later."""
    await run.until_step(1)
    killed = run.pid_of("reward")
    run.send("reward", signal.SIGKILL)

    async def is_back() -> bool:
        await run.reward_status()
        return run.pid_of("reward") != killed

    await run.until(is_back, "another reward service")
    await run.until_step((await run.status()).step + STEPS_AFTER)
    await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=60)


@pytest.mark.parametrize("max_staleness", [1, 2])  # from 2 on transfers overlap steps
def test_a_killed_reward_service_is_started_again_and_nothing_is_lost(
    small_assets: Assets, tmp_path: Path, max_staleness: int
) -> None:
    record = run_to_end(
        small_assets,
        tmp_path,
        [
            *ENDLESS,
            "trainer.test_freq=4",
            SLOWLY,
            f"sluice.asynchrony.max_staleness={max_staleness}",
        ],
        kill_in_the_middle,
    )
    assert (record.end.exit_code, record.end.failures) == (0, ())
    steps = [row["training/global_step"] for row in record.steps]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > STEPS_AFTER
    assert record.accounts["prompts_lost"] == 0
    assert record.accounts["groups_trained"] == record.accounts["groups_acknowledged"]
    assert record.accounts["trained"] == record.accounts["groups_trained"]
    assert record.log("reward").count("listening on") == 2
    assert record.left_running == ()
