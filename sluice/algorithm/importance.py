"""Importance weights against the policy that really drew the tokens (rollout_is, TIS).

The ratio of the trainer's old policy to the behaviour policy corrects for engine numerics and for
staleness; bounds keep the variance small. `rollout_correction` also rejects tokens and reports.
"""

from __future__ import annotations

import torch

from sluice.algorithm.rollout_correction.thresholds import weight_bounds
from sluice.algorithm.rollout_correction.token_rows import TokenRows
from sluice.algorithm.rollout_correction.weights import bounded_weights, raw_weights


def truncated_importance_weights(
    old_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    row_index: torch.Tensor,
    num_rows: int,
    *,
    level: str,
    threshold: float | str,
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
        threshold: largest weight, > 0; or ``"lower_upper"``, weights outside of which become 0.

    Returns:
        float32 [tokens], without gradient.

    Raises:
        ConfigError: unknown level or threshold <= 0.
    """
    bounds = weight_bounds(threshold)
    log_ratio = old_logprobs.detach().float() - behavior_logprobs.detach().float()
    lengths = torch.bincount(row_index, minlength=num_rows)
    return bounded_weights(
        raw_weights(log_ratio, TokenRows(row_index, lengths), level=level), bounds
    )
