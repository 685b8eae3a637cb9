"""Memory of an engine's device against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.config.memory.rollout import (
    GIB,
    RolloutLayout,
    fits,
    kv_bytes_per_token,
    rollout_memory,
    smallest_tensor_parallel,
)
from sluice.config.memory.shape import ModelShape, published_shape

SHAPE = ModelShape(2, 8, 2, 1, 4, 16, 32)  # 1704 parameters
EXPERTS = replace(
    SHAPE, experts=4, experts_per_token=2, expert_intermediate=6
)  # 2152, 1152 in experts
LAYOUT = RolloutLayout(
    tp=1,
    ep=1,
    utilization=0.5,
    weight_bytes=2,
    kv_bytes=2,
    batched_tokens=10,
    max_num_seqs=3,
    longest_row=12,
)


def test_the_cache_of_a_token_is_key_and_value_of_every_layer() -> None:
    assert kv_bytes_per_token(SHAPE, tp=1) == 2 * 2 * 4 * 2
    # 144 KiB of Qwen3-8B: 2 · 36 layers · 8 heads · 128 · 2 bytes.
    assert kv_bytes_per_token(published_shape("Qwen3-8B"), tp=1) == 147_456
    assert kv_bytes_per_token(published_shape("Qwen3-8B"), tp=4) == 36_864


def test_key_value_heads_are_copied_where_there_are_fewer_than_devices() -> None:
    assert kv_bytes_per_token(SHAPE, tp=2) == kv_bytes_per_token(SHAPE, tp=1)


def test_the_cache_gets_what_weights_and_activations_leave() -> None:
    memory = rollout_memory(SHAPE, LAYOUT, device_bytes=20_000)
    assert memory.weights == 3408
    # 10 tokens of two residual rows and two MLP widths in 2 bytes; 3 rows of 32 logits in 4.
    assert memory.activations == 10 * (16 + 32) * 2 + 3 * 32 * 4
    assert memory.kv_cache == 10_000 - 3408 - 1344
    assert memory.kv_tokens == 5248 // 32
    assert memory.longest_rows == 164 // 12
    assert memory.kv_of_all_sequences == 32 * 12 * 3


def test_a_device_that_cannot_hold_the_weights_has_no_cache() -> None:
    memory = rollout_memory(SHAPE, LAYOUT, device_bytes=6000)
    assert (memory.kv_cache, memory.kv_tokens, memory.longest_rows) == (0, 0, 0)


def test_without_a_device_only_what_does_not_depend_on_it_is_known() -> None:
    memory = rollout_memory(SHAPE, LAYOUT, device_bytes=None)
    assert memory.weights == 3408
    assert (memory.kv_cache, memory.kv_tokens, memory.longest_rows) == (None, None, None)


def test_experts_are_cut_by_expert_parallelism_where_it_is_used() -> None:
    by_tensor = rollout_memory(EXPERTS, replace(LAYOUT, tp=2), None)
    by_expert = rollout_memory(EXPERTS, replace(LAYOUT, tp=2, ep=4), None)
    assert by_tensor.weights == 2152 / 2 * 2
    assert by_expert.weights == (1152 / 4 + 1000 / 2) * 2


@pytest.mark.parametrize(
    ("name", "gib", "utilization", "smallest"),
    [
        # 65.5 GB of weights against 80 GiB · 0.45 = 38.7 GB, 64 GiB · 0.7 = 48.1 GB, and so on.
        ("Qwen3-32B", 80, 0.45, 2),
        ("Qwen3-32B", 64, 0.70, 2),
        ("Qwen3-32B", 24, 0.90, 4),
        ("Qwen3-32B", 80, 0.90, 1),
        # 15.2 GB against 4.29 GB; 28 heads can be cut by 4 and by 7.
        ("Qwen2.5-7B", 8, 0.5, 4),
        ("Qwen2.5-7B", 6, 0.5, 7),
        ("Qwen3-235B-A22B", 64, 0.8, 16),
        ("Qwen3-235B-A22B", 1, 0.5, None),
    ],
)
def test_the_smallest_tensor_parallel_size_holds_the_weights(
    name: str, gib: float, utilization: float, smallest: int | None
) -> None:
    shape = published_shape(name)
    assert smallest_tensor_parallel(shape, gib * GIB, utilization) == smallest
    if smallest is not None:
        layout = replace(LAYOUT, utilization=utilization)
        assert fits(shape, replace(layout, tp=smallest), gib * GIB)
        smaller = [size for size in range(1, smallest) if shape.heads % size == 0]
        assert not any(fits(shape, replace(layout, tp=size), gib * GIB) for size in smaller)
