"""How long a version may take: every collective of it, however the weights are cut."""

from __future__ import annotations

from contextlib import closing

import pytest

from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, Cut, WeightShare
from sluice.weights.plan import MAX_HIDING_BUCKETS, hiding_bucket_bytes, plan_transfer
from sluice.weights.sender import WeightSender, broadcast_deadline_s

MIB = 1 << 20


@pytest.mark.parametrize("size_mib", [1, 40, 300])
def test_the_deadline_counts_the_buckets_that_a_sender_makes(size_mib: int) -> None:
    tensors = [TensorSpec(f"w{i}", "uint8", (size_mib * MIB // 8,)) for i in range(8)]
    sender = WeightSender(device=CpuDevice(), bucket_bytes=64 * MIB, timeout_s=3.0)
    with closing(sender):
        spec = sender.form_group(1, ["r0"], tensors)["r0"]
    num_buckets = max(len(plan_transfer(tensors, spec.bucket_bytes).buckets), MAX_HIDING_BUCKETS)
    expected = (num_buckets + 2) * 3.0  # a header, a trailer
    assert broadcast_deadline_s(tensors, 64 * MIB, 3.0) == expected


def test_a_share_that_takes_more_buckets_than_the_whole_has_their_time() -> None:
    tensors = [TensorSpec(f"w{size}", "uint8", (2, size * MIB)) for size in (9, 7, 16)]
    share = WeightShare((("w16", (Cut(0, ((0, 1),)),)),))
    whole, part = (
        len(plan_transfer(tensors, hiding_bucket_bytes(tensors, 64 * MIB, one), one).buckets)
        for one in (WHOLE, share)
    )
    assert (whole, part) == (4, 6)
    assert broadcast_deadline_s(tensors, 64 * MIB, 3.0) >= (part + 2) * 3.0
