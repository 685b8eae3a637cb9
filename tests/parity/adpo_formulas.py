"""ADPO by plain loops in float64 over one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from sluice.algorithm.losses.settings import AdpoSettings

Row = Sequence[float]


def clip(x: float, bound: float) -> float:
    return max(-bound, min(bound, x)) if bound > 0 else x


def log_sum_exp(values: Row) -> float:
    top = max(values)
    return top + log(sum(exp(v - top) for v in values))


def softmax(values: Row) -> list[float]:
    return [exp(v - log_sum_exp(values)) for v in values]


def sequence_logprob(tokens: Row, *, normalised: bool) -> float:
    return sum(tokens) / (len(tokens) if normalised else 1) if tokens else 0.0


def anchored(new: Row, old: Row, s: AdpoSettings) -> list[float]:
    """Scores u of one prompt's rows from their sequence logprobs."""
    return [
        clip(clip(n - o, s.clip_log_ratio) / s.tau, s.clip_anchored_score)
        for n, o in zip(new, old, strict=True)
    ]


def plackett_luce(u: Row, advantages: Row, s: AdpoSettings) -> float:
    order = sorted(range(len(u)), key=lambda i: -advantages[i])
    positions = range(len(u) - 1)[: s.top_k or None]
    total = 0.0
    for k in positions:
        left = [u[i] for i in order[k:]]
        z = log_sum_exp(left)
        loss = (1 - s.label_smoothing) * (z - left[0])
        loss += s.label_smoothing * (z - sum(left) / len(left))
        total += loss + 1 - exp(-min(loss, 20.0))
    return total / len(positions)


def prompt_loss(u: Row, advantages: Row, s: AdpoSettings) -> tuple[float, float]:
    """Loss of one prompt without regulariser, and its log-partition."""
    if s.variant == "plackett_luce":
        return plackett_luce(u, advantages, s), log_sum_exp(u)
    q = softmax([a / s.beta_reward for a in advantages])
    center = sum(qi * ui for qi, ui in zip(q, u, strict=True)) if s.center else 0.0
    u = [ui - center for ui in u]
    log_z = log_sum_exp(u)
    loss = log_z - sum(qi * ui for qi, ui in zip(q, u, strict=True))
    return loss * (s.grad_scale_factor if s.variant == "scaled" else 1.0), log_z


def batch_loss(
    prompts: Sequence[tuple[Sequence[Row], Sequence[Row], Row]], s: AdpoSettings
) -> float:
    """Mean over prompts of (new logprobs by row, old ones by row, advantages by row)."""
    losses, partitions = [], []
    for new_rows, old_rows, advantages in prompts:
        new = [sequence_logprob(row, normalised=s.length_normalised) for row in new_rows]
        old = [sequence_logprob(row, normalised=s.length_normalised) for row in old_rows]
        loss, log_z = prompt_loss(anchored(new, old, s), advantages, s)
        losses.append(loss)
        partitions.append(log_z)
    regulariser = s.logit_reg_coef * (sum(partitions) / len(partitions)) ** 2
    return sum(losses) / len(losses) + regulariser
