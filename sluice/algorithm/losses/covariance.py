"""How much each token adds to the covariance of log-probability and advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def token_covariances(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """``(A - mean A) (log p - mean log p)`` over the given tokens, float [N], without gradient.

    Cui et al. 2025 (arXiv 2505.22617): tokens where it is large shrink the entropy.
    The means are those of the micro-batch, as in verl.
    """
    logprobs = logprobs.detach()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())
