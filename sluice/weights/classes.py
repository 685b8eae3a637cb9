"""The workers of an epoch's members, divided into classes: one for each share.

The workers of a class take this share, one of each replica that divides the weights in the same
way. Each sender forms a transfer group of its own with them, as its rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weight_share import WHOLE, Holding, WeightShare, WorkerPlace
from sluice.weights.holdings import joint_digest, stream_bucket_bytes, stream_plans
from sluice.weights.plan import TransferPlan

Worker = tuple[str, int]
"""A member's name and the number of one of its workers."""


@dataclass(frozen=True, slots=True)
class ShareClass:
    """The workers with one share; the first has rank 1.

    `plans` are those of the streams to them, one of each sender; ``None``: it has nothing for them.
    """

    plans: tuple[TransferPlan | None, ...]
    workers: tuple[Worker, ...]
    share: WeightShare

    @property
    def world_size(self) -> int:
        """Return the number of ranks, the sender included."""
        return 1 + len(self.workers)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all streams."""
        return sum(plan.total_bytes for plan in self.plans if plan is not None)


def share_classes(
    members: Sequence[str],
    tensors: Sequence[TensorSpec],
    shares: Mapping[str, Sequence[WeightShare]],
    most_bucket_bytes: int,
    holdings: Sequence[Holding] = (),
) -> tuple[ShareClass, ...]:
    """Return the classes, in the order of their first workers.

    Args:
        members: names of the receivers.
        tensors: the weights.
        shares: of each member's workers; a member that is not named has one, which takes all.
        most_bucket_bytes: largest collective.
        holdings: of the ranks that send; none: one rank holds all weights.
    """
    workers: dict[WeightShare, list[Worker]] = {}
    for name in members:
        for number, share in enumerate(shares.get(name, (WHOLE,))):
            workers.setdefault(share, []).append((name, number))
    # One size for all, since a member has one spec.
    bucket_bytes = max(
        stream_bucket_bytes(tensors, most_bucket_bytes, share, holdings) for share in workers
    )
    return tuple(
        ShareClass(stream_plans(tensors, bucket_bytes, share, holdings), tuple(found), share)
        for share, found in workers.items()
    )


def bucket_bytes_of(classes: Sequence[ShareClass]) -> int:
    """Return the bucket size of all streams."""
    return next(p.bucket_bytes for one in classes for p in one.plans if p is not None)


def specs_of(
    spec: TransferGroupSpec, classes: Sequence[ShareClass]
) -> dict[str, TransferGroupSpec]:
    """Return the spec of each member, by name, from what is common to all."""
    places: dict[str, dict[int, WorkerPlace]] = {}
    for group, one in enumerate(classes):
        digest = joint_digest(one.plans)
        for rank, (name, number) in enumerate(one.workers, 1):
            place = WorkerPlace(group, rank, one.world_size, digest)
            places.setdefault(name, {})[number] = place
    return {
        name: _placed(spec, [found[number] for number in sorted(found)])
        for name, found in places.items()
    }


def _placed(spec: TransferGroupSpec, places: Sequence[WorkerPlace]) -> TransferGroupSpec:
    first = replace(spec, ranks=len(places), places=tuple(places)).of_worker(0)
    in_one = {place.group for place in places} == {0}
    return replace(first, ranks=len(places), places=() if in_one else tuple(places))


def rank_names(one: ShareClass, several: set[str]) -> dict[int, str]:
    """Return the member of each rank, for errors.

    Args:
        several: members with more than one worker.
    """
    return {
        rank: f"{name} worker {number}" if name in several else name
        for rank, (name, number) in enumerate(one.workers, 1)
    }
