"""How SGLang samples tokens for sluice: as the embedded engine does, down to the random numbers.

SGLang's own sampler reports logprobs from before the cut by top-k and top-p, cuts by both at once
instead of one after the other, and heeds seeds only in its deterministic mode.
"""

from __future__ import annotations

import torch

from services.rollout.engines.sampling import SamplingPlan, sample_keys, sample_tokens

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_BITS = 12  # of 64, which a number in [0, 1) does not need
_NO_CUT = 2.0  # above any mass


def _to_signed(value: int) -> int:
    """Return the 64-bit integer with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def stream_seed(seed: int, sample_index: int, prompt_tokens: int) -> int:
    """Return a 64-bit signed integer that gives a sample's random numbers by position alone.

    With it, `uniform_rows` gives the number of response token *t* at the position of the token
    before it, `prompt_tokens` + *t* - 1: the same one as `sampling.uniforms`.
    """
    key = int(sample_keys(seed, [sample_index])[0])
    return _to_signed(key + (2 - prompt_tokens) * _GAMMA)


def _shift_right(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `state` shifted right with zeros from the left, which int64 cannot do."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def uniform_rows(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return numbers in [0, 1 - 2^-52], one a row, as `sampling.uniforms` does.

    Args:
        seeds: [rows] int64, of `stream_seed`.
        positions: [rows] integers, of the newest tokens.
    """
    state = seeds + positions.to(torch.int64) * _to_signed(_GAMMA)
    state = (state ^ _shift_right(state, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _to_signed(0x94D049BB133111EB)
    state = state ^ _shift_right(state, 31)
    return _shift_right(state, _BITS).to(torch.float64) * 2.0**-52


def sample_rows(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    max_candidates: int | None,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token a row. Nothing here waits for the device.

    Args:
        logits: [rows, vocab].
        temperatures: [rows, 1], positive.
        top_ks: [rows] integers; 1 is greedy, the vocabulary's size or more is off.
        top_ps: [rows]; 1 is off.
        max_candidates: at least the largest of `top_ks`; ``None`` if they are all off.
        uniform: [rows] float64, see `uniform_rows`.

    Returns:
        Token ids [rows] int64 and behavior logprobs [rows] float32.
    """
    vocab = logits.shape[1]
    greedy = top_ks == 1
    num_candidates = torch.where(greedy, vocab, top_ks.to(torch.int64)).clamp(max=vocab)
    is_uncut = greedy | (top_ps >= 1)
    mass = torch.where(is_uncut, _NO_CUT, top_ps.to(torch.float64))
    plan = SamplingPlan(
        temperature=temperatures,
        greedy=greedy,
        top_k=num_candidates[:, None],
        top_p=mass[:, None],
        candidates=min(max_candidates or vocab, vocab),
    )
    return sample_tokens(logits, plan, uniform)
