"""Weights in the layout of the wire, as the trainer's snapshots hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sluice.weights.plan import MIN_BUCKET_BYTES, WeightBuffer, plan_transfer, tensor_specs


def buffer_of(weights: Mapping[str, torch.Tensor]) -> WeightBuffer:
    """A buffer with a copy of `weights`."""
    buffer = WeightBuffer(plan_transfer(tensor_specs(weights.items()), MIN_BUCKET_BYTES))
    for name, tensor in weights.items():
        buffer.tensors[name].copy_(tensor)
    return buffer
