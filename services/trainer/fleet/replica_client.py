"""The trainer's calls to replicas, over one channel each: weight updates, probes and counters."""

from __future__ import annotations

from sluice.algorithm.accounting import ReplicaCounters
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.messages import counters_from_proto
from sluice.codec.weights import group_spec_to_proto
from sluice.errors import PeerError, WeightSyncError
from sluice.rpc.client import (
    ChannelPool,
    RequestT,
    ResponseT,
    UnaryMethod,
    rollout_stub,
    unary_call,
    weight_sync_stub,
)
from sluice.types import ReplicaInfo, TransferGroupSpec

# Accounting prefers old counters to a long wait.
_COUNTERS_WITHIN_S = 2.0
_COUNTERS_PHASE = "asking for its counters"


async def replica_counters(channels: ChannelPool, replica: ReplicaInfo) -> ReplicaCounters:
    """Return a replica's current counters, without waiting for a step of its engine.

    Raises:
        SluiceError: the replica does not answer, or another process answers there.
    """
    # Hold the channel: closing it under the call would cancel the task that reads the answer.
    channel = channels.acquire(replica.address)
    try:
        answer = await unary_call(
            rollout_stub(channel).GetStatus,
            rollout.GetStatusRequest(without_engine=True),
            peer=replica.name,
            phase=_COUNTERS_PHASE,
            deadline_s=_COUNTERS_WITHIN_S,
        )
    finally:
        await channels.release(replica.address)
    if answer.instance_id != replica.instance_id:
        detail = f"process {answer.instance_id} answers there"
        raise PeerError(replica.name, _COUNTERS_PHASE, detail)
    return counters_from_proto(answer)


class ReplicaClient:
    """Calls one replica for weight updates. Every call has a deadline. Close it after use.

    Args:
        channels: hold the channel to it, which stays open until this client is closed.
        timeout_s: deadline of joining.
        transfer_timeout_s: deadline of receiving one version.
        commit_timeout_s: deadline of loading it into the engine.
    """

    def __init__(
        self,
        replica: ReplicaInfo,
        channels: ChannelPool,
        *,
        timeout_s: float,
        transfer_timeout_s: float,
        commit_timeout_s: float,
    ) -> None:
        self.replica = replica
        self._timeout_s = timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._channels = channels
        channel = channels.acquire(replica.address)
        self._weights = weight_sync_stub(channel)
        self._rollout = rollout_stub(channel)

    async def close(self) -> None:
        """Release the channel."""
        await self._channels.release(self.replica.address)

    async def join(self, spec: TransferGroupSpec) -> None:
        """Join a transfer group.

        Raises:
            WeightSyncError: the replica made another transfer plan.
        """
        request = group_spec_to_proto(spec)
        phase = f"joining epoch {spec.epoch}"
        answer = await self._call(self._weights.JoinGroup, request, phase, self._timeout_s)
        if answer.plan_digest != spec.plan_digest:
            raise WeightSyncError(self.replica.name, "join", "its transfer plan differs from ours")

    async def stage(self, epoch: int, version: int) -> str:
        """Receive a version, and return the digest of what arrived."""
        request = weights.StageUpdateRequest(epoch=epoch, policy_version=version)
        phase = f"staging version {version}"
        answer = await self._call(
            self._weights.StageUpdate, request, phase, self._transfer_timeout_s
        )
        return answer.digest

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        """Make the staged version the one that serves, and return the seconds of stall.

        Raises:
            WeightSyncError: the replica serves other weights than ours.
        """
        request = weights.CommitUpdateRequest(epoch=epoch, policy_version=version, digest=digest)
        phase = f"committing version {version}"
        answer = await self._call(
            self._weights.CommitUpdate, request, phase, self._commit_timeout_s
        )
        # The answer names the weights that the replica serves after the swap.
        if answer.digest != digest or answer.policy_version != version:
            raise WeightSyncError(
                self.replica.name, "commit", f"serves {answer.policy_version} {answer.digest}"
            )
        return answer.stall_seconds

    async def abort(self, epoch: int, reason: str) -> None:
        """Throw away the staged version and leave the epoch, within the deadline of
        `sluice.rpc.policy`."""
        request = weights.AbortUpdateRequest(epoch=epoch, reason=reason)
        await self._call(self._weights.AbortUpdate, request, f"aborting epoch {epoch}")

    async def sleep(self) -> bool:
        """Let the engine free its device's memory until the next weights; return whether it can."""
        answer = await self._call(self._weights.Sleep, weights.SleepRequest(), "falling asleep")
        return answer.asleep

    async def probe(self, timeout_s: float) -> None:
        """Wait until the replica's engine answers from its loop."""
        request = rollout.GetStatusRequest()
        await self._call(self._rollout.GetStatus, request, "answering a probe", timeout_s)

    async def _call(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        phase: str,
        deadline_s: float | None = None,
    ) -> ResponseT:
        return await unary_call(
            method,
            request,
            peer=self.replica.name,
            phase=phase,
            deadline_s=deadline_s,
        )
