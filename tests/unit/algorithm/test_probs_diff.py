"""Sums behind rollout_probs_diff."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sluice.algorithm.rollout_correction.statistics import ProbsDiffSums


def token_logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(200, generator=generator)
    return old, old + 0.05 * torch.randn(200, generator=generator)


def test_metrics_equal_a_direct_computation() -> None:
    old, behavior = token_logprobs()
    found = ProbsDiffSums.of_tokens(old, behavior).metrics()
    p, q = old.double().exp().numpy(), behavior.double().exp().numpy()
    diff, ratio = np.abs(p - q), p / q
    gap = (old.double() - behavior.double()).abs().numpy()
    # From a histogram, so it is rounded up.
    percentile = found.pop("training/rollout_logprobs_diff_p999")
    assert 1.0 <= percentile / np.quantile(gap, 0.999, method="inverted_cdf") <= 1.2
    assert found == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": diff.max(),
            "training/rollout_probs_diff_mean": diff.mean(),
            "training/rollout_probs_diff_std": diff.std(ddof=1),
            "training/rollout_logprobs_diff_mean": gap.mean(),
            "training/rollout_k3_kl": (ratio - 1.0 - np.log(ratio)).mean(),
            "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        },
        rel=1e-9,
    )


def test_parts_merge_into_the_whole_over_the_wire() -> None:
    old, behavior = token_logprobs()
    parts = [
        ProbsDiffSums.of_tokens(old[cut], behavior[cut])
        for cut in (slice(0), slice(3), slice(3, None))
    ]
    merged = ProbsDiffSums()
    for part in parts:
        merged = merged.merge(ProbsDiffSums.from_vector(part.to_vector()))
    whole = ProbsDiffSums.of_tokens(old, behavior)
    assert merged.metrics() == pytest.approx(whole.metrics(), rel=1e-9)


def test_no_tokens_are_not_valid() -> None:
    empty = torch.zeros(0)
    found = ProbsDiffSums.of_tokens(empty, empty).metrics()
    assert found == {"training/rollout_probs_diff_valid": 0.0}


def test_undefined_metrics_are_left_out() -> None:
    found = ProbsDiffSums.of_tokens(torch.tensor([-1.0]), torch.tensor([-1.0])).metrics()
    assert found["training/rollout_probs_diff_max"] == found["training/rollout_k3_kl"] == 0.0
    assert "training/rollout_probs_diff_std" not in found
    assert "training/rollout_actor_probs_pearson_corr" not in found
