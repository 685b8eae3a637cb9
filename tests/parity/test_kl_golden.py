"""KL estimators and controllers against verl's numbers and NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sluice.algorithm.kl import KlController, kl_estimate, penalize_rewards

Floats = npt.NDArray[np.float64]


def k3(x: Floats) -> Floats:
    y = np.clip(-x, -20, 20)
    return np.minimum(np.exp(y) - y - 1, 10)


FORMULAS: dict[str, Callable[[Floats], Floats]] = {
    "kl": lambda x: x,
    "k1": lambda x: x,
    "abs": np.abs,
    "mse": lambda x: x * x / 2,
    "k2": lambda x: x * x / 2,
    "low_var_kl": k3,
    "k3": k3,
}


@pytest.mark.parametrize(
    ("y", "value"),
    [(0.1, 0.00517092), (-0.1, 0.00483742), (1.0, 0.718282), (-1.0, 0.367879), (3.0, 10.0)],
)
@pytest.mark.parametrize("kind", ["k3", "low_var_kl", "k3+"])
def test_k3_equals_verls(kind: str, y: float, value: float) -> None:
    found = kl_estimate(torch.tensor(-y - 1.0), torch.tensor(-1.0), kind=kind)
    assert found.item() == pytest.approx(value, rel=2e-5)


@pytest.mark.parametrize("kind", sorted(FORMULAS))
@pytest.mark.parametrize("scale", [0.5, 5.0, 40.0])
def test_estimators_equal_the_formula(kind: str, scale: float) -> None:
    x = np.random.default_rng(7).normal(0.0, scale, 500).astype(np.float32)
    found = kl_estimate(torch.tensor(x), torch.zeros(500), kind=kind)
    expected = FORMULAS[kind](x.astype(np.float64))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=2e-7)


def test_the_adaptive_coefficient_equals_verls() -> None:
    controller = KlController(type="adaptive", coef=0.001, target_kl=0.1, horizon=10000)
    assert controller.after_batch(0.3, num_rows=512).coef == pytest.approx(0.00101024, abs=1e-10)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
@pytest.mark.parametrize("seed", range(2))
def test_rewards_less_the_penalty_equal_the_formula(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, old, reference = (rng.normal(size=(5, 6)).astype(np.float32) for _ in range(3))
    mask = rng.random((5, 6)) < 0.7
    found = penalize_rewards(
        torch.tensor(scores),
        torch.tensor(old),
        torch.tensor(reference),
        torch.tensor(mask),
        kind=kind,
        controller=KlController(coef=0.05),
    )
    penalty = FORMULAS[kind](old.astype(np.float64) - reference.astype(np.float64)) * mask
    np.testing.assert_allclose(found.rewards.numpy(), scores - 0.05 * penalty, rtol=1e-5, atol=1e-6)
    row_means = penalty.sum(1) / np.maximum(mask.sum(1), 1)
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(row_means.mean(), rel=1e-5)
