"""TrainerService: the effect of each call on fleet and run, and its answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import sluice
from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.run_state import RunPhase, RunState, StepRecord
from services.trainer.servicer import _PHASE_TO_PROTO, TrainerServicer
from sluice import UNINSTALLED
from sluice.algorithm.accounting import ReplicaCounters
from sluice.api.common.v1 import common_pb2
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.config.schema.service import ServiceConfig, TrainerServiceConfig
from sluice.errors import InvalidRequestError, NotFoundError, NotReadyError

CONTEXT: Any = None


class Service(TrainerServicer):
    """The servicer with its fleet and state at hand."""

    def __init__(self) -> None:
        self.fleet, self.state = Fleet("layout", 6.0), RunState("trainer-1", 10, 2)
        asked = TrainerServiceConfig(heartbeat_interval_s=1.5, replica_ttl_s=6.0)
        super().__init__(self.fleet, self.state, ServiceConfig(trainer=asked))

    async def register(self, **changes: Any) -> trainer.RegisterReplicaResponse:
        replica = common_pb2.Replica(name="a", instance_id="a-1", address="host:1", slots=8)
        request = trainer.RegisterReplicaRequest(
            replica=replica, weights_layout_digest="layout", **changes
        )
        return await self.RegisterReplica(request, CONTEXT)


@pytest.fixture
def service() -> Service:
    return Service()


async def test_a_registration_is_answered_with_the_interval_of_heartbeats(service: Service) -> None:
    answer = await service.register()
    assert answer.heartbeat_interval_seconds == 1.5
    assert answer.time_to_live_seconds == 6.0
    assert [info.address for info in service.fleet.in_state(MemberState.PENDING)] == ["host:1"]


@pytest.mark.parametrize(
    ("own", "peer", "warns"),
    [
        ("1.2", "1.3", True),
        ("1.2", "1.2", False),
        ("1.2", "", False),
        (UNINSTALLED, "1.2", False),
        ("1.2", UNINSTALLED, False),
    ],
)
async def test_a_replica_of_another_version_of_sluice_is_logged(
    service: Service,
    own: str,
    peer: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sluice, "own_version", lambda: own)
    await service.register(sluice_version=peer)
    line = "replica a runs sluice 1.3, and this service 1.2; run the same version everywhere"
    assert caplog.messages == ([line] if warns else [])


async def test_a_heartbeat_carries_load_and_the_wish_to_drain(service: Service) -> None:
    await service.register()
    request = trainer.HeartbeatRequest(
        name="a",
        instance_id="a-1",
        slots_busy=3,
        generated_tokens=40,
        unsent_tokens=5,
        running_tokens=2,
        wall_seconds=3.0,
        seconds_by_state={"idle": 3.0},
        direct_sent_tokens=9,
        direct_unsent_tokens=1,
        draining=True,
    )
    await service.Heartbeat(request, CONTEXT)
    (member,) = service.fleet.members()
    assert member.state is MemberState.DRAINING
    assert (member.load.slots_busy, member.load.generated_tokens) == (3, 40)
    assert service.fleet.counters() == ReplicaCounters(
        slots_busy=3,
        generated_tokens=40,
        unsent_tokens=5,
        running_tokens=2,
        wall_seconds=3.0,
        seconds_by_state={"idle": 3.0},
        direct_sent_tokens=9,
        direct_unsent_tokens=1,
    )
    request.instance_id = "another"
    with pytest.raises(NotFoundError):
        await service.Heartbeat(request, CONTEXT)


async def test_the_status_tells_run_and_replicas(service: Service) -> None:
    await service.register()
    load = trainer.HeartbeatRequest(name="a", instance_id="a-1", slots_busy=3, queued=9)
    await service.Heartbeat(load, CONTEXT)
    service.fleet.mark_serving(service.fleet.members()[0].info, 2)
    empty = await service.GetStatus(trainer.GetStatusRequest(), CONTEXT)
    assert not empty.HasField("policy_version")
    service.state.version = 3
    service.state.accounts = {"tokens/trained": 7.0}
    service.state.enter(RunPhase.TRAINING)
    await service.state.record(StepRecord(3, {"m": 1.0}))
    status = await service.GetStatus(trainer.GetStatusRequest(), CONTEXT)
    assert (status.step, status.total_steps, status.policy_version) == (3, 10, 3)
    assert status.phase == trainer.RUN_PHASE_TRAINING
    assert dict(status.metrics) == {"m": 1.0}
    assert dict(empty.accounts) == {}
    assert dict(status.accounts) == {"tokens/trained": 7.0}
    (replica,) = status.replicas
    assert (replica.replica.name, replica.state) == ("a", "serving")
    assert replica.replica.policy_version == 2
    assert (replica.slots_busy, replica.queued) == (3, 9)


def test_every_phase_has_its_name_on_the_wire() -> None:
    assert _PHASE_TO_PROTO.keys() == set(RunPhase)
    assert len(set(_PHASE_TO_PROTO.values())) == len(RunPhase)


@pytest.mark.parametrize(("from_step", "seen"), [(0, [4, 5]), (3, [3, 4, 5]), (5, [5])])
async def test_a_watcher_gets_steps_from_where_it_wants_to_the_end(
    service: Service, from_step: int, seen: list[int]
) -> None:
    async def watch() -> list[int]:
        request = trainer.WatchStepsRequest(from_step=from_step)
        return [message.step async for message in service.WatchSteps(request, CONTEXT)]

    await service.state.record(StepRecord(3, {}))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        for step in (4, 5):
            await asyncio.sleep(0)
            await service.state.record(StepRecord(step, {}))
        await asyncio.sleep(0)
        await service.state.finish()
    assert watching.result() == seen


async def test_pause_resume_and_stop_answer_with_the_finished_steps(service: Service) -> None:
    paused = await service.Pause(trainer.PauseRequest(), CONTEXT)
    assert paused.step == 2
    assert service.state.is_paused
    await service.Resume(trainer.ResumeRequest(), CONTEXT)
    assert not service.state.is_paused
    await service.Pause(trainer.PauseRequest(), CONTEXT)
    await service.Pause(trainer.PauseRequest(lease_seconds=60, holder="a"), CONTEXT)
    stopped = await service.Stop(trainer.StopRequest(), CONTEXT)
    assert stopped.step == 2
    assert service.state.stop_reason == "asked to stop"
    assert not service.state.is_paused
    assert not service.state.saves_at_end
    await service.Stop(trainer.StopRequest(save=True, skip_validation=True), CONTEXT)
    assert service.state.saves_at_end
    assert service.state.no_validation.is_set()


async def test_a_resume_ends_only_the_callers_own_hold(service: Service) -> None:
    await service.Pause(trainer.PauseRequest(), CONTEXT)
    for holder in ("a", "b"):
        await service.Pause(trainer.PauseRequest(lease_seconds=60, holder=holder), CONTEXT)
    for holder in ("a", "", "never held"):
        await service.Resume(trainer.ResumeRequest(holder=holder), CONTEXT)
        assert service.state.is_paused
    await service.Resume(trainer.ResumeRequest(holder="b"), CONTEXT)
    assert not service.state.is_paused


async def test_a_lease_that_ends_leaves_other_holds_alone(service: Service) -> None:
    await service.Pause(trainer.PauseRequest(lease_seconds=0.01, holder="a"), CONTEXT)
    await service.Pause(trainer.PauseRequest(lease_seconds=60, holder="b"), CONTEXT)
    await asyncio.sleep(0.05)
    assert service.state.is_paused
    await service.Resume(trainer.ResumeRequest(holder="b"), CONTEXT)
    assert not service.state.is_paused


async def test_a_pause_on_lease_ends_and_needs_a_time_above_0(service: Service) -> None:
    await service.Pause(trainer.PauseRequest(lease_seconds=0.01), CONTEXT)
    assert service.state.is_paused
    async with asyncio.timeout(60):
        while service.state.is_paused:
            await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequestError, match=r"lease_seconds: 0\.0; send more than 0"):
        await service.Pause(trainer.PauseRequest(lease_seconds=0.0), CONTEXT)


async def test_a_checkpoint_is_answered_when_it_is_there_or_the_run_has_ended(
    service: Service,
) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        saving = tasks.create_task(service.SaveCheckpoint(trainer.SaveCheckpointRequest(), CONTEXT))
        await asyncio.sleep(0)
        service.state.answer_saves(3, "folder")
    assert (saving.result().step, saving.result().path) == (3, "folder")
    await service.state.finish()
    with pytest.raises(NotReadyError, match="the run has ended"):
        await service.SaveCheckpoint(trainer.SaveCheckpointRequest(), CONTEXT)
