"""Calls that steer weight transfers: encode, decode and check them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.bounds import check_fields
from sluice.codec.fields import check_range, shorten
from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weight_share import Cut, Holding, WeightShare, WorkerPlace
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
        places=[
            weights.WorkerPlace(
                group=place.group,
                rank=place.rank,
                world_size=place.world_size,
                plan_digest=place.plan_digest,
            )
            for place in spec.places
        ],
        holdings=[
            weights.Holding(rank=holding.rank, tensors=_cuts_to_proto(holding.parts))
            for holding in spec.holdings
        ],
    )


def group_spec_from_proto(message: weights.JoinGroupRequest) -> TransferGroupSpec:
    """Decode what a member needs to join.

    Raises:
        InvalidRequestError: rank, ranks, places and world size do not fit together.
    """
    ranks = message.ranks or 1
    if message.places:
        _check_places(message.places, ranks)
    elif not 1 <= message.rank <= message.world_size - ranks:
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
        group=message.places[0].group if message.places else 0,
        places=tuple(
            WorkerPlace(place.group, place.rank, place.world_size, place.plan_digest)
            for place in message.places
        ),
        holdings=tuple(
            Holding(holding.rank, _cuts_from_proto(holding.tensors, f"holdings[{index}]"))
            for index, holding in enumerate(message.holdings)
        ),
    )


def _check_places(places: Sequence[weights.WorkerPlace], ranks: int) -> None:
    if len(places) != ranks:
        raise InvalidRequestError(
            f"places: {len(places)} for {ranks} ranks; send one for each, or none"
        )
    for index, place in enumerate(places):
        check_fields(place, f"places[{index}].")
        check_range(f"places[{index}].rank", place.rank, 1, place.world_size - 1)


def share_to_proto(share: WeightShare) -> weights.WeightShare:
    """Encode the weights that one worker takes."""
    return weights.WeightShare(tensors=_cuts_to_proto(share.cuts))


def share_from_proto(message: weights.WeightShare, field: str) -> WeightShare:
    """Decode the weights that one worker takes; `field` names it in errors."""
    return WeightShare(_cuts_from_proto(message.tensors, field))


def shares_from_proto(
    messages: Sequence[weights.WeightShare], ranks: int
) -> tuple[WeightShare, ...]:
    """Decode the weights that each rank of a replica takes; none: all of them.

    Whether they are cuts of the model's weights is checked with the model at hand; see
    `sluice.weights.share.check_share`.

    Raises:
        InvalidRequestError: there is not one for each rank, or a cut's ranges are incomplete.
    """
    if len(messages) not in (0, ranks):
        raise InvalidRequestError(
            f"shares: {len(messages)} for {ranks} ranks; send one for each, or none"
        )
    return tuple(
        share_from_proto(message, f"shares[{rank}]") for rank, message in enumerate(messages)
    )


def _cuts_to_proto(parts: Iterable[tuple[str, Sequence[Cut]]]) -> list[weights.TensorCuts]:
    return [
        weights.TensorCuts(
            name=name,
            cuts=[
                weights.Cut(
                    dimension=cut.dimension,
                    starts=[start for start, _ in cut.ranges],
                    lengths=[length for _, length in cut.ranges],
                )
                for cut in cuts
            ],
        )
        for name, cuts in parts
    ]


def _cuts_from_proto(
    messages: Iterable[weights.TensorCuts], field: str
) -> tuple[tuple[str, tuple[Cut, ...]], ...]:
    return tuple(
        (message.name, tuple(_cut_from_proto(cut, field) for cut in message.cuts))
        for message in messages
    )


def _cut_from_proto(message: weights.Cut, field: str) -> Cut:
    if len(message.starts) != len(message.lengths):
        raise InvalidRequestError(
            f"{field}: a cut has {len(message.starts)} starts and {len(message.lengths)} lengths; "
            "send as many"
        )
    return Cut(message.dimension, tuple(zip(message.starts, message.lengths, strict=True)))


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
    specs = tensors[: _TENSORS_PER_WEIGHT * len(layout)]
    offered = {tensor_spec.name: tuple(tensor_spec.shape[:_DIMENSIONS]) for tensor_spec in specs}
    merged = merged_shapes(offered)
    adapters = len(offered) - len(merged)
    if len(tensors) - adapters != len(layout):
        raise InvalidRequestError(
            f"tensors: {len(tensors)} given, this replica's model has {len(layout)}; give trainer "
            "and replicas the same model"
        )
    for tensor in tensors:
        expected = shapes.get(tensor.name)
        if tensor.name not in merged:
            continue  # an adapter of one of them
        if expected is None or list(expected) != list(tensor.shape):
            raise InvalidRequestError(
                f"tensors: {shorten(tensor.name)} of shape {shorten(tensor.shape[:8])} is "
                "none of this replica's weights; give trainer and replicas the same model"
            )
