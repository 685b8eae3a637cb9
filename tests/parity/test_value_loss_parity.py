"""The critic's loss against NumPy in float64, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.algorithm.losses.inputs import GlobalCounts
from sluice.algorithm.losses.objective import ValueLoss, value_loss

CLIP = 0.5


def loss_of(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mode: str = "token-mean"
) -> ValueLoss:
    rows = torch.arange(values.numel()) // 3
    counts = GlobalCounts(values.numel(), 4)
    return value_loss(values, old, returns, rows, counts, cliprange_value=CLIP, mode=mode)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum"])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_equals_the_formula(seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = (rng.normal(size=12).astype(np.float32) for _ in range(3))
    found = loss_of(torch.tensor(values), torch.tensor(old), torch.tensor(returns), mode)
    v, o, r = (array.astype(np.float64) for array in (values, old, returns))
    free, held = (v - r) ** 2, (np.clip(v, o - CLIP, o + CLIP) - r) ** 2
    divisor = {"token-mean": 12, "token-sum": 1, "seq-mean-token-sum": 4}[mode]
    expected = 0.5 * np.maximum(free, held).sum() / divisor
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    assert found.metric_sums["critic/vf_clipfrac"].item() == (held > free).sum()
    assert found.metric_sums["critic/vpred_mean"].item() == pytest.approx(v.sum(), rel=1e-5)
    assert found.num_tokens == 12


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (1.2, 1.0, 2.0, 0.32, -0.8, 0),  # near the old value
        (1.8, 1.0, 2.0, 0.125, 0.0, 1),  # moved too far towards the return: held, no gradient
        (0.2, 1.0, 2.0, 1.62, -1.8, 0),  # moved away: the larger error counts
    ],
)
def test_a_value_that_moved_too_far_learns_no_more(
    value: float, old: float, target: float, loss: float, slope: float, clipped: int
) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = loss_of(values, torch.tensor([old]), torch.tensor([target]))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-6)
    assert found.metric_sums["critic/vf_clipfrac"].item() == clipped


def test_no_tokens_give_zero() -> None:
    values = torch.zeros(0, requires_grad=True)
    none, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    counts = GlobalCounts(5, 1)
    found = value_loss(values, none, none, rows, counts, cliprange_value=CLIP, mode="token-mean")
    assert found.loss.item() == 0.0
