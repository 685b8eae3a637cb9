"""Properties of the clipped loss, its aggregation and the loss registry."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from sluice.algorithm.losses.inputs import GlobalCounts, MetricMean
from sluice.algorithm.losses.objective import LossAggregation, aggregate
from sluice.algorithm.losses.policy_losses import vanilla_policy_loss
from sluice.algorithm.losses.settings import PolicyLossSettings

ACTOR = r"actor_rollout_ref\.actor"
MODES = [str(mode) for mode in LossAggregation]
SETTINGS = PolicyLossSettings(clip_high=0.28, clip_c=10.0)


def loss_of(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, MetricMean]]:
    return vanilla_policy_loss(logprobs, old, advantages, SETTINGS)


def tokens(seed: int, number: int) -> torch.Tensor:
    return torch.randn(number, generator=torch.Generator().manual_seed(seed))


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    old = -tokens(0, 8).abs()
    advantages = tokens(1, 8)
    logprobs = old.clone().requires_grad_()
    loss, metrics = loss_of(logprobs, old, advantages)
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert all(metric.mean == 0.0 for metric in metrics.values())


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "flows"),
    [
        (1.0, 0.3, False),
        (1.0, 0.2, True),
        (1.0, -3.0, True),
        (-1.0, -0.3, False),
        (-1.0, 3.0, False),
    ],
)
def test_no_gradient_flows_where_a_bound_holds(
    advantage: float, log_ratio: float, flows: bool
) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = loss_of(logprobs, torch.zeros(1), torch.tensor([advantage]))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.item()) == flows


def test_an_extreme_ratio_stays_finite() -> None:
    loss, metrics = loss_of(
        torch.tensor([-1.0, -500.0]), torch.tensor([-500.0, -1.0]), torch.ones(2)
    )
    assert torch.isfinite(loss).all()
    assert metrics["actor/ppo_kl"].mean == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_give_a_loss_of_zero_that_still_has_a_gradient(mode: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    rows = torch.zeros(0, dtype=torch.int64)
    found = aggregate(empty * 1.0, rows, GlobalCounts(3, 1), mode, 3)
    found.backward()
    assert found.item() == 0.0


def test_low_precision_losses_are_summed_in_float32() -> None:
    loss = torch.full((1000,), 1.01, dtype=torch.bfloat16)
    rows = torch.zeros(1000, dtype=torch.int64)
    found = aggregate(loss, rows, GlobalCounts(1, 1), "token-sum")
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1000 * loss[0].item(), rel=1e-6)
