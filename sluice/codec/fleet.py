"""Replicas and weight-transfer groups <-> protobuf."""

from __future__ import annotations

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.errors import InvalidRequestError
from sluice.types import ReplicaInfo, TensorSpec, TransferGroupSpec

MAX_REPLICA_RANKS = 1024
"""Devices of one replica, each a rank of transfer groups."""


def replica_to_proto(replica: ReplicaInfo, policy_version: int) -> common.Replica:
    """Encodes a replica and the version it serves (ignored when registering)."""
    return common.Replica(
        name=replica.name,
        incarnation=replica.incarnation,
        address=replica.address,
        slots=replica.slots,
        policy_version=policy_version,
        ranks=replica.ranks,
    )


def replica_from_proto(message: common.Replica) -> ReplicaInfo:
    """Decodes a replica.

    Raises:
        InvalidRequestError: name, incarnation, address or slots are missing, or there are more
            ranks than a replica may have.
    """
    for field in ("name", "incarnation", "address", "slots"):
        if not getattr(message, field):
            raise InvalidRequestError(f"replica.{field}: missing")
    if message.ranks > MAX_REPLICA_RANKS:
        raise InvalidRequestError(
            f"replica.ranks: {message.ranks}; a replica has at most {MAX_REPLICA_RANKS}"
        )
    return ReplicaInfo(
        message.name, message.incarnation, message.address, message.slots, message.ranks or 1
    )


def group_spec_to_proto(spec: TransferGroupSpec) -> weights.JoinGroupRequest:
    """Encodes what a member needs to join."""
    return weights.JoinGroupRequest(
        epoch=spec.epoch,
        host=spec.host,
        port=spec.port,
        rank=spec.rank,
        world_size=spec.world_size,
        backend=spec.backend,
        bucket_bytes=spec.bucket_bytes,
        timeout_seconds=spec.timeout_s,
        tensors=[
            weights.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in spec.tensors
        ],
        plan_digest=spec.plan_digest,
        store_key=spec.store_key,
        ranks=spec.ranks,
    )


def group_spec_from_proto(message: weights.JoinGroupRequest) -> TransferGroupSpec:
    """Decodes what a member needs to join.

    Raises:
        InvalidRequestError: rank, ranks and world size do not fit together.
    """
    ranks = message.ranks or 1
    if not 1 <= message.rank <= message.world_size - ranks:
        raise InvalidRequestError(
            f"rank {message.rank} of {message.world_size} for a receiver of {ranks}: receivers "
            "have 1 to world_size - 1"
        )
    return TransferGroupSpec(
        epoch=message.epoch,
        host=message.host,
        port=message.port,
        rank=message.rank,
        world_size=message.world_size,
        backend=message.backend,
        bucket_bytes=message.bucket_bytes,
        timeout_s=message.timeout_seconds,
        tensors=tuple(TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in message.tensors),
        plan_digest=message.plan_digest,
        store_key=message.store_key,
        ranks=ranks,
    )
