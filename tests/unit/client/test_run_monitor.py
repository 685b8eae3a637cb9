"""The state of a run as its services tell it, and holding it between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client import run_monitor
from sluice.client.run_monitor import RunMonitor
from sluice.errors import DeadlineError, NotReadyError, PeerError
from sluice.rpc.policy import CALL_POLICIES, CallPolicy
from tests.support.rpc_server import serving
from tests.support.run_folder import ACCOUNTING
from tests.support.scripted_trainer import PAUSED, ScriptedReward, ScriptedTrainer, monitored


async def test_a_snapshot_joins_what_trainer_and_reward_service_say() -> None:
    async with monitored(ScriptedTrainer()) as monitor:
        shot = await monitor.snapshot()
    assert (shot.phase, shot.step, shot.total_steps, shot.version) == ("waiting for batch", 2, 2, 2)
    assert [replica.name for replica in shot.replicas] == ["rollout-0"]
    assert shot.prompts == {"submitted": 3, "pending": 1, "prompts_lost": 0}
    assert shot.accounts == ACCOUNTING


async def test_without_a_trainer_there_is_no_snapshot() -> None:
    async with RunMonitor("127.0.0.1:1", "127.0.0.1:1") as monitor:
        with pytest.raises(PeerError, match="trainer: failed while asking for its status"):
            await monitor.snapshot()


async def test_steps_come_from_the_wanted_one_until_the_run_ends() -> None:
    async with monitored(ScriptedTrainer()) as monitor:
        assert [step async for step, _ in monitor.steps(1)] == [1, 2]
        assert [step async for step, _ in monitor.steps(2)] == [2]


class SlowTrainer(ScriptedTrainer):
    """Reports one step a call, the one it is asked for, and ends after the third."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_from: list[int] = []

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked_from.append(request.from_step)
        step = max(request.from_step, 1)
        yield trainer_pb2.WatchStepsResponse(step=step)
        if step < 3:
            await asyncio.Event().wait()


async def test_steps_continue_after_the_last_when_a_call_reaches_its_own_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CALL_POLICIES, "TrainerService/WatchSteps", CallPolicy(deadline_s=2.0))
    trainer = SlowTrainer()
    async with monitored(trainer) as monitor:
        assert [step async for step, _ in monitor.steps()] == [1, 2, 3]
    # A call that a slow machine did not answer in time is made again.
    assert list(dict.fromkeys(trainer.asked_from)) == [0, 2, 3]


async def test_a_trainer_that_tells_of_a_deadline_at_once_is_not_asked_in_a_loop() -> None:
    class LateTrainer(ScriptedTrainer):
        async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
            yield

    async with monitored(LateTrainer()) as monitor:
        with pytest.raises(DeadlineError, match="watching steps"):
            await anext(monitor.steps())


async def test_holding_waits_for_the_step_under_way_and_lets_go_afterwards() -> None:
    trainer = ScriptedTrainer(step=1, steps_to_hold=2)
    async with monitored(trainer) as monitor:
        async with monitor.held(60) as shot:
            assert (shot.phase, shot.version) == ("paused", 1)
            assert trainer.controls == ["pause"]
        assert trainer.controls == ["pause", "resume"]


async def test_the_hold_is_a_lease_that_is_renewed_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_monitor, "_RENEWALS_PER_LEASE", 300)
    trainer = ScriptedTrainer(step=1)
    async with monitored(trainer) as monitor, monitor.held(60):
        while len(trainer.leases_s) < 3:
            await asyncio.sleep(0.01)
    assert set(trainer.leases_s) == {15.0}


class FailingTrainer(ScriptedTrainer):
    """Refuses to renew a pause, as often as it should."""

    num_refusals = 1

    async def Pause(self, request: Any, context: Any) -> Any:
        if self.leases_s and self.num_refusals:
            self.num_refusals -= 1
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "busy")
        return await super().Pause(request, context)


async def test_a_renewal_that_fails_once_does_not_end_the_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_monitor, "_RENEWALS_PER_LEASE", 300)
    trainer = FailingTrainer(step=1)
    async with monitored(trainer) as monitor, monitor.held(60):
        while len(trainer.leases_s) < 2:
            await asyncio.sleep(0.01)
    assert trainer.num_refusals == 0


