"""The trainer's calls to one replica."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.fleet import group_spec_to_proto
from sluice.errors import WeightSyncError
from sluice.rpc.call import unary_call
from sluice.rpc.channel import open_channel
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.stubs import rollout_stub, weight_sync_stub
from sluice.types import ReplicaInfo, TransferGroupSpec


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
