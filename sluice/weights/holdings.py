"""The streams of a share: one from each trainer rank that holds a part of it.

If no rank holds all weights, each one sends what it has. The stream of a rank to a class of workers
is laid out like any other (`sluice.weights.plan`): it holds the parts that the rank has and the
class wants. So a part of a digest is what one rank holds of what one share takes of a tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec
from sluice.weight_share import Holding, WeightShare
from sluice.weights.plan import (
    ALIGNMENT_BYTES,
    MIN_BUCKET_BYTES,
    TransferPlan,
    hiding_bucket_bytes,
    plan_transfer,
)
from sluice.weights.share import (
    Cuts,
    check_share,
    common_cuts,
    cuts_by_name,
    overlapping_ranks,
    part_shape,
)

Part = tuple[tuple[TensorSpec, ...], WeightShare]
"""Tensors, and the cuts of partial ones."""


def held_part(
    tensors: Sequence[TensorSpec], share: WeightShare, holding: Holding | None
) -> Part | None:
    """Return the part of a holding that a share takes; ``None`` if it takes nothing.

    Args:
        share: the wanted part of the tensors; its cuts were checked before.
        holding: the available part; ``None`` for all weights.
    """
    if holding is None:
        return tuple(tensors), share
    share_cuts, held_cuts = cuts_by_name(share), dict(holding.parts)
    specs: list[TensorSpec] = []
    cuts: list[tuple[str, Cuts]] = []
    for spec in tensors:
        if spec.name not in held_cuts:
            continue
        common = common_cuts(spec.shape, share_cuts.get(spec.name, ()), held_cuts[spec.name])
        if common is None:
            continue
        specs.append(spec)
        if common:
            cuts.append((spec.name, common))
    return (tuple(specs), WeightShare(tuple(sorted(cuts)))) if specs else None


def stream_plans(
    tensors: Sequence[TensorSpec],
    bucket_bytes: int,
    share: WeightShare,
    holdings: Sequence[Holding],
) -> tuple[TransferPlan | None, ...]:
    """Return the layout of each stream to the workers with a share; ``None`` for no stream.

    Args:
        share: the workers' share; its cuts were checked before.
        holdings: the holdings of the sending ranks; empty if one rank holds all weights.
    """
    parts = [held_part(tensors, share, holding) for holding in holdings or (None,)]
    return tuple(
        None if part is None else plan_transfer(part[0], bucket_bytes, part[1]) for part in parts
    )


def stream_bucket_bytes(
    tensors: Sequence[TensorSpec], max_bytes: int, share: WeightShare, holdings: Sequence[Holding]
) -> int:
    """Return the bucket size of the streams to the workers with a share.

    A worker has buckets of all streams in flight; together they are no larger than those of a
    single stream.

    Args:
        max_bytes: largest allowed collective.
        holdings: the holdings of the sending ranks; empty if one rank holds all weights.
    """
    if not holdings:
        return hiding_bucket_bytes(tensors, max_bytes, share)
    max_bytes = max(
        max_bytes // len(holdings) // ALIGNMENT_BYTES * ALIGNMENT_BYTES, MIN_BUCKET_BYTES
    )
    parts = [held_part(tensors, share, holding) for holding in holdings]
    return max(
        hiding_bucket_bytes(part[0], max_bytes, part[1]) for part in parts if part is not None
    )


def joint_digest(plans: Sequence[TransferPlan | None]) -> str:
    """Return the digest of the layout of all streams of a share."""
    if len(plans) == 1 and plans[0] is not None:
        return plans[0].digest
    text = " ".join("" if plan is None else plan.digest for plan in plans)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_holdings(holdings: Sequence[Holding], tensors: Sequence[TensorSpec]) -> None:
    """Raise InvalidRequestError unless the holdings are parts of these tensors and cover them.

    Args:
        holdings: must not overlap.
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    parts: dict[str, list[tuple[int, Cuts]]] = {name: [] for name in shapes}
    for holding in holdings:
        owner = f"the holding of trainer rank {holding.rank}"
        cut = tuple(sorted((name, cuts) for name, cuts in holding.parts if cuts))
        check_share(WeightShare(cut), tensors, owner)
        for name, cuts in holding.parts:
            if name not in parts:
                raise InvalidRequestError(f"{owner}: {name[:200]} is none of the weights")
            parts[name].append((holding.rank, cuts))
    for name, shape in shapes.items() if holdings else ():
        missing = math.prod(shape)
        missing -= sum(math.prod(part_shape(shape, cuts)) for _, cuts in parts[name])
        sharing = overlapping_ranks(parts[name], shape)
        if missing or sharing:
            detail = f"{missing} of its elements are missing"
            if sharing:
                detail = f"ranks {sharing[0]} and {sharing[1]} both hold some of its elements"
            raise InvalidRequestError(
                f"the holdings of the trainer's ranks do not make {name}: {detail}; run the same "
                "version of sluice on both ends"
            )
