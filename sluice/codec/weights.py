"""Calls that steer weight transfers: encode, decode and check them."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.bounds import check_fields
from sluice.codec.fields import check_range, shortened
from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weights.adapters import merged_shapes

_TENSORS_PER_WEIGHT = 5  # with the halves of an adapter, or of two of experts'
_DIMENSIONS = 8


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
    """Check a group, and that its tensors are this replica's weights, each with an adapter or
    without. Raise InvalidRequestError.

    A transfer plan grows with the weights, so a replica makes none for other weights.
    """
    check_fields(request)
    check_range("rank", request.rank, 1, request.world_size - 1)
    _check_tensors(request.tensors, layout)


def _check_tensors(tensors: Sequence[weights.TensorSpec], layout: Sequence[TensorSpec]) -> None:
    shapes = {spec.name: tuple(spec.shape) for spec in layout}
    counted = tensors[: _TENSORS_PER_WEIGHT * len(layout)]
    offered = {one.name: tuple(one.shape[:_DIMENSIONS]) for one in counted}
    found = merged_shapes(offered)
    adapters = len(offered) - len(found)
    if len(tensors) - adapters != len(layout):
        raise InvalidRequestError(
            f"tensors: {len(tensors)} given, this replica's model has {len(layout)}; give trainer "
            "and replicas the same model"
        )
    for tensor in tensors:
        expected = shapes.get(tensor.name)
        if tensor.name not in found:
            continue  # an adapter of one of them
        if expected is None or list(expected) != list(tensor.shape):
            raise InvalidRequestError(
                f"tensors: {shortened(tensor.name)} of shape {shortened(tensor.shape[:8])} is "
                "none of this replica's weights; give trainer and replicas the same model"
            )
