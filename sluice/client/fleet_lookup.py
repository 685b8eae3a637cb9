"""Asks a run which replicas serve: the trainer, or without it the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.fleet import FleetReplica
from sluice.client.own_deadlines import own_deadline_is_failure
from sluice.client.run_address import RunAddress
from sluice.client.service_channels import ServiceChannels
from sluice.concurrency.exception_leaves import leaves
from sluice.errors import ConfigError, DeadlineError, HandshakeError, PeerError
from sluice.rpc.call import unary_call
from sluice.rpc.stubs import reward_stub, rollout_stub, trainer_stub

_PHASE = "asking for the replicas that serve"


class FleetLookup:
    """Finds the replicas of a run. Calling it asks anew.

    Args:
        address: of the run; with `replicas`, these alone are asked, each for itself.
        channels: to its services.
    """

    def __init__(self, address: RunAddress, channels: ServiceChannels) -> None:
        self._address, self._channels = address, channels

    async def __call__(self) -> Sequence[FleetReplica]:
        """Those that serve, with their loads.

        Raises:
            ConfigError: nothing is known that could be asked.
            PeerError: nobody answers, or not in time.
        """
        with own_deadline_is_failure():
            return await self._asked()

    async def _asked(self) -> Sequence[FleetReplica]:
        if self._address.replicas:
            return await self._of_themselves()
        if self._address.trainer is None:
            return await self._of_reward_service()
        try:
            return await self._of_trainer(self._address.trainer)
        except HandshakeError:
            raise
        except (PeerError, DeadlineError):
            if self._address.reward is None:
                raise
            return await self._of_reward_service()

    async def _of_themselves(self) -> Sequence[FleetReplica]:
        """All at once: one that hangs keeps nobody from hearing of the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(self._itself(address), name=f"asking {address}")
                    for address in self._address.replicas
                ]
        except ExceptionGroup as group:
            raise leaves(group)[0] from group
        return [found for task in asked if (found := task.result()) is not None]

    async def _of_trainer(self, trainer: str) -> Sequence[FleetReplica]:
        answer = await unary_call(
            trainer_stub(self._channels.to(trainer)).GetStatus,
            trainer_pb2.GetStatusRequest(),
            name="TrainerService/GetStatus",
            peer="trainer",
            phase=_PHASE,
        )
        return [
            FleetReplica(each.replica.address, each.replica.slots, each.slots_busy + each.queued)
            for each in answer.replicas
            if each.state == "serving"
        ]

    async def _of_reward_service(self) -> Sequence[FleetReplica]:
        if self._address.reward is None:
            raise ConfigError(
                "client: no address of a trainer, a reward service or a replica; give the run's "
                "folder, or one of them"
            )
        answer = await unary_call(
            reward_stub(self._channels.to(self._address.reward)).GetStatus,
            reward_pb2.GetStatusRequest(),
            name="RewardService/GetStatus",
            peer="reward service",
            phase=_PHASE,
        )
        return [FleetReplica(each.address, each.slots, 0) for each in answer.replicas]

    async def _itself(self, address: str) -> FleetReplica | None:
        try:
            answer = await unary_call(
                rollout_stub(self._channels.to(address)).GetStatus,
                rollout_pb2.GetStatusRequest(without_engine=True),
                name="RolloutService/GetStatus",
                peer=address,
                phase=_PHASE,
            )
        except HandshakeError:
            raise
        except (PeerError, DeadlineError):
            return None
        if not answer.HasField("policy_version"):
            return None
        return FleetReplica(address, answer.slots, answer.slots_busy + answer.queued)
