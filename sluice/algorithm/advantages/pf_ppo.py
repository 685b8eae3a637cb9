"""Resampling of a batch by policy filtration (PF-PPO, Shen & Zhang 2024, arXiv 2409.06957)."""

from __future__ import annotations

import torch

from sluice.errors import ConfigError

METHODS = ("pow", "max_min", "max_random")
WEIGHT_EPSILON = 1e-8


def pf_ppo_weights(
    scores: torch.Tensor, *, reweight_method: str, weight_pow: float = 2.0
) -> torch.Tensor:
    """Return the unnormalised probability of choosing each row.

    ``pow``: ``|R| ** weight_pow``; ``max_min``: 1 for the best and the worst rewards of the batch,
    else 0; ``max_random``: 0.4 for the best rewards, else 0.1. 1e-8 is added to all.

    Args:
        scores: float [rows], reward of each row.
        reweight_method: one of the three.
        weight_pow: exponent of ``pow``.

    Returns:
        float [rows], all > 0.

    Raises:
        ConfigError: unknown method.
    """
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.full_like(scores, 0.1).masked_fill(scores == scores.max(), 0.4)
    else:
        raise ConfigError(
            f"algorithm.pf_ppo.reweight_method: unknown value '{reweight_method}'; known: "
            f"{', '.join(METHODS)}"
        )
    return weights + WEIGHT_EPSILON


def pf_ppo_rows(weights: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Choose as many rows as there are weights, with replacement; int64 [rows].

    Args:
        weights: float [rows], of `pf_ppo_weights`.
        generator: on the weights' device; the choice depends on nothing else.
    """
    return torch.multinomial(weights, weights.numel(), replacement=True, generator=generator)
