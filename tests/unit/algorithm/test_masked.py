"""Masked sums, means, variances and whitening."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.algorithm.advantages.inputs import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)

VALUES = torch.tensor([[1.0, 2.0, float("nan")], [4.0, float("inf"), -1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]], dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_what_stands_outside_of_the_mask_is_never_read(dtype: torch.dtype) -> None:
    mask = MASK.to(dtype)
    assert masked_sum(VALUES, mask).item() == 6.0
    assert masked_mean(VALUES, mask).item() == pytest.approx(1.5)
    assert masked_mean(VALUES, mask, -1).tolist() == pytest.approx([1.5, 1.5])
    assert masked_sum(VALUES, mask, 0).tolist() == [5.0, 2.0, -1.0]


def test_an_empty_mask_has_sum_and_mean_zero() -> None:
    empty = torch.zeros_like(MASK)
    assert masked_sum(VALUES, empty).item() == masked_mean(VALUES, empty).item() == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_whitening_equals_numpys_statistics(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(3.0, 2.0, (4, 7)), rng.random((4, 7)) < 0.6
    chosen = values[mask]
    variance = masked_var(torch.tensor(values), torch.tensor(mask))
    assert variance.item() == pytest.approx(chosen.var(ddof=1), rel=1e-6)
    found = masked_whiten(torch.tensor(values), torch.tensor(mask)).numpy()
    expected = (values - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", [0, 1])
def test_a_variance_of_less_than_two_positions_is_refused(count: int) -> None:
    mask = torch.zeros(3, dtype=torch.bool)
    mask[:count] = True
    with pytest.raises(ValueError, match=f"the mask has {count}"):
        masked_var(torch.ones(3), mask)
