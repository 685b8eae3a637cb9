"""A bucket's new bytes come back, bit for bit, from its old ones and what changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.types import TensorSpec
from sluice.weights import delta
from sluice.weights.delta import apply_change, encode_change, max_code_bytes
from sluice.weights.plan import TransferPlan, WeightBuffer, plan_transfer

_DTYPES = ("bfloat16", "float32", "float16", "int64", "uint8", "bool", "float64")
_GUARD = 0xA5


@st.composite
def _plans(draw: st.DrawFn) -> TransferPlan:
    shapes = draw(
        st.lists(st.tuples(st.sampled_from(_DTYPES), st.integers(0, 3000)), min_size=1, max_size=6)
    )
    specs = [TensorSpec(f"t{index}", dtype, (size,)) for index, (dtype, size) in enumerate(shapes)]
    return plan_transfer(specs, 4096)


def _random(plan: TransferPlan, random: np.random.Generator) -> WeightBuffer:
    buffer = WeightBuffer(plan)
    for tensor in buffer.tensors.values():
        bits = random.integers(0, 256, tensor.nbytes, dtype=np.uint8)
        tensor.view(torch.uint8).copy_(torch.from_numpy(bits))
    return buffer


def _changed(old: WeightBuffer, share: float, random: np.random.Generator) -> WeightBuffer:
    new, other = WeightBuffer(old.plan), _random(old.plan, random)
    for name, tensor in new.tensors.items():
        chosen = torch.from_numpy(random.random(tensor.numel()) < share)
        near = (old.tensors[name].view(torch.uint8) + 1).view(tensor.dtype)
        candidate = near if random.random() < 0.5 else other.tensors[name]
        size = tensor.element_size()
        rows = chosen.repeat_interleave(size)
        tensor.view(torch.uint8).copy_(
            torch.where(rows, candidate.view(torch.uint8), old.tensors[name].view(torch.uint8))
        )
    return new


@settings(max_examples=60, deadline=None)
@given(_plans(), st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]), st.integers(0, 1 << 30))
def test_any_share_of_changes_of_any_tensors_comes_back(
    plan: TransferPlan, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = _random(plan, random)
    new = _changed(old, share, random)
    for bucket in plan.buckets:
        before, after = old.bucket(bucket).numpy(), new.bucket(bucket).numpy()
        code = encode_change(plan, bucket, before, after)
        assert code.size <= max_code_bytes(plan, bucket)
        content = before.copy()
        apply_change(plan, bucket, code, content)
        np.testing.assert_array_equal(content, after)


def _bf16(count: int) -> TransferPlan:
    return plan_transfer([TensorSpec("w", "bfloat16", (count,))], 1 << 24)


def test_bits_count_and_not_numbers() -> None:
    plan = plan_transfer([TensorSpec("w", "float32", (64,))], 4096)
    old, new = WeightBuffer(plan), WeightBuffer(plan)
    new.tensors["w"][3] = -0.0
    new.tensors["w"][5] = torch.nan
    old.tensors["w"][7] = new.tensors["w"][7] = torch.nan
    (bucket,) = plan.buckets
    content = old.bucket(bucket).numpy().copy()
    code = encode_change(plan, bucket, content, new.bucket(bucket).numpy())
    apply_change(plan, bucket, code, content)
    np.testing.assert_array_equal(content, new.bucket(bucket).numpy())


def test_a_change_of_one_unit_costs_two_bytes_and_no_change_a_header() -> None:
    plan = _bf16(delta.BLOCK_ELEMENTS)
    (bucket,) = plan.buckets
    old = np.full(plan.total_bytes, 0x3F, dtype=np.uint8)
    new = old.copy()
    new.view("<u2")[::100] += 1
    header = encode_change(plan, bucket, old, old).size
    assert header <= 16
    changed = len(range(0, delta.BLOCK_ELEMENTS, 100))
    assert encode_change(plan, bucket, old, new).size == header + 2 * changed


def test_a_bucket_of_several_blocks_comes_back() -> None:
    plan = _bf16(2 * delta.BLOCK_ELEMENTS + 5)
    (bucket,) = plan.buckets
    random = np.random.default_rng(1)
    old = random.integers(0, 256, plan.total_bytes, dtype=np.uint8)
    new = old.copy()
    new.view("<u2")[random.integers(0, plan.total_bytes // 2, 900)] ^= 3
    new.view("<u2")[-1] ^= 1
    content = old.copy()
    apply_change(plan, bucket, encode_change(plan, bucket, old, new), content)
    np.testing.assert_array_equal(content, new)


def _apply_guarded(plan: TransferPlan, code: NDArray[np.uint8], old: NDArray[np.uint8]) -> None:
    """Applies a code inside of a larger piece of memory, whose rest must stay as it is."""
    guard = 4096
    memory = np.full(old.size + 2 * guard, _GUARD, dtype=np.uint8)
    content = memory[guard : guard + old.size]
    content[:] = old
    try:
        apply_change(plan, plan.buckets[0], code, content)
    except ValueError:
        pass
    finally:
        assert (memory[:guard] == _GUARD).all()
        assert (memory[guard + old.size :] == _GUARD).all()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_code_is_refused_or_stays_inside_its_bucket(data: st.DataObject) -> None:
    plan = _bf16(3000)
    random = np.random.default_rng(2)
    old = random.integers(0, 256, plan.total_bytes, dtype=np.uint8)
    new = old.copy()
    new.view("<u2")[random.integers(0, 3000, 200)] += data.draw(st.sampled_from([1, 999]))
    code = encode_change(plan, plan.buckets[0], old, new)
    kind = data.draw(st.sampled_from(["flip", "cut", "more", "header"]))
    if kind == "flip":
        code[data.draw(st.integers(0, code.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        code = code[: data.draw(st.integers(0, code.size - 1))]
    elif kind == "more":
        code = np.append(code, np.uint8(data.draw(st.integers(0, 255))))
    else:
        code[:16] = data.draw(st.lists(st.integers(0, 255), min_size=16, max_size=16))
    if kind in ("cut", "more"):
        with pytest.raises(ValueError, match=r"code|header|left"):
            apply_change(plan, plan.buckets[0], code, old.copy())
    _apply_guarded(plan, code, old)
