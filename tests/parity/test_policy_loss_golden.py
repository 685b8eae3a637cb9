"""The clipped loss and its aggregation against verl's numbers."""

from __future__ import annotations

import pytest
import torch

from sluice.algorithm.losses.inputs import GlobalCounts
from sluice.algorithm.losses.objective import aggregate
from sluice.algorithm.losses.policy_losses import vanilla_policy_loss
from sluice.algorithm.losses.settings import PolicyLossSettings

TWO_ROWS_LOSS = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
TWO_ROWS_INDEX = torch.tensor([0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "loss", "clipped", "held_by_dual_clip"),
    [
        (1.0, 0.5, -1.28, 1, 0),
        (1.0, -0.5, -0.606531, 0, 0),
        (-1.0, 0.5, 1.648721, 0, 0),
        (-1.0, -0.5, 0.8, 1, 0),
        (-1.0, 3.0, 10.0, 0, 1),
    ],
)
def test_clipped_loss_equals_verls(
    advantage: float, log_ratio: float, loss: float, clipped: int, held_by_dual_clip: int
) -> None:
    found, metrics = vanilla_policy_loss(
        torch.tensor([log_ratio - 1.0]),
        torch.tensor([-1.0]),
        torch.tensor([advantage]),
        PolicyLossSettings(clip_high=0.28, clip_c=10.0),
    )
    assert found.item() == pytest.approx(loss, abs=1e-5)
    assert metrics["actor/pg_clipfrac"].mean == clipped
    assert metrics["actor/pg_clipfrac_lower"].mean == held_by_dual_clip
    assert metrics["actor/ppo_kl"].mean == pytest.approx(-log_ratio, abs=1e-6)
    assert all(metric.count == 1 for metric in metrics.values())


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 1.666667),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", 5.0),
        ("seq-mean-token-sum-norm", 0.625),
        ("seq-mean-token-mean", 1.5),
    ],
)
def test_aggregation_equals_verls(mode: str, value: float) -> None:
    found = aggregate(TWO_ROWS_LOSS, TWO_ROWS_INDEX, GlobalCounts(6, 2), mode, 8)
    assert found.item() == pytest.approx(value, abs=1e-6)


def test_two_ranks_with_one_row_each_add_up_to_verls_token_mean() -> None:
    rank_losses = [
        aggregate(
            loss, torch.zeros(loss.numel(), dtype=torch.int64), GlobalCounts(6, 2), "token-mean"
        ).item()
        for loss in TWO_ROWS_LOSS.split([2, 4])
    ]
    # verl returns twice these, since its two ranks average.
    assert [2 * loss for loss in rank_losses] == pytest.approx([0.666667, 2.666667], abs=1e-6)
    assert sum(rank_losses) == pytest.approx(1.666667, abs=1e-6)
