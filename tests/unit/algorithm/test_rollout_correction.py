"""Rules of rollout correction: thresholds, plans, merging, corner cases."""

from __future__ import annotations

import math

import pytest
import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.policy_losses import bypass_mode_objective
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.rollout_correction.correction import (
    RolloutCorrection,
    normalized_weights,
    rollout_correction,
)
from sluice.algorithm.rollout_correction.settings import (
    RejectionRule,
    RolloutCorrectionSettings,
    WeightBounds,
    rejection_rules,
    weight_bounds,
)
from sluice.algorithm.rollout_correction.statistics import (
    merge_statistics,
    metrics_of,
    statistics_from_vector,
    statistics_to_vector,
)
from sluice.errors import ConfigError

OLD = torch.tensor([-1.0, -1.2, -2.0, -0.7, -0.1, -3.0])
BEHAVIOR = torch.tensor([-1.5, -1.0, -2.2, -0.2, -0.1, -2.0])
ROWS = torch.tensor([0, 0, 1, 1, 1, 2])
ALL = RolloutCorrectionSettings(
    rollout_is="sequence",
    rollout_is_batch_normalize=True,
    rollout_rs="token_k1,seq_mean_k3",
    rollout_rs_threshold="0.5_2.0,0.1",
)


def corrected(settings: RolloutCorrectionSettings, rows: slice = slice(None)) -> RolloutCorrection:
    return rollout_correction(OLD[rows], BEHAVIOR[rows], ROWS[rows], settings)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_parts_merge_into_the_whole_over_the_wire(level: str) -> None:
    settings = RolloutCorrectionSettings(
        rollout_is=level,
        rollout_is_threshold="0.5_1.2",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,seq_sum_k2",
        rollout_rs_threshold="1.3,0.2",
    )
    whole = corrected(settings).statistics
    parts = [corrected(settings, cut).statistics for cut in (slice(0, 2), slice(2, 6), slice(0))]
    merged = statistics_from_vector(parts[0], statistics_to_vector(parts[0]))
    for part in parts[1:]:
        received = statistics_from_vector(parts[0], statistics_to_vector(part))
        merged = merge_statistics(merged, received)
    assert metrics_of(merged) == pytest.approx(metrics_of(whole), rel=1e-9)
    assert len(metrics_of(whole)) == len(whole)


def test_every_metric_has_verls_prefix() -> None:
    assert all(name.startswith("rollout_corr/") for name in metrics_of(corrected(ALL).statistics))


def test_no_tokens_give_no_metrics_and_change_nothing() -> None:
    found = corrected(ALL, slice(0))
    assert found.kept.shape == (0,)
    assert found.weights is not None
    assert normalized_weights(found.weights, found.statistics).shape == (0,)
    assert metrics_of(found.statistics) == {}


def test_diagnostics_are_there_without_weights_and_rejection() -> None:
    found = corrected(RolloutCorrectionSettings())
    assert found.weights is None
    assert bool(found.kept.all())
    assert {"rollout_corr/kl", "rollout_corr/chi2_seq"} <= metrics_of(found.statistics).keys()


def test_equal_policies_have_weight_one_and_no_gap() -> None:
    found = rollout_correction(OLD, OLD, ROWS, ALL)
    metrics = metrics_of(found.statistics)
    assert found.weights is not None
    assert found.weights.tolist() == [1.0] * 6
    assert bool(found.kept.all())
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(0.0, abs=1e-12)


def test_a_band_that_drops_all_weights_is_not_normalised() -> None:
    settings = RolloutCorrectionSettings(
        rollout_is="token", rollout_is_threshold="5.0_6.0", rollout_is_batch_normalize=True
    )
    found = corrected(settings)
    metrics = metrics_of(found.statistics)
    assert found.weights is not None
    assert normalized_weights(found.weights, found.statistics).tolist() == [0.0] * 6
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == 1.0


def test_bounds_of_a_band_belong_to_it() -> None:
    ratio = math.log(2.0)
    found = rollout_correction(
        torch.tensor([0.0, 0.0]),
        torch.tensor([-ratio, ratio], dtype=torch.float32),
        torch.tensor([0, 1]),
        RolloutCorrectionSettings(rollout_is="token", rollout_is_threshold="0.499999_2.000001"),
    )
    assert found.weights is not None
    assert found.weights.tolist() == pytest.approx([2.0, 0.5])


