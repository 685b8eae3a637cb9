"""Replicas and weight-transfer groups <-> protobuf."""

from __future__ import annotations

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.errors import InvalidRequestError
from sluice.types import ReplicaInfo, TensorSpec, TransferGroupSpec


def replica_to_proto(replica: ReplicaInfo, policy_version: int) -> common.Replica:
    """Encodes a replica and the version it serves (ignored when registering)."""
    return common.Replica(
        name=replica.name,
        incarnation=replica.incarnation,
        address=replica.address,
        slots=replica.slots,
        policy_version=policy_version,
    )


def replica_from_proto(message: common.Replica) -> ReplicaInfo:
    """Decodes a replica.

    Raises:
        InvalidRequestError: name, incarnation, address or slots are missing.
    """
    for field in ("name", "incarnation", "address", "slots"):
        if not getattr(message, field):
            raise InvalidRequestError(f"replica.{field}: missing")
    return ReplicaInfo(message.name, message.incarnation, message.address, message.slots)


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
    )


def group_spec_from_proto(message: weights.JoinGroupRequest) -> TransferGroupSpec:
    """Decodes what a member needs to join.

    Raises:
        InvalidRequestError: rank and world size do not fit together.
    """
    if not 1 <= message.rank < message.world_size:
        raise InvalidRequestError(
            f"rank {message.rank} of {message.world_size}: receivers are 1 to world_size - 1"
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
    )
