"""The plan: every byte exactly once, aligned, within the bucket size, the same everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec
from sluice.weights.plan import (
    ALIGNMENT_BYTES,
    Bucket,
    TransferPlan,
    hiding_bucket_bytes,
    plan_transfer,
    tensor_specs,
)

# A loaded machine is no failure.
_unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_DTYPES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[TensorSpec, ...]:
    shapes = draw(
        st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=12)
    )
    return tuple(
        TensorSpec(f"w{index}", draw(st.sampled_from(sorted(_DTYPES))), shape)
        for index, shape in enumerate(shapes)
    )


_BUCKET_BYTES = st.integers(64, 1024).map(lambda blocks: 64 * blocks)


def _covered(plan: TransferPlan, tensor: int) -> list[tuple[int, int, Bucket, int]]:
    return [
        (piece.tensor_start, piece.tensor_start + piece.num_bytes, bucket, piece.bucket_start)
        for bucket in plan.buckets
        for piece in bucket.pieces
        if piece.tensor == tensor
    ]


@_unhurried
@given(_tensors(), _BUCKET_BYTES)
def test_every_byte_of_every_tensor_travels_exactly_once_in_order(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    plan = plan_transfer(tensors, bucket_bytes)
    for index, size in enumerate(plan.sizes):
        cursor = 0
        for start, stop, bucket, bucket_start in _covered(plan, index):
            assert start == cursor < stop
            assert bucket.start + bucket_start == plan.offsets[index] + start
            cursor = stop
        assert cursor == size


@_unhurried
@given(_tensors(), _BUCKET_BYTES)
def test_buckets_tile_the_stream_within_the_bucket_size(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    plan = plan_transfer(tensors, bucket_bytes)
    cursor = 0
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.start == cursor
        assert 0 < bucket.num_bytes <= bucket_bytes
        ends = [piece.bucket_start + piece.num_bytes for piece in bucket.pieces]
        assert all(0 < end <= bucket.num_bytes for end in ends)
        cursor = bucket.stop
    assert cursor == max(
        (offset + size for offset, size in zip(plan.offsets, plan.sizes, strict=True) if size),
        default=0,
    )


@_unhurried
@given(_tensors(), _BUCKET_BYTES)
def test_tensors_and_buckets_start_aligned_and_never_overlap(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    plan = plan_transfer(tensors, bucket_bytes)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in plan.offsets)
    assert all(bucket.start % ALIGNMENT_BYTES == 0 for bucket in plan.buckets)
    ends = [offset + size for offset, size in zip(plan.offsets, plan.sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, plan.offsets[1:], strict=False))


@_unhurried
@given(_tensors(), _BUCKET_BYTES)
def test_only_a_tensor_larger_than_a_bucket_is_split(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    plan = plan_transfer(tensors, bucket_bytes)
    for index, size in enumerate(plan.sizes):
        fewest = -(-size // bucket_bytes)
        assert len(_covered(plan, index)) == fewest


@_unhurried
@given(_tensors(), _BUCKET_BYTES)
def test_the_plan_depends_on_its_arguments_only(
    tensors: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    first, second = plan_transfer(tensors, bucket_bytes), plan_transfer(list(tensors), bucket_bytes)
    assert first == second
    assert first.digest == second.digest


@pytest.mark.parametrize(
    "other",
    [
        plan_transfer([TensorSpec("a", "float32", (64, 64))], 8192),
        plan_transfer([TensorSpec("b", "float32", (64, 64))], 4096),
        plan_transfer([TensorSpec("a", "int32", (64, 64))], 4096),
        plan_transfer([TensorSpec("a", "float32", (4096,))], 4096),
    ],
    ids=["bucket size", "name", "dtype", "shape"],
)
def test_the_plan_digest_tells_plans_apart(other: TransferPlan) -> None:
    plan = plan_transfer([TensorSpec("a", "float32", (64, 64))], 4096)
    assert plan.digest != other.digest


@pytest.mark.parametrize(
    ("tensors", "bucket_bytes", "named"),
    [
        ([], 4096, "tensors: empty"),
        ([TensorSpec("a", "float32", (1,))] * 2, 4096, "a is listed twice"),
        ([TensorSpec("a", "float31", (1,))], 4096, "float31"),
        ([TensorSpec("a", "float32", (2, -1))], 4096, r"a has shape \(2, -1\)"),
        ([TensorSpec("a", "float32", (1,))], 4095, "bucket_bytes = 4095"),
        ([TensorSpec("a", "float32", (1,))], 1024, "bucket_bytes = 1024"),
    ],
)
def test_what_cannot_be_planned_is_named(
    tensors: list[TensorSpec], bucket_bytes: int, named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        plan_transfer(tensors, bucket_bytes)


@_unhurried
@given(st.integers(1, 1 << 36), _BUCKET_BYTES.map(lambda size: size << 10))
def test_weights_go_in_four_buckets_or_more_unless_these_would_be_small(
    num_elements: int, most: int
) -> None:
    chosen = hiding_bucket_bytes((TensorSpec("w", "bfloat16", (num_elements,)),), most)
    assert chosen % ALIGNMENT_BYTES == 0
    if chosen < most:
        assert chosen >= 4 << 20
    assert chosen <= most
    if chosen > 4 << 20:
        assert -(-2 * num_elements // chosen) >= 4


def test_the_wire_dtype_concerns_floating_point_tensors_only() -> None:
    tensors = {"w": torch.zeros(2, 3), "steps": torch.zeros((), dtype=torch.int64)}
    assert tensor_specs(tensors.items(), torch.bfloat16) == (
        TensorSpec("w", "bfloat16", (2, 3)),
        TensorSpec("steps", "int64", ()),
    )
    assert tensor_specs(tensors.items())[0].dtype == "float32"
