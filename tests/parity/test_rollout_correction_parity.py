"""Rollout correction against NumPy formulas on padded rows: weights, masks and all metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.algorithm.rollout_correction.correction import (
    RolloutCorrection,
    normalized_weights,
    rollout_correction,
)
from sluice.algorithm.rollout_correction.settings import (
    REJECTION_OPTIONS,
    RolloutCorrectionSettings,
)
from sluice.algorithm.rollout_correction.statistics import metrics_of
from tests.support import rollout_correction_formulas as formulas
from tests.support.rollout_correction_formulas import Floats, Mask, random_logprobs

THRESHOLDS: dict[str, tuple[str, float | None, float]] = {
    # option: as configured, lower and upper bound of the statistic
    "token_k1": ("0.8_1.5", np.log(0.8), np.log(1.5)),
    "token_k2": ("0.1", None, 0.1),
    "token_k3": ("0.05", None, 0.05),
    "seq_sum_k1": ("1.4", np.log(1 / 1.4), np.log(1.4)),
    "seq_sum_k2": ("0.4", None, 0.4),
    "seq_sum_k3": ("0.4", None, 0.4),
    "seq_mean_k1": ("0.9_1.1", np.log(0.9), np.log(1.1)),
    "seq_mean_k2": ("0.07", None, 0.07),
    "seq_mean_k3": ("0.07", None, 0.07),
    "seq_max_k2": ("0.3", None, 0.3),
    "seq_max_k3": ("0.3", None, 0.3),
}


def corrected(
    old: Floats, behavior: Floats, mask: Mask, settings: RolloutCorrectionSettings
) -> RolloutCorrection:
    rows = torch.tensor(np.nonzero(mask)[0])
    policy = torch.tensor(old[mask], dtype=torch.float32)
    return rollout_correction(
        policy, torch.tensor(behavior[mask], dtype=torch.float32), rows, settings
    )


def assert_metrics(found: RolloutCorrection, expected: dict[str, float]) -> None:
    metrics = metrics_of(found.statistics)
    assert metrics.keys() == {f"rollout_corr/{name}" for name in expected}
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "lower", "upper"),
    [(2.0, None, 2.0), (1.1, None, 1.1), ("1.5", None, 1.5), ("0.3_1.6", 0.3, 1.6)],
)
@pytest.mark.parametrize("seed", range(3))
def test_weights_and_their_metrics_equal_the_formula(
    level: str, threshold: float | str, lower: float | None, upper: float, seed: int
) -> None:
    old, behavior, mask = random_logprobs(seed)
    settings = RolloutCorrectionSettings(rollout_is=level, rollout_is_threshold=threshold)
    found = corrected(old, behavior, mask, settings)
    expected = formulas.bounded(formulas.raw_weights(old - behavior, mask, level), lower, upper)
    assert found.weights is not None
    np.testing.assert_allclose(found.weights.numpy(), expected[mask], rtol=1e-5)
    weights = formulas.weight_metrics(old - behavior, mask, level, lower, upper)
    assert_metrics(found, {**weights, **formulas.diagnostics(old, behavior, mask)})
    assert bool(found.kept.all())


def test_every_rejection_option_is_compared() -> None:
    assert set(THRESHOLDS) == set(REJECTION_OPTIONS)


@pytest.mark.parametrize("option", REJECTION_OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rejection_and_its_metrics_equal_the_formula(option: str, seed: int) -> None:
    spec, lower, upper = THRESHOLDS[option]
    old, behavior, mask = random_logprobs(seed)
    settings = RolloutCorrectionSettings(rollout_rs=option, rollout_rs_threshold=spec)
    found = corrected(old, behavior, mask, settings)
    kept, metrics = formulas.rejection(old - behavior, mask, option, lower, upper)
    assert found.kept.tolist() == kept[mask].tolist()
    metrics |= formulas.masked_fractions("rollout_rs", kept, mask)
    assert_metrics(found, {**metrics, **formulas.diagnostics(old, behavior, mask)})
    assert found.weights is None


@pytest.mark.parametrize("option", REJECTION_OPTIONS)
def test_each_option_drops_some_and_keeps_some(option: str) -> None:
    spec, lower, upper = THRESHOLDS[option]
    kept = [
        formulas.rejection(old - behavior, mask, option, lower, upper)[0][mask]
        for old, behavior, mask in map(random_logprobs, range(3))
    ]
    assert 0.0 < np.concatenate(kept).mean() < 1.0, spec


@pytest.mark.parametrize("seed", range(3))
def test_several_options_all_must_pass(seed: int) -> None:
    old, behavior, mask = random_logprobs(seed)
    settings = RolloutCorrectionSettings(
        rollout_rs="token_k1, seq_max_k3", rollout_rs_threshold="0.8_1.5, 0.3"
    )
    found = corrected(old, behavior, mask, settings)
    kept, metrics = np.ones_like(mask), formulas.diagnostics(old, behavior, mask)
    for option in ("token_k1", "seq_max_k3"):
        passed, of_option = formulas.rejection(
            old - behavior, mask, option, *THRESHOLDS[option][1:]
        )
        kept, metrics = kept & passed, {**metrics, **of_option}
    assert found.kept.tolist() == kept[mask].tolist()
    assert_metrics(found, {**metrics, **formulas.masked_fractions("rollout_rs", kept, mask)})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_normalised_weights_have_mean_one_at_their_level(level: str, seed: int) -> None:
    old, behavior, mask = random_logprobs(seed)
    settings = RolloutCorrectionSettings(rollout_is=level, rollout_is_batch_normalize=True)
    found = corrected(old, behavior, mask, settings)
    raw = formulas.bounded(formulas.raw_weights(old - behavior, mask, level), None, 2.0)
    mean = raw[mask].mean() if level == "token" else formulas.row_means(raw, mask).mean()
    assert found.weights is not None
    normalized = normalized_weights(found.weights, found.statistics)
    np.testing.assert_allclose(normalized.numpy(), raw[mask] / mean, rtol=1e-5)
    factor = metrics_of(found.statistics)["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx(mean, rel=1e-5)
