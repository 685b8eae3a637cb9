"""Weights in one piece of memory, laid out like the wire."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sluice.weights.dtypes import torch_dtype
from sluice.weights.plan import Bucket, TransferPlan


class WeightBuffer:
    """CPU memory in the layout of a plan's stream.

    `tensors` are views into it, by name and in the order of the plan; a bucket is a slice of it.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self.plan = plan
        # Zeros, so that the padding between tensors is the same in every process.
        self._stream = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        self.tensors: Mapping[str, torch.Tensor] = {
            spec.name: self._stream[offset : offset + size]
            .view(torch_dtype(spec.dtype))
            .view(spec.shape)
            for spec, offset, size in zip(plan.tensors, plan.offsets, plan.sizes, strict=True)
        }

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's bytes: uint8 ``[bucket.num_bytes]``, a view."""
        return self._stream[bucket.start : bucket.stop]
