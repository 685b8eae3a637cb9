"""Changed elements are found by their bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.weights.delta import changed_positions

_DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


@given(st.integers(1, 300), st.sets(st.integers(0, 299), max_size=20), st.sampled_from(_DTYPES))
def test_exactly_the_changed_elements_are_found_and_their_values_suffice(
    size: int, places: set[int], dtype: torch.dtype
) -> None:
    old = torch.zeros(size, dtype=dtype)
    new = old.clone()
    changed = sorted(place for place in places if place < size)
    new[changed] = 1
    positions = changed_positions(old, new)
    assert positions.tolist() == changed
    assert torch.equal(old.index_copy(0, positions, new[positions]), new)


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_any_shape_is_seen_flat(shape: tuple[int, ...]) -> None:
    old = torch.zeros(shape)
    assert changed_positions(old, old + 1).tolist() == list(range(old.numel()))


def test_nan_equals_itself_and_the_sign_of_zero_counts() -> None:
    old = torch.tensor([torch.nan, 0.0, 1.0])
    assert changed_positions(old, torch.tensor([torch.nan, -0.0, 1.0])).tolist() == [1]
