"""Bytes are counted as long as a storage is alive, and a wrapper's tensor once."""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from services.trainer.dry_run.live_bytes import LiveBytes

KIB = 1 << 10


def kib(number: int) -> torch.Tensor:
    return torch.zeros(number * KIB, dtype=torch.uint8)


def test_bytes_live_from_a_tensor_to_its_last_view() -> None:
    with LiveBytes() as count:
        whole = kib(4)
        view = whole[:10]
        assert count.live == 4 * KIB
        del whole
        assert count.live == 4 * KIB
        del view
        assert count.live == 0
    assert count.peak == 4 * KIB


def test_a_storage_that_is_made_empty_and_full_again_counts_so() -> None:
    with LiveBytes() as count:
        gathered = kib(2)
        gathered.untyped_storage().resize_(0)
        assert count.live == 0
        gathered.untyped_storage().resize_(2 * KIB)
        assert count.live == 2 * KIB
        count.reset()
        kib(3)
        assert count.peak == 5 * KIB


def test_what_waits_for_a_collective_is_no_second_tensor() -> None:
    with LiveBytes() as count:
        result = AsyncCollectiveTensor(kib(1))
        doubled = result * 2
        assert count.live == 2 * KIB
        del result, doubled
        assert count.live == 0
