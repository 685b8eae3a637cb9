"""Digests prove equality of weights: any difference shows, nothing else does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from sluice.weights.digest import StreamDigest, WeightDigests
from sluice.weights.plan import WeightBuffer, plan_transfer, tensor_specs
from tests.support.weight_digest import plain_digest


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed": torch.randn(300, 7, generator=generator),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(12),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
    }


def _digest(weights: Mapping[str, torch.Tensor], bucket_bytes: int = 4096) -> str:
    return _digests(weights, bucket_bytes).combined


def _digests(weights: Mapping[str, torch.Tensor], bucket_bytes: int = 4096) -> WeightDigests:
    """Of the buckets as they would pass."""
    plan = plan_transfer(tensor_specs(weights.items()), bucket_bytes)
    buffer = WeightBuffer(plan)
    for name, tensor in weights.items():
        buffer.tensors[name].copy_(tensor)
    stream = StreamDigest(plan)
    for bucket in plan.buckets:
        stream.update(bucket, buffer.bucket(bucket))
    return stream.digests()


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20], ids=["many buckets", "one bucket"])
def test_the_digest_of_passing_buckets_is_that_of_the_definition(bucket_bytes: int) -> None:
    assert _digest(_weights(), bucket_bytes) == plain_digest(_weights())


def test_one_flipped_bit_changes_the_digest() -> None:
    weights = _weights()
    before = _digest(weights)
    weights["half"].view(torch.uint8)[17] ^= 1
    assert _digest(weights) != before


def test_name_dtype_and_shape_are_part_of_the_digest() -> None:
    tensor = torch.zeros(4, 6)
    digests = {
        _digest({"a": tensor}),
        _digest({"b": tensor}),
        _digest({"a": tensor.view(torch.int32)}),
        _digest({"a": tensor.view(6, 4)}),
    }
    assert len(digests) == 4


def test_the_tensors_that_differ_are_named_in_the_order_of_the_wire() -> None:
    weights = _weights()
    before = _digests(weights)
    weights["steps"] += 1
    weights["half"].view(torch.uint8)[17] ^= 1
    assert _digests(weights).differing_names(before.parts) == ["half", "steps"]
    assert before.differing_names(before.parts) == []


def test_swapping_the_contents_of_two_weights_changes_the_digest() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    assert _digest({"a": a, "b": b}) != _digest({"a": b, "b": a})


def test_the_order_on_the_wire_does_not_change_the_digest() -> None:
    weights = _weights()
    assert _digest(dict(reversed(weights.items()))) == _digest(weights)
