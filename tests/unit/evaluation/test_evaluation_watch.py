"""What the watchdog of a stand-alone evaluation sees."""

from __future__ import annotations

from services.evaluation.__main__ import evaluation_work
from services.trainer.fleet.members import Fleet
from services.trainer.loop.run_state import RunState
from sluice.concurrency.waits import advance
from sluice.config.run import RunConfig


def test_progress_that_the_reward_service_reports_is_progress_of_the_evaluation() -> None:
    state = RunState("evaluation", 0, 0, 0.0)
    work = evaluation_work(RunConfig(), Fleet(None, 6.0, 60.0), state)
    before = work()
    assert before.has_work
    assert work().progress == before.progress
    advance()
    assert work().progress != before.progress
