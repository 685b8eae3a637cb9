"""Every policy loss against its formula in float64: values, gradients and metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective
from sluice.algorithm.losses.settings import PolicyLossSettings
from sluice.algorithm.registry import policy_objective
from sluice.algorithm.rollout_correction.settings import RolloutCorrectionSettings
from tests.parity import policy_loss_formulas as formulas
from tests.parity.policy_loss_formulas import Padded, random_batch
from tests.parity.policy_metric_formulas import metrics
from tests.support.padded_inputs import padded_inputs

MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
NAMES = [*formulas.TOKEN_FORMULAS, "gspo", "clip_cov", "kl_cov", "geo_mean"]
FACTOR = 9.0
SPREADS = [0.1, 0.6, 3.0]  # hardly clipped, often clipped, far off policy


def settings_for(mode: str, bypass_loss: str = "ppo_clip") -> PolicyLossSettings:
    return PolicyLossSettings(
        loss_agg_mode=mode,
        loss_scale_factor=FACTOR,
        clip_low=formulas.LOW,
        clip_high=formulas.HIGH,
        clip_c=formulas.C,
        clip_cov_ratio=1.0,
        clip_cov_lb=formulas.COV_LOW,
        clip_cov_ub=formulas.COV_HIGH,
        kl_cov_ratio=formulas.KL_COV_RATIO,
        ppo_kl_coef=formulas.KL_COEF,
        dro_beta=formulas.DRO_BETA,
        tau_pos=formulas.TAU_POS,
        tau_neg=formulas.TAU_NEG,
        correction=RolloutCorrectionSettings(loss_type=bypass_loss),
    )


def tensors(
    batch: Padded, dtype: torch.dtype, *, weighted: bool
) -> tuple[torch.Tensor, LossInputs, GlobalCounts]:
    """Logprobs to differentiate; NaN stands wherever the mask leaves a token out."""

    def tensor(values: formulas.Matrix) -> torch.Tensor:
        return torch.tensor(np.where(batch.mask, values, np.nan), dtype=dtype)

    logprobs = tensor(batch.logprobs).requires_grad_()
    inputs = padded_inputs(
        logprobs,
        tensor(batch.old),
        tensor(batch.advantages),
        torch.tensor(batch.mask),
        rollout_weights=tensor(batch.weights) if weighted else None,
        rollout_logprobs=tensor(batch.old),
    )
    return logprobs, inputs, GlobalCounts(tokens=len(batch.tokens), rows=len(batch.mask))


def found_for(
    name: str, batch: Padded, mode: str, dtype: torch.dtype, *, weighted: bool
) -> tuple[PolicyObjective, torch.Tensor]:
    logprobs, inputs, counts = tensors(batch, dtype, weighted=weighted)
    return policy_objective(name)(inputs, counts, settings_for(mode)), logprobs


def scale(name: str, batch: Padded, mode: str) -> float:
    """The loss without cancellation between tokens, which float32 cannot undo."""
    if name == "geo_mean":
        return 1.0
    loss = np.abs(formulas.token_losses(name, batch, batch.logprobs, batch.logprobs))
    mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else mode
    return formulas.aggregate(loss, batch, mode, FACTOR)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_values_in_float32_equal_the_formula(name: str, mode: str, weighted: bool) -> None:
    for seed, spread in enumerate(SPREADS):
        batch = random_batch(seed, spread)
        found, _ = found_for(name, batch, mode, torch.float32, weighted=weighted)
        expected = formulas.objective(
            name, batch, batch.logprobs, batch.logprobs, mode, weighted=weighted, factor=FACTOR
        )
        assert found.loss.dtype == torch.float32
        tolerance = 1e-5 * max(abs(expected), scale(name, batch, mode))
        assert found.loss.item() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences(name: str, weighted: bool, spread: float) -> None:
    batch = random_batch(11, spread)
    found, logprobs = found_for(name, batch, "token-mean", torch.float64, weighted=weighted)
    found.loss.backward()
    expected = formulas.gradient(name, batch, "token-mean", weighted=weighted, factor=FACTOR)
    assert logprobs.grad is not None
    largest = np.abs(expected).max()
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-6, atol=1e-7 * largest)
    single, in_float32 = found_for(name, batch, "token-mean", torch.float32, weighted=weighted)
    single.loss.backward()
    assert in_float32.grad is not None
    np.testing.assert_allclose(in_float32.grad.numpy(), expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("spread", [*SPREADS, 15.0])
@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_token_means_by_verls_names(name: str, spread: float) -> None:
    batch = random_batch(5, spread)
    found, _ = found_for(name, batch, "token-mean", torch.float64, weighted=True)
    means = {key: metric.mean for key, metric in found.metrics.items()}
    assert means == pytest.approx(metrics(name, batch), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_bypass_takes_the_engines_logprobs_as_the_old_ones(loss: str, mode: str) -> None:
    batch = random_batch(3, 0.6)
    logprobs, inputs, counts = tensors(batch, torch.float64, weighted=True)
    found = policy_objective("bypass_mode")(inputs, counts, settings_for(mode, loss))
    found.loss.backward()
    name = {"ppo_clip": "vanilla", "reinforce": "gpg"}[loss]
    expected = formulas.objective(
        name, batch, batch.logprobs, batch.logprobs, mode, weighted=False, factor=FACTOR
    )
    slope = formulas.gradient(name, batch, mode, weighted=False, factor=FACTOR)
    assert found.loss.item() == pytest.approx(expected, rel=1e-9)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo"])
def test_bounded_log_ratios_stay_finite_however_far_apart(name: str) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([-0.5, -400.0, -0.5, -400.0], requires_grad=True),
        old_logprobs=torch.tensor([-400.0, -0.5, -400.0, -0.5]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        row_index=torch.tensor([0, 1, 2, 3]),
        num_rows=4,
    )
    found = policy_objective(name)(inputs, GlobalCounts(4, 4), settings_for("token-mean"))
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(inputs.logprobs.grad).all()
    assert found.metrics["actor/ppo_kl"].mean == 0.0
