"""The gRPC TrainerService: decode the request, call fleet or state, encode the answer."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from services.trainer.fleet.members import Fleet, FleetMember
from services.trainer.loop.run_state import RunPhase, RunState, phase_waits
from sluice import version_difference
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.codec.bounds import check_fields
from sluice.codec.messages import (
    counters_from_proto,
    present_waits_to_proto,
    replica_from_proto,
    replica_to_proto,
)
from sluice.codec.trainer import check_heartbeat, check_pause, check_register, check_watchers
from sluice.codec.weights import shares_from_proto
from sluice.config.derived import message_mb
from sluice.config.run import RunConfig
from sluice.config.schema.service import ServiceConfig
from sluice.rpc.credentials import Credentials
from sluice.rpc.server import RpcServer

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_SERVICE = "sluice.api.trainer.v1.TrainerService"
_PHASE_TO_PROTO = {phase: trainer.RunPhase.Value(f"RUN_PHASE_{phase.name}") for phase in RunPhase}


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Calls for membership, progress and control."""

    def __init__(self, fleet: Fleet, state: RunState, service: ServiceConfig) -> None:
        self._fleet = fleet
        self._state = state
        self._limits = service.limits
        self._num_watchers = 0
        self._interval_s = service.trainer.heartbeat_interval_s
        self._ttl_s = service.trainer.replica_ttl_s

    async def RegisterReplica(
        self, request: trainer.RegisterReplicaRequest, context: Context
    ) -> trainer.RegisterReplicaResponse:
        """Add a replica to the fleet as pending."""
        check_register(request)
        replica = replica_from_proto(request.replica)
        if mismatch := version_difference(request.sluice_version):
            logger.warning("replica %s %s", replica.name, mismatch)
        replica = replace(replica, shares=shares_from_proto(request.shares, replica.ranks))
        self._fleet.register(replica, request.weights_layout_digest, time.monotonic())
        return trainer.RegisterReplicaResponse(
            heartbeat_interval_seconds=self._interval_s, time_to_live_seconds=self._ttl_s
        )

    async def Heartbeat(
        self, request: trainer.HeartbeatRequest, context: Context
    ) -> trainer.HeartbeatResponse:
        check_heartbeat(request)
        self._fleet.heartbeat(
            request.name,
            request.instance_id,
            counters_from_proto(request),
            draining=request.draining,
            turns=request.engine_turns,
            now_s=time.monotonic(),
        )
        return trainer.HeartbeatResponse()

    async def GetStatus(
        self, request: trainer.GetStatusRequest, context: Context
    ) -> trainer.GetStatusResponse:
        state, now_s = self._state, time.monotonic()
        return trainer.GetStatusResponse(
            instance_id=state.instance_id,
            phase=_PHASE_TO_PROTO[state.phase],
            phase_seconds=state.phase_seconds,
            step=state.step,
            total_steps=state.total_steps,
            policy_version=state.version,
            replicas=[_member_to_proto(member, now_s) for member in self._fleet.members()],
            metrics=dict(state.last_metrics),
            accounts=dict(state.accounts),
            wait_report=present_waits_to_proto(phase_waits(state)),
            hold_reason=state.hold_reason,
            guards=[
                trainer.GuardStatus(rule=rule.text, state=judgement.state, detail=judgement.detail)
                for rule, judgement in state.judgements()
            ],
        )

    async def WatchSteps(
        self, request: trainer.WatchStepsRequest, context: Context
    ) -> AsyncIterator[trainer.WatchStepsResponse]:
        """Stream finished steps until the run ends."""
        check_fields(request)
        check_watchers(self._num_watchers, self._limits.max_watchers)
        self._num_watchers += 1
        try:
            step = request.from_step or self._state.step + 1
            while records := await self._state.records_from(step):
                for record in records:
                    yield trainer.WatchStepsResponse(step=record.step, metrics=dict(record.metrics))
                step = records[-1].step + 1
        finally:
            self._num_watchers -= 1

    async def SaveCheckpoint(
        self, request: trainer.SaveCheckpointRequest, context: Context
    ) -> trainer.SaveCheckpointResponse:
        """Save a checkpoint after the current step."""
        step, path = await self._state.request_save()
        return trainer.SaveCheckpointResponse(step=step, path=path)

    async def Pause(self, request: trainer.PauseRequest, context: Context) -> trainer.PauseResponse:
        """Pause training after the current step for one holder, with or without a lease."""
        check_pause(request, self._state.holders)
        lease_s = request.lease_seconds if request.HasField("lease_seconds") else None
        self._state.pause(lease_s, request.holder)
        return trainer.PauseResponse(step=self._state.step)

    async def Resume(
        self, request: trainer.ResumeRequest, context: Context
    ) -> trainer.ResumeResponse:
        """End one holder's pause; the operator also ends the guards'."""
        check_fields(request)
        self._state.resume(request.holder)
        return trainer.ResumeResponse(step=self._state.step)

    async def Stop(self, request: trainer.StopRequest, context: Context) -> trainer.StopResponse:
        """End the run after the current step."""
        check_fields(request)
        self._state.stop(
            request.reason or "asked to stop",
            skips_validation=request.skip_validation,
            saves=request.save,
        )
        return trainer.StopResponse(step=self._state.step)


def _member_to_proto(member: FleetMember, now_s: float) -> trainer.ReplicaStatus:
    return trainer.ReplicaStatus(
        replica=replica_to_proto(member.info, member.version),
        state=member.state.value,
        heartbeat_age_seconds=now_s - member.last_seen_s,
        slots_busy=member.load.slots_busy,
        tokens_per_second=member.tokens_per_second,
        idle_share=member.idle_share,
        queued=member.load.queued,
    )


def trainer_server(
    config: RunConfig, servicer: TrainerServicer, credentials: Credentials
) -> RpcServer:
    """Return a server of the calls at the endpoint of the run's trainer."""
    endpoint = config.sluice.trainer.endpoint
    return RpcServer(
        [lambda server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)],
        (_SERVICE,),
        host=endpoint.host,
        port=endpoint.port,
        health_port=endpoint.health_port,
        max_message_bytes=message_mb(config) << 20,
        credentials=credentials,
    )
