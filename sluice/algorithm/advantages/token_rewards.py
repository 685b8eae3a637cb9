"""Scores of whole responses as token-level rewards."""

from __future__ import annotations

import torch


def last_token_rewards(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each row's score on its last masked position, 0 elsewhere.

    The score of a row without any goes to its last column: such a row has no tokens to train, but
    still counts in the statistics of its group, as in verl.

    Args:
        scores: float [rows].
        mask: bool [rows, width], width >= 1.

    Returns:
        float [rows, width], in the scores' dtype.
    """
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    from_the_end = mask.flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return rewards.scatter(-1, mask.shape[-1] - 1 - from_the_end, scores.unsqueeze(-1))
