"""Rules of the KL estimators, the controller and the penalty in the reward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.kl import (
    KL_ESTIMATORS,
    KlController,
    kl_estimate,
    penalize_rewards,
)

LOGPROBS = torch.tensor([-0.5, -1.0, -2.0, -0.1])
REFERENCE = torch.tensor([-0.7, -0.4, -2.0, -3.0])


def gradient(kind: str) -> torch.Tensor:
    logprobs = LOGPROBS.clone().requires_grad_()
    kl_estimate(logprobs, REFERENCE, kind=kind).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_a_plus_keeps_the_value(kind: str) -> None:
    plain = kl_estimate(LOGPROBS, REFERENCE, kind=kind)
    torch.testing.assert_close(kl_estimate(LOGPROBS, REFERENCE, kind=f"{kind}+"), plain)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_a_plus_takes_the_gradient_of_k2(kind: str) -> None:
    torch.testing.assert_close(gradient(f"{kind}+"), LOGPROBS - REFERENCE)


def test_without_a_plus_each_estimator_has_its_own_gradient() -> None:
    x = LOGPROBS - REFERENCE
    torch.testing.assert_close(gradient("k1"), torch.ones(4))
    torch.testing.assert_close(gradient("abs"), x.sign())
    torch.testing.assert_close(gradient("k2"), x)
    torch.testing.assert_close(gradient("k3"), 1.0 - (-x).exp())


@given(st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=8))
def test_k3_is_between_zero_and_ten(differences: list[float]) -> None:
    found = kl_estimate(torch.tensor(differences), torch.zeros(len(differences)), kind="k3")
    assert (found > -1e-6).all()
    assert (found <= 10.0).all()


def test_a_fixed_coefficient_never_moves() -> None:
    controller = KlController(coef=0.3)
    assert controller.after_batch(100.0, num_rows=10**6) == controller


def test_an_adaptive_coefficient_follows_the_divergence_within_bounds() -> None:
    controller = KlController(type="adaptive", coef=1.0, target_kl=0.1, horizon=100.0)
    assert controller.after_batch(0.1, num_rows=50).coef == 1.0
    assert controller.after_batch(0.11, num_rows=50).coef == pytest.approx(1.05)
    assert controller.after_batch(9.0, num_rows=50).coef == pytest.approx(1.1)
    assert controller.after_batch(0.0, num_rows=50).coef == pytest.approx(0.9)
    assert controller.coef == 1.0


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_divergence_that_is_no_number_leaves_an_adaptive_coefficient_as_it_is(kl: float) -> None:
    controller = KlController(type="adaptive", coef=0.3)
    assert controller.after_batch(kl, num_rows=50) == controller


def test_the_penalty_is_taken_from_masked_tokens_only() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    old = torch.tensor([[-1.0, -1.0, -9.0], [-1.0, -9.0, -9.0]])
    reference = torch.tensor([[-1.5, -1.2, 0.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    controller = KlController(type="adaptive", coef=0.1, target_kl=0.5, horizon=10.0)
    found = penalize_rewards(scores, old, reference, mask, kind="kl", controller=controller)
    expected = torch.tensor([[-0.05, 0.98, 0.0], [1.9, 0.0, 0.0]])
    torch.testing.assert_close(found.rewards, expected)
    # Rows count alike, whatever their lengths: (0.35 + 1.0) / 2.
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(0.675)
    assert found.metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert found.controller.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_a_batch_without_tokens_is_not_penalized() -> None:
    scores = torch.ones(2, 3)
    found = penalize_rewards(
        scores, scores, -scores, torch.zeros(2, 3), kind="k3", controller=KlController()
    )
    assert torch.equal(found.rewards, scores)
    assert found.metrics["actor/reward_kl_penalty"] == 0.0
