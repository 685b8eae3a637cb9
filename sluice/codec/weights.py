"""Calls that steer weight transfers: encode, decode and check them."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.fields import MAX_NUMBER, check_name, check_range, check_text, shortened
from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec, TransferGroupSpec

MAX_WORLD_SIZE = 65536
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 4096, 2**34
MAX_TIMEOUT_S = 24 * 3600.0
MAX_HOST_BYTES, MAX_REASON_BYTES = 255, 4000
STORE_KEY_BYTES = 32


def group_spec_to_proto(spec: TransferGroupSpec) -> weights.JoinGroupRequest:
    """Encode what a member needs to join."""
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
    """Decode what a member needs to join.

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


def check_join(request: weights.JoinGroupRequest, layout: Sequence[TensorSpec]) -> None:
    """Check a group, and that its tensors are this replica's weights. Raise InvalidRequestError.

    A transfer plan grows with the weights, so a replica makes none for other weights.
    """
    check_range("epoch", request.epoch, 0, MAX_NUMBER)
    check_name("host", request.host)
    check_range("port", request.port, 1, 65535)
    check_range("world_size", request.world_size, 2, MAX_WORLD_SIZE)
    check_range("rank", request.rank, 1, request.world_size - 1)
    check_name("backend", request.backend)
    check_name("plan_digest", request.plan_digest)
    check_range("bucket_bytes", request.bucket_bytes, MIN_BUCKET_BYTES, MAX_BUCKET_BYTES)
    if not 0 < request.timeout_seconds <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout_seconds: {request.timeout_seconds}; send more than 0, at most "
            f"{MAX_TIMEOUT_S:g}"
        )
    if len(request.store_key) not in (0, STORE_KEY_BYTES):  # a secret: only its length is shown
        raise InvalidRequestError(
            f"store_key: {len(request.store_key)} bytes; send {STORE_KEY_BYTES}, or none"
        )
    _check_tensors(request.tensors, layout)


def check_stage(request: weights.StageUpdateRequest | weights.CommitUpdateRequest) -> None:
    """Check epoch and version. Raise InvalidRequestError."""
    check_range("epoch", request.epoch, 0, MAX_NUMBER)
    check_range("policy_version", request.policy_version, 0, MAX_NUMBER)


def check_commit(request: weights.CommitUpdateRequest) -> None:
    """Check epoch, version and digest. Raise InvalidRequestError."""
    check_stage(request)
    check_name("digest", request.digest)


def check_abort(request: weights.AbortUpdateRequest) -> None:
    """Check epoch and reason. Raise InvalidRequestError."""
    check_range("epoch", request.epoch, 0, MAX_NUMBER)
    check_text("reason", request.reason, MAX_REASON_BYTES)


def _check_tensors(tensors: Sequence[weights.TensorSpec], layout: Sequence[TensorSpec]) -> None:
    if len(tensors) != len(layout):
        raise InvalidRequestError(
            f"tensors: {len(tensors)} given, this replica's model has {len(layout)}; give trainer "
            "and replicas the same model"
        )
    shapes = {spec.name: tuple(spec.shape) for spec in layout}
    for tensor in tensors:
        expected = shapes.get(tensor.name)
        if expected is None or list(expected) != list(tensor.shape):
            raise InvalidRequestError(
                f"tensors: {shortened(tensor.name)} of shape {shortened(tensor.shape[:8])} is "
                "none of this replica's weights; give trainer and replicas the same model"
            )