async def test_a_hold_ends_when_its_lease_could_not_be_renewed(
    monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> None:
    monkeypatch.setattr(run_monitor, "_RENEWALS_PER_LEASE", 300)
    trainer = FailingTrainer(step=1)
    trainer.num_refusals = 1000

    async def hold(monitor: RunMonitor) -> None:
        async with monitor.held(60):
            while trainer.num_refusals > 998:  # it asks again
                await asyncio.sleep(0.01)
            skip_time(run_monitor._LEASE_S)
            await asyncio.Event().wait()

    async with monitored(trainer) as monitor:
        with pytest.raises(ExceptionGroup) as found:
            await hold(monitor)
    assert isinstance(found.value.exceptions[0], DeadlineError)


async def test_a_failure_while_it_is_held_lets_go_too() -> None:
    trainer = ScriptedTrainer(step=1)
    async with monitored(trainer) as monitor:
        with pytest.raises(ValueError, match="inside"):
            async with monitor.held(60):
                raise ValueError("inside")
    assert trainer.controls == ["pause", "resume"]


async def test_a_run_that_somebody_else_holds_stays_held() -> None:
    trainer = ScriptedTrainer(step=1, phase=PAUSED, held_elsewhere=True)
    async with monitored(trainer) as monitor, monitor.held(60):
        pass
    assert trainer.phase == PAUSED


async def test_two_who_hold_a_run_at_once_have_a_hold_each() -> None:
    trainer = ScriptedTrainer(step=1)
    async with monitored(trainer) as monitor, monitor.held(60):
        async with monitor.held(60):
            assert len(trainer.holders) == 2
            assert "" not in trainer.holders  # the operator's
        assert len(trainer.holders) == 1
        assert trainer.phase == PAUSED
    assert trainer.phase != PAUSED


async def test_a_step_that_does_not_end_is_a_deadline_and_the_run_resumes() -> None:
    trainer = ScriptedTrainer(step=1, steps_to_hold=10**9)
    async with monitored(trainer) as monitor:
        with pytest.raises(DeadlineError, match=r"trainer: .* waiting for the present step"):
            async with monitor.held(0.3):
                pass
    assert trainer.controls == ["pause", "resume"]


async def test_a_run_that_is_ending_cannot_be_held() -> None:
    async with monitored(ScriptedTrainer(step=2, steps_to_hold=10**9)) as monitor:
        with pytest.raises(NotReadyError, match="the run is ending"):
            async with monitor.held(60):
                pass


async def test_a_validation_is_of_the_version_that_was_asked_for() -> None:
    async with serving(reward=ScriptedReward()) as server, evaluator(server.address) as monitor:
        result = await monitor.evaluate(7, n=None, temperature=None)
    assert result == {"version": 7.0}


@pytest.fixture
def lasting(
    monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> Callable[..., ScriptedReward]:
    """A validation: each look at it finds that a third of its standstill has passed."""
    monkeypatch.setattr(run_monitor, "_LOOK_EVERY_S", 0.01)

    def made(**scripted: Any) -> ScriptedReward:
        reward = ScriptedReward(looks_to_evaluate=12, **scripted)
        look = reward.GetStatus

        async def later(request: Any, context: Any) -> Any:
            skip_time(20.0)
            return await look(request, context)

        reward.GetStatus = later  # type: ignore[method-assign]
        return reward

    return made


async def test_a_validation_may_take_any_time_while_groups_are_validated(
    lasting: Callable[..., ScriptedReward],
) -> None:
    reward = lasting()
    async with serving(reward=reward) as server, evaluator(server.address) as monitor:
        result = await monitor.evaluate(7, n=None, temperature=None, stall_s=60.0)
    assert result == {"version": 7.0}


@pytest.mark.parametrize("peer", ["agent", "environment"])
async def test_a_validation_is_waited_for_while_its_samples_are_with_agents_or_environments(
    peer: str, lasting: Callable[..., ScriptedReward]
) -> None:
    reward = lasting(moves=False, outside=peer)
    async with serving(reward=reward) as server, evaluator(server.address) as monitor:
        result = await monitor.evaluate(7, n=None, temperature=None, stall_s=60.0)
    assert result == {"version": 7.0}


async def test_a_validation_that_stands_still_is_ended_with_an_error_that_names_it(
    lasting: Callable[..., ScriptedReward],
) -> None:
    reward = lasting(moves=False)
    async with serving(reward=reward) as server, evaluator(server.address) as monitor:
        with pytest.raises(DeadlineError, match=r"no answer within 60 s while evaluating .* 7"):
            await monitor.evaluate(7, n=None, temperature=None, stall_s=60.0)
        async with asyncio.timeout(60):
            while not reward.was_cancelled:
                await asyncio.sleep(0.01)


def evaluator(reward: str) -> RunMonitor:
    return RunMonitor("127.0.0.1:1", reward)
