"""Asks replicas and the reward service for their counters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from services.trainer.fleet import Load
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.errors import PeerError
from sluice.rpc.call import unary_call
from sluice.rpc.channel import open_channel
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.stubs import rollout_stub
from sluice.types import ReplicaInfo

if TYPE_CHECKING:
    import grpc

_DEADLINE_S = 2.0
_PHASE = "asking for its counters"
_MAX_MESSAGE_BYTES = 1 << 20


def load_from_proto(message: trainer.HeartbeatRequest | rollout.GetStatusResponse) -> Load:
    """A replica's counters; it tells the same ones when it is asked as in its heartbeats."""
    return Load(
        message.slots_busy,
        message.queued,
        message.generated_tokens,
        message.busy_seconds,
        message.unsent_tokens,
        message.running_tokens,
        message.wall_seconds,
        dict(message.seconds_by_state),
        message.direct_sent_tokens,
        message.direct_unsent_tokens,
    )


class ReplicaCounterCalls:
    """One channel to each replica, for as long as it is a member. Close it.

    Args:
        credentials: what replicas are shown.
    """

    def __init__(self, credentials: Credentials = OPEN) -> None:
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, replica: ReplicaInfo) -> Load:
        """Counters as they stand, without waiting for the end of an engine's step.

        Raises:
            SluiceError: it does not answer, or another process answers there.
        """
        channel = self._channels.get(replica.incarnation)
        if channel is None:
            channel = open_channel(
                replica.address,
                max_message_bytes=_MAX_MESSAGE_BYTES,
                credentials=self._credentials,
            )
            self._channels[replica.incarnation] = channel
        answer = await unary_call(
            rollout_stub(channel).GetStatus,
            rollout.GetStatusRequest(without_engine=True),
            name="RolloutService/GetStatus",
            peer=replica.name,
            phase=_PHASE,
            deadline_s=_DEADLINE_S,
        )
        if answer.incarnation != replica.incarnation:
            raise PeerError(replica.name, _PHASE, f"process {answer.incarnation} answers there")
        return load_from_proto(answer)

    async def forget_others(self, members: Collection[ReplicaInfo]) -> None:
        """Closes the channels to replicas that are no members."""
        for incarnation in self._channels.keys() - {info.incarnation for info in members}:
            await self._channels.pop(incarnation).close()

    async def close(self) -> None:
        """Closes all channels."""
        await self.forget_others(())


class RewardCounterCalls:
    """The reward service's counters."""

    def __init__(self, stub: reward_pb2_grpc.RewardServiceAsyncStub) -> None:
        self._stub = stub

    async def ask(self) -> Mapping[str, float]:
        """Counters and gauges by metric name.

        Raises:
            SluiceError: it does not answer.
        """
        answer = await unary_call(
            self._stub.GetStatus,
            reward.GetStatusRequest(),
            name="RewardService/GetStatus",
            peer="reward service",
            phase=_PHASE,
            deadline_s=_DEADLINE_S,
        )
        return dict(answer.statistics)
