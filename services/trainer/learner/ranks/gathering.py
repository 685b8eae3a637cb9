"""Whole tensors on rank 0 from shards of all ranks, one bucket at a time.

Besides the tensors that its reader keeps, rank 0 holds one bucket, or one tensor if that is larger;
another rank holds one shard of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.learner.ranks.parallel import COPY_DIM, SHARD_DIM, DataParallel
from sluice.concurrency.deadlines import advance


class TensorSet(StrEnum):
    """A set of named tensors; moments are AdamW's state."""

    WIRE_WEIGHTS = "wire_weights"
    """The policy's weights for replicas, in ``actor_rollout_ref.rollout.dtype``."""
    WEIGHTS = "weights"
    MOMENTS = "moments"
    CRITIC_WEIGHTS = "critic_weights"
    CRITIC_MOMENTS = "critic_moments"


BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _ShardPart:
    """One rank's shard of a tensor; `dtype` is its dtype on the wire."""

    name: str
    tensor: DTensor
    dtype: torch.dtype

    @property
    def num_shards(self) -> int:
        mesh = self.tensor.device_mesh
        return mesh.size(mesh.ndim - 1)

    @property
    def rows(self) -> int:
        """Return the rows of the longest shard."""
        return -(-self.tensor.shape[0] // self.num_shards)

    @property
    def numel(self) -> int:
        """Return the elements of the longest shard."""
        return self.rows * math.prod(self.tensor.shape[1:])

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor, with padding."""
        return self.num_shards * self.numel * self.dtype.itemsize

    def whole(self, shards: Tensor) -> Tensor:
        """Return the tensor from ``[shards, numel]``, a view if that is contiguous."""
        rows = shards.reshape(self.num_shards * self.rows, *self.tensor.shape[1:])
        return rows[: self.tensor.shape[0]]


@torch.no_grad()
def gather_whole(
    named_tensors: Iterable[tuple[str, Tensor]],
    parallel: DataParallel,
    phase: str,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor on rank 0, and nothing on the others. Collective to its end.

    Args:
        named_tensors: sharded or not, in the same order on every rank.
        parallel: all ranks.
        phase: named in errors.
        dtype: dtype on the wire of sharded floating-point tensors.
        bucket_bytes: bytes of whole tensors per collective, unless one tensor is larger.

    Raises:
        DeadlineError: a rank did not take part in time.
        PeerError: a rank failed.
    """
    bucket: list[_ShardPart] = []
    for name, tensor in named_tensors:
        if not isinstance(tensor, DTensor):
            if parallel.rank == 0:
                yield name, tensor.detach()
            continue
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        part = _ShardPart(name, tensor, wanted)
        size = sum(one.num_bytes for one in bucket) + part.num_bytes
        if bucket and (size > bucket_bytes or bucket[0].dtype != part.dtype):
            yield from _gather(bucket, parallel, phase)
            bucket = []
        bucket.append(part)
    if bucket:
        yield from _gather(bucket, parallel, phase)


def _gather(
    bucket: list[_ShardPart], parallel: DataParallel, phase: str
) -> Iterator[tuple[str, Tensor]]:
    advance()
    mesh = bucket[0].tensor.device_mesh
    if mesh.ndim > 1:
        # Only the first copy sends. The other copies wait here for each bucket: the deadline of the
        # next command is too short for the whole gather.
        parallel.all_gather([0.0], phase)
        if mesh.get_local_rank(COPY_DIM) != 0:
            return  # rank 0 is in the first copy
    ends = list(accumulate(part.numel for part in bucket))
    local = [part.tensor.to_local() for part in bucket]
    # Shards are padded to the longest, so that all ranks send equally many elements.
    own = torch.zeros(ends[-1], dtype=bucket[0].dtype, device=local[0].device)
    for shard, part, end in zip(local, bucket, ends, strict=True):
        start = end - part.numel
        own[start : start + shard.numel()].copy_(shard.flatten())
    shards = parallel.gather_to_first(own, mesh.get_group(SHARD_DIM), phase)
    if shards is None:
        return
    for part, end in zip(bucket, ends, strict=True):
        yield part.name, part.whole(shards[:, end - part.numel : end])
