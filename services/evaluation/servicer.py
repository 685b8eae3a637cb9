"""The gRPC TrainerService of an evaluation: membership and progress, and nothing that trains."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from services.trainer.fleet.members import MemberState
from services.trainer.servicer import TrainerServicer
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.errors import InvalidRequestError

Context = grpc.aio.ServicerContext[Any, Any]

VERSION = 0
"""The policy version of weights that replicas read from the model's files."""


class EvaluationServicer(TrainerServicer):
    """The trainer's calls. A replica serves once its heartbeat reports that it has weights."""

    async def Heartbeat(
        self, request: trainer.HeartbeatRequest, context: Context
    ) -> trainer.HeartbeatResponse:
        answer = await super().Heartbeat(request, context)
        if request.HasField("policy_version") and request.policy_version == VERSION:
            for info in self._fleet.in_state(MemberState.PENDING):
                if info.instance_id == request.instance_id:
                    self._fleet.mark_serving(info, VERSION)
        return answer

    async def SaveCheckpoint(
        self, request: trainer.SaveCheckpointRequest, context: Context
    ) -> trainer.SaveCheckpointResponse:
        """Refuse the call."""
        _refuse("saved")

    async def Pause(self, request: trainer.PauseRequest, context: Context) -> trainer.PauseResponse:
        """Refuse the call."""
        _refuse("paused")

    async def Resume(
        self, request: trainer.ResumeRequest, context: Context
    ) -> trainer.ResumeResponse:
        """Refuse the call."""
        _refuse("resumed")


def _refuse(action: str) -> NoReturn:
    raise InvalidRequestError(
        f"this is a stand-alone evaluation, in which nothing is trained or {action}; end it with "
        "sluice stop, and start its command again to continue it"
    )
