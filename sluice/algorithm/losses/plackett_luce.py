"""Likelihood of a ranking under scores (ListMLE), smoothed as in verlm's ADPO."""

from __future__ import annotations

import torch

MAX_POSITION_LOSS = 20.0


def plackett_luce_loss(
    scores: torch.Tensor,
    advantages: torch.Tensor,
    *,
    top_k: int = 0,
    label_smoothing: float = 0.0,
    poly_epsilon: float = 0.0,
) -> torch.Tensor:
    """Mean over positions of how unlikely the next best row was among those left.

    With rows by falling advantage, position k loses ``e_k = -u_k + logsumexp(u_k, u_k+1, ...)``
    (Plackett-Luce; Xia et al. 2008). Smoothing replaces it by ``(1 - s) e_k + s (logsumexp -
    mean)`` of the same suffix, and the poly term adds ``epsilon (1 - exp(-min(e_k, 20)))``.

    Args:
        scores: float [P, G], carries the gradient.
        advantages: float [P, G]; equal ones keep the order of their columns.
        top_k: leading positions counted; 0 or more than G - 2 for all G - 1.
        label_smoothing: s, in 0..1.
        poly_epsilon: epsilon.

    Returns:
        float [P].
    """
    order = advantages.argsort(dim=-1, descending=True, stable=True)
    backward = scores.gather(-1, order).flip(-1)
    sizes = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    # The last position has one row left to choose from, and loses nothing.
    log_partition = backward.logcumsumexp(-1).flip(-1)[:, :-1]
    uniform = log_partition - (backward.cumsum(-1) / sizes).flip(-1)[:, :-1]
    loss = log_partition - backward.flip(-1)[:, :-1]
    loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    loss = loss + poly_epsilon * (1.0 - (-loss.clamp(max=MAX_POSITION_LOSS)).exp())
    return (loss[:, :top_k] if top_k > 0 else loss).mean(dim=-1)
