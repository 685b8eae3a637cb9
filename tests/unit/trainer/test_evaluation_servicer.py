"""The trainer's calls in an evaluation: replicas serve what they have read, nothing is trained."""

from __future__ import annotations

from typing import Any

import pytest

from services.evaluation.servicer import EvaluationServicer
from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.run_state import RunState
from sluice.api.common.v1 import common_pb2
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.config.schema.service import ServiceConfig
from sluice.errors import InvalidRequestError

CONTEXT: Any = None


class Service(EvaluationServicer):
    """The servicer with its fleet at hand."""

    def __init__(self) -> None:
        self.fleet = Fleet(None, 6.0)
        super().__init__(self.fleet, RunState("evaluation-1", 0, 0), ServiceConfig())

    async def register(self, name: str, layout: str) -> None:
        replica = common_pb2.Replica(name=name, instance_id=f"{name}-1", address="h:1", slots=8)
        request = trainer.RegisterReplicaRequest(replica=replica, weights_layout_digest=layout)
        await self.RegisterReplica(request, CONTEXT)

    async def heartbeat(self, name: str, version: int | None) -> MemberState:
        request = trainer.HeartbeatRequest(
            name=name, instance_id=f"{name}-1", policy_version=version
        )
        await self.Heartbeat(request, CONTEXT)
        return next(one.state for one in self.fleet.members() if one.info.name == name)


async def test_a_replica_serves_once_it_reports_the_weights_of_files() -> None:
    service = Service()
    await service.register("a", "layout")
    await service.register("b", "another layout")  # nobody sends weights
    assert await service.heartbeat("a", None) is MemberState.PENDING
    assert await service.heartbeat("a", 0) is MemberState.SERVING
    (announced,) = service.fleet.announced_replicas()
    assert (announced.info.name, announced.policy_version) == ("a", 0)


async def test_weights_that_a_trainer_sent_are_not_evaluated() -> None:
    service = Service()
    await service.register("a", "layout")
    assert await service.heartbeat("a", 3) is MemberState.PENDING


async def test_nothing_is_saved_or_paused() -> None:
    service = Service()
    with pytest.raises(InvalidRequestError, match="stand-alone evaluation"):
        await service.SaveCheckpoint(trainer.SaveCheckpointRequest(), CONTEXT)
    with pytest.raises(InvalidRequestError, match="stand-alone evaluation"):
        await service.Pause(trainer.PauseRequest(), CONTEXT)
