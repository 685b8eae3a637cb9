"""The importance ratio of a token, and PPO's two terms of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within +- this where a loss says so; float32 stays finite."""


def bounded_log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """``logprobs - old_logprobs`` within +-`MAX_LOG_RATIO`, beyond which no gradient flows."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def surrogate_terms(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-A r`` and ``-A clip(r, 1 - low, 1 + high)``; PPO's loss is their maximum.

    Schulman et al. 2017, equation 7, with the decoupled bounds of DAPO §3.1. All tensors have the
    same shape.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return unclipped, clipped
