"""Digests prove equality of weights: any difference shows, nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sluice.weights import digest as digest_module
from sluice.weights.buffer import WeightBuffer
from sluice.weights.digest import StreamDigest, digest_tensor, digest_weights
from sluice.weights.plan import plan_transfer, tensor_specs

if TYPE_CHECKING:
    import pytest


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed": torch.randn(300, 7, generator=generator),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(12),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False, True]),
    }


def test_one_flipped_bit_changes_the_digest() -> None:
    weights = _weights()
    before = digest_weights(weights.items())
    weights["half"].view(torch.uint8)[17] ^= 1
    assert digest_weights(weights.items()) != before


def test_name_dtype_and_shape_are_part_of_the_digest() -> None:
    tensor = torch.zeros(4, 6)
    digests = {
        digest_tensor("a", tensor),
        digest_tensor("b", tensor),
        digest_tensor("a", tensor.view(torch.int32)),
        digest_tensor("a", tensor.view(6, 4)),
    }
    assert len(digests) == 4


def test_swapping_the_contents_of_two_weights_changes_the_digest() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    assert digest_weights([("a", a), ("b", b)]) != digest_weights([("a", b), ("b", a)])


def test_order_and_memory_layout_do_not_change_the_digest() -> None:
    weights = _weights()
    shuffled = dict(reversed(weights.items()))
    shuffled["embed"] = weights["embed"].t().contiguous().t()
    assert not shuffled["embed"].is_contiguous()
    assert digest_weights(shuffled.items()) == digest_weights(weights.items())


def test_chunked_copies_give_the_same_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digest_weights(_weights().items())
    monkeypatch.setattr(digest_module, "_CHUNK_BYTES", 100)
    assert digest_weights(_weights().items()) == whole


def test_the_digest_of_passing_buckets_is_the_digest_of_the_weights() -> None:
    weights = _weights()
    plan = plan_transfer(tensor_specs(weights.items()), 4096)
    assert len(plan.buckets) > 2
    buffer = WeightBuffer(plan)
    for name, tensor in weights.items():
        buffer.tensors[name].copy_(tensor)
    stream = StreamDigest(plan)
    for bucket in plan.buckets:
        stream.absorb(bucket, buffer.bucket(bucket))
    assert stream.hexdigest() == digest_weights(weights.items())
