"""Policy losses at single tokens and rows, against numbers of verl or by hand."""

from __future__ import annotations

import pytest
import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.registry import policy_objective

SETTINGS = PolicyLossSettings(clip_low=0.2, clip_high=0.28, clip_c=10.0, dro_beta=0.7)


def one_row(name: str, advantage: float, log_ratios: list[float]) -> PolicyObjective:
    """A row of tokens of logprob -1 under the policy being updated."""
    logprobs = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    inputs = LossInputs(
        logprobs,
        logprobs - torch.tensor(log_ratios, dtype=torch.float64),
        torch.full_like(logprobs, advantage),
        torch.zeros(len(log_ratios), dtype=torch.int64),
        1,
    )
    return policy_objective(name)(inputs, GlobalCounts(tokens=len(log_ratios), rows=1), SETTINGS)


@pytest.mark.parametrize(
    ("name", "advantage", "log_ratio", "loss"),
    [
        ("vanilla", 1.0, 0.5, -1.28),
        ("vanilla", 1.0, -0.5, -0.606531),
        ("vanilla", -1.0, 0.5, 1.648721),
        ("vanilla", -1.0, -0.5, 0.8),
        ("vanilla", -1.0, 3.0, 10.0),
        ("sapo", 1.0, 0.4054651081, -2.489837),
        ("sapo", -1.0, 0.4054651081, 2.393585),
        ("sapo", 1.0, 0.0, -2.0),
        ("gpg", 1.5, 0.4, 1.5),
        ("dro", 1.0, 0.5, 1.0875),  # 1 + 0.35 * 0.25
        ("cispo", 1.0, 0.5, 1.28),
        ("cispo", -1.0, -0.5, -0.8),
        ("cispo", -1.0, 0.1, -1.105171),
        # p = 0.367879; p_old = 0.223130: the gap of 0.144749 lies within both bounds.
        ("dppo_tv", 1.0, 0.5, 1.648721),
        # p_old = 0.082085: a gap of 0.285795 is too much for A > 0, the other way is free.
        ("dppo_tv", 1.0, 1.5, 0.0),
        ("dppo_tv", -1.0, 1.5, -4.481689),
        ("dppo_tv", -1.0, 3.0, -10.0),  # the ratio of 20.1 is cut at c
        # Bernoulli(0.082085) from Bernoulli(0.367879): -0.123128 + 0.917915 * 0.373035 = 0.219287
        ("dppo_kl", 1.0, 1.5, 4.481689),
        ("dppo_kl", 1.0, 2.5, 0.0),
        ("geo_mean", 1.0, 0.5, -1.323130),  # exp(0.28)
        ("geo_mean", -1.0, 0.5, 1.648721),
        ("geo_mean", -1.0, -0.5, 0.818731),  # exp(-0.2)
        ("clip_cov", 1.0, 0.5, -1.28),
        ("kl_cov", 1.0, 0.5, -1.598721),  # -exp(0.5) + 0.1 * 0.5
    ],
)
def test_one_token(name: str, advantage: float, log_ratio: float, loss: float) -> None:
    found = one_row(name, advantage, [log_ratio])
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)


def test_gspo_takes_the_geometric_mean_ratio_of_the_row() -> None:
    found = one_row("gspo", 1.0, [0.1, -0.2, 0.3])
    assert found.loss.item() == pytest.approx(-1.068939, abs=1e-6)
    assert found.metrics["actor/pg_clipfrac"].mean == 0.0
    clipped = one_row("gspo", 1.0, [0.9, -0.2, 0.3])
    assert clipped.loss.item() == pytest.approx(-1.28, abs=1e-6)
    assert clipped.metrics["actor/pg_clipfrac"].mean == 1.0


def test_gspo_has_no_dual_clip_but_a_bounded_exponent() -> None:
    found = one_row("gspo", -1.0, [11.0, 15.0])
    assert found.loss.item() == pytest.approx(22026.465795, rel=1e-9)


def test_kl_cov_reports_the_absolute_log_ratio() -> None:
    found = one_row("kl_cov", 1.0, [0.5, -0.3])
    assert found.metrics["actor/ppo_kl"].mean == pytest.approx(0.4)
