"""Draws one token per row and tells the logprob of the distribution it was drawn from.

A row's distribution is softmax(logits / temperature), cut to its `top_k` most probable tokens, then
to the smallest set of those that holds `top_p` of their mass (Holtzman et al., "The curious case of
neural text degeneration", 2020), and renormalised. Tokens tied with the last one kept are kept, so
the set does not depend on a sort's order. Drawing is by inversion of the cumulative distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

__all__ = ["UNRESTRICTED", "SamplingPlan", "draw", "plan_sampling"]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """What to do with a batch's logits; ``None`` skips the step for the whole batch.

    Attributes:
        temperature: [rows, 1] float32, positive (1 for greedy rows).
        greedy: [rows] bool.
        top_k: [rows, 1] int64, the vocabulary's size where off.
        top_p: [rows, 1] float64.
        candidates: how many of the most probable tokens the cut has to look at.
    """

    temperature: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    candidates: int = 0


UNRESTRICTED = SamplingPlan()
"""Every row at temperature 1 without a cut."""


def plan_sampling(
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    vocab_size: int,
    device: torch.device,
) -> SamplingPlan:
    """Plans a batch from its rows' parameters, each of shape [rows]."""
    greedy = temperature == 0
    scale = np.where(greedy, np.float32(1), temperature)
    cut_k = ~greedy & (top_k > 0) & (top_k < vocab_size)
    cut_p = ~greedy & (top_p < 1)
    plan_k = plan_p = None
    candidates = 0
    if cut_k.any() or cut_p.any():
        rank = np.where(cut_k, top_k, vocab_size)
        candidates = vocab_size if (cut_p & ~cut_k).any() else int(rank[cut_k].max())
        plan_k = torch.from_numpy(rank)[:, None].to(device)
        plan_p = torch.from_numpy(np.where(cut_p, top_p, 2.0))[:, None].to(device)
    return SamplingPlan(
        temperature=torch.from_numpy(scale)[:, None].to(device) if (scale != 1).any() else None,
        greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
        top_k=plan_k,
        top_p=plan_p,
        candidates=candidates,
    )


def _cut(probs: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Zeroes what `top_k` and `top_p` exclude. [rows, vocab] float32."""
    assert plan.top_k is not None
    assert plan.top_p is not None
    ranked = torch.topk(probs, plan.candidates, dim=-1).values
    last = plan.top_k.clamp(max=plan.candidates) - 1
    floor = ranked.gather(1, last)
    # A row without top_k keeps everything, also beyond the candidates other rows look at.
    floor = torch.where(plan.top_k < probs.shape[1], floor, 0.0)
    kept = torch.where(probs >= floor, probs, 0.0)
    mass = kept.sum(-1, keepdim=True, dtype=torch.float64)
    ranked = torch.where(ranked >= floor, ranked, 0.0)
    before = torch.cumsum(ranked, -1, dtype=torch.float64) - ranked
    nucleus = (before < plan.top_p * mass).sum(-1, keepdim=True)
    floor = torch.where(plan.top_p < 1, ranked.gather(1, nucleus - 1), floor)
    return torch.where(probs >= floor, kept, 0.0)


def draw(
    logits: torch.Tensor, plan: SamplingPlan, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token per row.

    Args:
        logits: [rows, vocab], any float dtype.
        plan: of the same rows.
        uniform: [rows] float64 in [0, 1 - 2^-52].

    Returns:
        Token ids [rows] int64 and behaviour logprobs [rows] float32.
    """
    logits = logits.float()
    if plan.temperature is not None:
        logits = logits / plan.temperature
    probs = F.softmax(logits, dim=-1)
    if plan.top_k is not None:
        probs = _cut(probs, plan)
    # float64: in float32 the tail of a large vocabulary would vanish in the sum and never be drawn.
    cumulative = torch.cumsum(probs, -1, dtype=torch.float64)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    chosen = probs.gather(1, tokens)
    logprobs = torch.log(chosen / total)
    return tokens[:, 0], logprobs[:, 0].float()
