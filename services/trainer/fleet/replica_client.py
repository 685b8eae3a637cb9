"""The trainer's calls to one replica, and requests for counters of replicas and the reward
service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sluice.algorithm.accounting import ReplicaCounters
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.messages import counters_from_proto, group_spec_to_proto
from sluice.errors import PeerError, WeightSyncError
from sluice.rpc.client import open_channel, rollout_stub, unary_call, weight_sync_stub
from sluice.rpc.credentials import OPEN, Credentials
from sluice.types import ReplicaInfo, TransferGroupSpec

if TYPE_CHECKING:
    import grpc


class ReplicaClient:
    """Steers weight updates of one replica. Close it, or use it as a context manager.

    Args:
        replica: whom to call.
        max_message_bytes: largest message either way.
        timeout_s: deadline of joining and of committing.
        transfer_timeout_s: deadline of receiving one version.
        credentials: what the replica is shown.
    """

    def __init__(
        self,
        replica: ReplicaInfo,
        *,
        max_message_bytes: int,
        timeout_s: float,
        transfer_timeout_s: float,
        credentials: Credentials = OPEN,
    ) -> None:
        self.replica = replica
        self._timeout_s, self._transfer_timeout_s = timeout_s, transfer_timeout_s
        self._channel = open_channel(
            replica.address, max_message_bytes=max_message_bytes, credentials=credentials
        )
        self._weights = weight_sync_stub(self._channel)
        self._rollout = rollout_stub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def join(self, spec: TransferGroupSpec) -> None:
        """Joins a transfer group.

        Raises:
            WeightSyncError: the replica planned other buckets.
        """
        answer = await unary_call(
            self._weights.JoinGroup,
            group_spec_to_proto(spec),
            name="WeightSyncService/JoinGroup",
            peer=self.replica.name,
            phase=f"joining epoch {spec.epoch}",
            deadline_s=self._timeout_s,
        )
        if answer.plan_digest != spec.plan_digest:
            raise WeightSyncError(self.replica.name, "join", "its transfer plan differs from ours")

    async def stage(self, epoch: int, version: int) -> str:
        """Receives a version; the digest of what arrived."""
        answer = await unary_call(
            self._weights.StageUpdate,
            weights.StageUpdateRequest(epoch=epoch, policy_version=version),
            name="WeightSyncService/StageUpdate",
            peer=self.replica.name,
            phase=f"staging version {version}",
            deadline_s=self._transfer_timeout_s,
        )
        return answer.digest

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Swaps a version in; seconds of stall.

        Raises:
            WeightSyncError: the replica serves other weights than ours.
        """
        answer = await unary_call(
            self._weights.CommitUpdate,
            weights.CommitUpdateRequest(epoch=epoch, policy_version=version, digest=digest),
            name="WeightSyncService/CommitUpdate",
            peer=self.replica.name,
            phase=f"committing version {version}",
            deadline_s=self._timeout_s,
        )
        if answer.digest != digest or answer.policy_version != version:
            raise WeightSyncError(
                self.replica.name, "commit", f"serves {answer.policy_version} {answer.digest}"
            )
        return answer.stall_seconds

    async def abort(self, epoch: int, reason: str) -> None:
        """Throws away what is staged."""
        await unary_call(
            self._weights.AbortUpdate,
            weights.AbortUpdateRequest(epoch=epoch, reason=reason),
            name="WeightSyncService/AbortUpdate",
            peer=self.replica.name,
            phase=f"aborting epoch {epoch}",
        )

    async def probe(self, timeout_s: float) -> None:
        """Returns when the replica's engine answers from its loop."""
        await unary_call(
            self._rollout.GetStatus,
            rollout.GetStatusRequest(),
            name="RolloutService/GetStatus",
            peer=self.replica.name,
            phase="answering a probe",
            deadline_s=timeout_s,
        )


_DEADLINE_S = 2.0
_PHASE = "asking for its counters"
_MAX_MESSAGE_BYTES = 1 << 20


class ReplicaCounterCalls:
    """One channel to each replica, for as long as it is a member. Close it.

    Args:
        credentials: what replicas are shown.
    """

    def __init__(self, credentials: Credentials = OPEN) -> None:
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, replica: ReplicaInfo) -> ReplicaCounters:
        """Counters as they stand, without waiting for the end of an engine's step.

        Raises:
            SluiceError: it does not answer, or another process answers there.
        """
        channel = self._channels.get(replica.instance_id)
        if channel is None:
            channel = open_channel(
                replica.address,
                max_message_bytes=_MAX_MESSAGE_BYTES,
                credentials=self._credentials,
            )
            self._channels[replica.instance_id] = channel
        answer = await unary_call(
            rollout_stub(channel).GetStatus,
            rollout.GetStatusRequest(without_engine=True),
            name="RolloutService/GetStatus",
            peer=replica.name,
            phase=_PHASE,
            deadline_s=_DEADLINE_S,
        )
        if answer.instance_id != replica.instance_id:
            raise PeerError(replica.name, _PHASE, f"process {answer.instance_id} answers there")
        return counters_from_proto(answer)

    async def forget_others(self, members: Collection[ReplicaInfo]) -> None:
        """Closes the channels to replicas that are no members."""
        for instance_id in self._channels.keys() - {info.instance_id for info in members}:
            await self._channels.pop(instance_id).close()

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
