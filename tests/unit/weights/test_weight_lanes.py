"""What one side puts on a device, the other takes off it: the same weights."""

from __future__ import annotations

import torch

from sluice.weights.plan import WeightBuffer
from sluice.weights.transfer import CopyingPort, DeviceSendingPort, DirectPort
from tests.support.weight_buffers import buffer_of

_CPU = torch.device("cpu")


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {
        "a": torch.randn(5, 3, generator=generator).t(),
        "large": torch.randn(3000, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


def test_buckets_travel_over_a_device_as_they_lie_in_the_buffer() -> None:
    weights = _weights()
    sent = buffer_of(weights)
    plan = sent.plan
    received = WeightBuffer(plan)
    sending, direct = DeviceSendingPort(sent, plan, _CPU), DirectPort(sent)
    receiving = CopyingPort(received, plan, _CPU)
    assert len(plan.buckets) > 2
    for bucket in plan.buckets:
        assert torch.equal(sending.load(bucket), direct.load(bucket))
        wire = receiving.load(bucket)
        wire.copy_(sending.load(bucket))
        receiving.unload(bucket, wire)
    for name, tensor in weights.items():
        assert torch.equal(received.tensors[name], tensor)
