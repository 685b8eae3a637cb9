"""Sample one token per row from counter-based random numbers, with its logprob.

A row's distribution is softmax(logits / temperature), cut to its `top_k` most probable tokens, then
to the smallest set of those that holds `top_p` of their mass (Holtzman et al., "The curious case of
neural text degeneration", 2020), and renormalised. Tokens tied with the last one kept are kept, so
the set does not depend on a sort's order. Sampling inverts the cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from sluice.types import PromptLogprobs

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_UNIT = 2.0**-52
_BLOCK = 128
"""Tokens of a block, the unit that is sampled first; about the root of a vocabulary of 16,384."""
_BELOW_ONE = 1.0 - 2.0**-52
"""The largest uniform."""


# SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014): the number at
# a counter follows from the key alone, so a sample's tokens do not depend on what else runs.
def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample_keys(seed: int, sample_indexes: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return one stream key per sample. Shape [samples]; any integers are accepted, modulo 2^64."""
    root = _mix(np.array([seed & _MASK], dtype=np.uint64) + _GAMMA)
    index = np.array([i & _MASK for i in sample_indexes], dtype=np.uint64)
    return _mix(root + (index + np.uint64(1)) * _GAMMA)


def uniforms(
    keys: npt.NDArray[np.uint64], token_indexes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1 - 2^-52]; the arguments' shapes are broadcast.

    52 bits, not 53: a total mass times the largest of them is then strictly below that mass in
    float64, which the inverse-CDF sampler relies on.
    """
    counter = token_indexes.astype(np.uint64) + np.uint64(1)
    bits: npt.NDArray[np.uint64] = _mix(keys + counter * _GAMMA) >> np.uint64(12)
    return bits.astype(np.float64) * _UNIT


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


def plan_sampling(
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    vocab_size: int,
    device: torch.device,
) -> SamplingPlan:
    """Plan a batch from its rows' parameters, each of shape [rows]."""
    greedy = temperature == 0
    # Greedy rows take the argmax; 1 only keeps their division defined.
    scale = np.where(greedy, np.float32(1), temperature)
    # The most probable token survives every cut, so greedy rows need none.
    cut_k = ~greedy & (top_k > 0) & (top_k < vocab_size)
    cut_p = ~greedy & (top_p < 1)
    plan_k = plan_p = None
    candidates = 0
    if cut_k.any() or cut_p.any():
        # With top_p alone any token may be in the nucleus: then all of them have to be ranked.
        rank = np.where(cut_k, top_k, vocab_size)
        candidates = vocab_size if (cut_p & ~cut_k).any() else int(rank[cut_k].max())
        plan_k = torch.from_numpy(rank)[:, None].to(device)
        # 2 is more than any mass: rows without top_p keep all that top_k has left.
        plan_p = torch.from_numpy(np.where(cut_p, top_p, 2.0))[:, None].to(device)
    return SamplingPlan(
        temperature=torch.from_numpy(scale)[:, None].to(device) if (scale != 1).any() else None,
        greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
        top_k=plan_k,
        top_p=plan_p,
        candidates=candidates,
    )


def _cut(probs: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Set to zero what `top_k` and `top_p` exclude; [rows, vocab] float32."""
    assert plan.top_k is not None
    assert plan.top_p is not None
    ranked = torch.topk(probs, plan.candidates, dim=-1).values
    # The probability of a row's k-th token is the floor: tokens tied with it stay.
    last_place = plan.top_k.clamp(max=plan.candidates) - 1
    floor = ranked.gather(1, last_place)
    # A row without top_k keeps everything, even beyond the candidates that other rows look at.
    floor = torch.where(plan.top_k < probs.shape[1], floor, 0.0)
    kept_probs = torch.where(probs >= floor, probs, 0.0)
    # The nucleus is cut from what top_k has left, and by the mass of that.
    mass = kept_probs.sum(-1, keepdim=True, dtype=torch.float64)
    ranked = torch.where(ranked >= floor, ranked, 0.0)
    # A token belongs to the nucleus if the mass before it does not reach top_p yet.
    mass_before = torch.cumsum(ranked, -1, dtype=torch.float64) - ranked
    nucleus = (mass_before < plan.top_p * mass).sum(-1, keepdim=True)
    floor = torch.where(plan.top_p < 1, ranked.gather(1, nucleus - 1), floor)
    return torch.where(probs >= floor, kept_probs, 0.0)


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row in proportion to `probs`: first a block of tokens, then one of them.

    A running sum over the whole vocabulary takes as long as a layer of a small model. So it is
    taken over the blocks' sums, and over the tokens of the sampled block. Running sums are float64:
    in float32 most of a large vocabulary's tail would vanish, and its tokens would never come.
    Sums of blocks are float32, so shares are right to some 1e-7.

    Args:
        probs: [rows, vocab] float32, not negative; a row's sum is positive.
        uniform: [rows, 1] float64 in [0, 1 - 2^-52].

    Returns:
        Token ids [rows, 1] int64 and the rows' sums [rows, 1] float64.
    """
    num_padding = -probs.shape[1] % _BLOCK
    blocks = (F.pad(probs, (0, num_padding)) if num_padding else probs).unflatten(1, (-1, _BLOCK))
    cumulative = torch.cumsum(blocks.sum(-1), -1, dtype=torch.float64)
    point = uniform * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, point, right=True)
    end = cumulative.gather(1, block)
    start = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    # Rounding may bring the quotient to 1, which is beyond the block's last token.
    share = ((point - start) / (end - start)).clamp(max=_BELOW_ONE)
    sampled = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    cumulative_in_block = torch.cumsum(sampled, -1, dtype=torch.float64)
    token = torch.searchsorted(cumulative_in_block, share * cumulative_in_block[:, -1:], right=True)
    return block * _BLOCK + token, cumulative[:, -1:]


def sample_tokens(
    logits: torch.Tensor, plan: SamplingPlan, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row.

    Args:
        logits: [rows, vocab], any float dtype.
        plan: of the same rows.
        uniform: [rows] float64 in [0, 1 - 2^-52].

    Returns:
        Token ids [rows] int64 and behavior logprobs [rows] float32.
    """
    logits = logits.float()
    if plan.temperature is not None:
        logits = logits / plan.temperature
    probs = F.softmax(logits, dim=-1)
    if plan.top_k is not None:
        probs = _cut(probs, plan)
    tokens, total = _invert(probs, uniform[:, None])
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    # Of the distribution that sampled: after temperature and cut, renormalised by its total.
    chosen = probs.gather(1, tokens)
    logprobs = torch.log(chosen / total)
    return tokens[:, 0], logprobs[:, 0].float()


def prompt_logprobs(logits: torch.Tensor, following: npt.NDArray[np.int64]) -> PromptLogprobs:
    """Return the logprobs of given tokens, and of the most probable ones.

    Args:
        logits: [tokens, vocab], any float dtype.
        following: [tokens], the token that follows each place.
    """
    targets = torch.from_numpy(following)[:, None].to(logits.device)
    chunks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    # In parts, since float32 logits may take as much memory as the model.
    for part, target_ids in zip(logits.split(_BLOCK), targets.split(_BLOCK), strict=True):
        exact = part.float()
        total = exact.logsumexp(-1)
        top, top_ids = exact.max(-1)
        chunks.append((exact.gather(1, target_ids)[:, 0] - total, top_ids, top - total))
    logprobs, top_ids, top_logprobs = (
        torch.cat(column).cpu().numpy() for column in zip(*chunks, strict=True)
    )
    return PromptLogprobs(logprobs, top_ids.astype(np.uint32), top_logprobs)
