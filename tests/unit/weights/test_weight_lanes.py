"""Packing on one side and unpacking on the other gives the same weights back."""

from __future__ import annotations

import torch

from sluice.weights.plan import WeightBuffer, plan_transfer, tensor_specs
from sluice.weights.transfer import DirectPort, PackingPort, UnpackingPort

_CPU = torch.device("cpu")


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {
        "a": torch.randn(5, 3, generator=generator).t(),
        "large": torch.randn(3000, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


def test_packed_buckets_equal_the_buffer_that_lies_like_the_wire() -> None:
    weights = _weights()
    plan = plan_transfer(tensor_specs(weights.items()), 4096)
    buffer = WeightBuffer(plan)
    for name, tensor in weights.items():
        buffer.tensors[name].copy_(tensor)
    packing, direct = PackingPort(plan, weights, _CPU), DirectPort(buffer)
    assert len(plan.buckets) > 2
    for bucket in plan.buckets:
        assert torch.equal(packing.load(bucket), direct.load(bucket))


def test_unpacked_buckets_give_every_weight_back() -> None:
    weights = _weights()
    plan = plan_transfer(tensor_specs(weights.items()), 4096)
    received = WeightBuffer(plan)
    packing, unpacking = PackingPort(plan, weights, _CPU), UnpackingPort(received, _CPU)
    for bucket in plan.buckets:
        wire = unpacking.load(bucket)
        wire.copy_(packing.load(bucket))
        unpacking.unload(bucket, wire)
    for name, tensor in weights.items():
        assert torch.equal(received.tensors[name], tensor)
