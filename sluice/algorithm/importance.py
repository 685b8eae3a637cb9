"""Truncated importance weights against the policy that really drew the tokens (rollout_is, TIS).

The ratio of the trainer's old policy to the behaviour policy corrects for engine numerics and for
staleness; truncation at a threshold bounds the variance (Ionides 2008; verl's rollout correction).
"""

from __future__ import annotations

import torch

from sluice.errors import ConfigError

LEVELS = ("token", "sequence")
MAX_LOG_WEIGHT = 20.0


def truncated_importance_weights(
    old_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    row_index: torch.Tensor,
    num_rows: int,
    *,
    level: str,
    threshold: float,
) -> torch.Tensor:
    """Weights to multiply the per-token loss with.

    ``token``: ``min(exp(old - behavior), threshold)`` for each token. ``sequence``: the same of
    the difference summed over the row, one weight for all its tokens. Exponents are kept within
    +-20. Weights are not normalised over the batch.

    Args:
        old_logprobs: float [tokens], the trainer's policy before the train batch.
        behavior_logprobs: float [tokens], of the distribution each token was drawn from.
        row_index: int64 [tokens], values in ``0..num_rows - 1``.
        num_rows: rows in this micro-batch.
        level: ``token`` or ``sequence``.
        threshold: largest weight, > 0.

    Returns:
        float32 [tokens], without gradient.

    Raises:
        ConfigError: unknown level or threshold <= 0.
    """
    if level not in LEVELS:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is: unknown value '{level}'; known: "
            f"{', '.join(LEVELS)}, or null for no weights"
        )
    if threshold <= 0.0:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is_threshold must be > 0, got {threshold}"
        )
    log_weights = old_logprobs.detach().float() - behavior_logprobs.detach().float()
    if level == "sequence":
        sums = torch.zeros(num_rows, dtype=torch.float32, device=log_weights.device)
        log_weights = sums.index_add_(0, row_index, log_weights)[row_index]
    weights = log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    return weights.clamp(max=threshold)