def test_rejection_over_rows_keeps_or_drops_whole_rows() -> None:
    settings = RolloutCorrectionSettings(rollout_rs="seq_max_k2", rollout_rs_threshold=0.13)
    assert corrected(settings).kept.tolist() == [True, True, True, True, True, False]


def test_impossible_probabilities_stay_finite() -> None:
    found = rollout_correction(
        torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), torch.tensor([0, 1]), ALL
    )
    assert found.weights is not None
    assert found.weights.isfinite().all()
    assert metrics_of(found.statistics)["rollout_corr/rollout_is_max"] == pytest.approx(
        math.exp(20)
    )


def test_neither_weights_nor_mask_carry_a_gradient() -> None:
    old = OLD.clone().requires_grad_()
    found = rollout_correction(old, BEHAVIOR, ROWS, ALL)
    assert found.weights is not None
    assert not found.weights.requires_grad
    assert not found.kept.requires_grad


@pytest.mark.parametrize(
    ("spec", "bounds"),
    [
        (2, WeightBounds(2.0)),
        ("3.5", WeightBounds(3.5)),
        ("0.5_2", WeightBounds(2.0, 0.5)),
        (" 1e-1_4 ", WeightBounds(4.0, 0.1)),
    ],
)
def test_weight_thresholds_are_read(spec: float | str, bounds: WeightBounds) -> None:
    assert weight_bounds(spec) == bounds


@pytest.mark.parametrize("spec", ["", "two", "1_2_3", "-1", "0", "0_2", "nan", "inf", "_2", True])
def test_weight_thresholds_that_are_no_bounds_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout_is_threshold = .*expected a number"):
        weight_bounds(spec)


def test_a_band_upside_down_is_refused() -> None:
    with pytest.raises(ConfigError, match="swap them"):
        weight_bounds("2_0.5")


def test_rejection_thresholds_are_read_one_for_all_or_one_each() -> None:
    assert rejection_rules("token_k2, seq_max_k3,token_k2", 0.3) == (
        RejectionRule("token_k2", -math.inf, 0.3),
        RejectionRule("seq_max_k3", -math.inf, 0.3),
    )
    assert rejection_rules("token_k1,seq_sum_k1", "4,0.5_3") == (
        RejectionRule("token_k1", math.log(0.25), math.log(4.0)),
        RejectionRule("seq_sum_k1", math.log(0.5), math.log(3.0)),
    )


@pytest.mark.parametrize(
    ("options", "thresholds", "message"),
    [
        ("token_k4", "1", "rollout_rs = 'token_k4': expected one or more of token_k1"),
        ("seq_max_k1", "1", "rollout_rs = 'seq_max_k1'"),
        (" , ", "1", "rollout_rs = ' , '"),
        ("token_k2", None, "rollout_rs_threshold = None: expected one threshold"),
        ("token_k2", "1,2", "one for each of token_k2"),
        ("token_k2", "0.1_2", "token_k2 has an upper bound only"),
        ("token_k1", "much", "for token_k1 a ratio"),
        ("token_k3", "-1", "for token_k3 one upper bound, all > 0"),
        ("token_k1", "0.5", "token_k1 would reject everything, as its lower bound 2 is above 0.5"),
        ("seq_sum_k1", "2_0.5", "would reject everything"),
    ],
)
def test_rejection_rules_that_cannot_be_read_are_refused(
    options: str, thresholds: str | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rejection_rules(options, thresholds)
    assert message in str(caught.value)


def test_settings_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="rollout_rs_threshold = None"):
        RolloutCorrectionSettings(rollout_rs="token_k1")


def test_the_loss_alone_corrects_in_bypass_mode() -> None:
    settings = RolloutCorrectionSettings(
        rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.2, loss_type="reinforce"
    )
    logprobs = OLD.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=OLD,
        advantages=torch.ones(6),
        row_index=ROWS,
        num_rows=3,
        rollout_logprobs=BEHAVIOR,
    )
    found = bypass_mode_objective(
        inputs,
        GlobalCounts(tokens=6, rows=3),
        PolicyLossSettings(correction=settings),
    )
    found.loss.backward()
    expected = -(OLD - BEHAVIOR).exp().clamp(max=2.0) / 6
    expected[5] = 0.0  # 1 / 2 is above 0.2: rejected
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, expected)
    assert found.statistics == corrected(settings).statistics
