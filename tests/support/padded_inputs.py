"""Loss inputs from the padded layout."""

from __future__ import annotations

import torch

from sluice.algorithm.losses.inputs import LossInputs


def padded_inputs(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    rollout_weights: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    row_groups: tuple[int, ...] | None = None,
) -> LossInputs:
    """Return inputs without what `mask` (bool) leaves out, which may be NaN.

    All tensors are [rows, width]; `advantages` may be [rows], one value a row.
    """
    row_advantages = None
    if advantages.dim() == 1:
        row_advantages, advantages = advantages, advantages[:, None].expand(mask.shape)
    return LossInputs(
        logprobs[mask],
        old_logprobs[mask],
        advantages[mask],
        mask.nonzero()[:, 0],
        mask.shape[0],
        rollout_weights=None if rollout_weights is None else rollout_weights[mask],
        rollout_logprobs=None if rollout_logprobs is None else rollout_logprobs[mask],
        row_groups=row_groups,
        row_advantages=row_advantages,
    )
