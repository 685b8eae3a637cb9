"""A whole run whose reward service is killed: it is started again, and the accounts are right."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.small_run import SLOWLY, Assets, LiveRun, run_to_end

STEPS = 8


async def kill_in_the_middle(run: LiveRun) -> None:
    """Kills the reward service as soon as the first step is heard of."""
    await run.until_step(1)
    run.send("reward", signal.SIGKILL)


@pytest.mark.parametrize("max_staleness", [1, 2])  # from 2 on transfers overlap steps
def test_a_killed_reward_service_is_started_again_and_nothing_is_lost(
    small_assets: Assets, tmp_path: Path, max_staleness: int
) -> None:
    record = run_to_end(
        small_assets,
        tmp_path,
        [
            f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=4",
            SLOWLY,  # or it may end before the kill
            f"sluice.asynchrony.max_staleness={max_staleness}",
        ],
        kill_in_the_middle,
    )
    assert (record.end.exit_code, record.end.failures) == (0, ())
    assert [row["training/global_step"] for row in record.steps] == list(range(1, STEPS + 1))
    assert record.accounts["prompts_lost"] == 0
    assert record.accounts["groups_trained"] == record.accounts["groups_acknowledged"]
    assert record.accounts["trained"] == record.accounts["groups_trained"]
    assert record.log("reward").count("listening on") == 2
    assert record.left_running == ()
