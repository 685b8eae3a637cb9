"""The critic's squared error with clipped values (PPO as in OpenAI baselines' ppo2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ValueLoss:
    """A micro-batch's share of the critic's loss, and what its metrics are made of.

    Args:
        loss: 0-d, to differentiate; summed over micro-batches and ranks it is ``critic/vf_loss``.
        metric_sums: detached 0-d sums over tokens of ``critic/vf_clipfrac`` (tokens whose clipped
            error exceeds the other) and ``critic/vpred_mean`` (predicted values). Add them and
            `num_tokens` over micro-batches and ranks, then divide.
        num_tokens: tokens in this micro-batch.
    """

    loss: torch.Tensor
    metric_sums: Mapping[str, torch.Tensor]
    num_tokens: int


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    *,
    cliprange_value: float,
    aggregate: Callable[[torch.Tensor], torch.Tensor],
) -> ValueLoss:
    """Return half of the aggregate of ``max((v - R)^2, (clip(v, v_old +- cliprange) - R)^2)``.

    Args:
        values: float [tokens], of the critic being updated; carries the gradient.
        old_values: float [tokens], of the critic before the train batch.
        returns: float [tokens], R.
        cliprange_value: how far a value may move before its error is held, > 0.
        aggregate: turns per-token losses [tokens] into this micro-batch's scalar, for example
            `losses.objective.aggregate` with all but its first argument bound.
    """
    near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    free_error, held_error = (values - returns).square(), (near - returns).square()
    loss = 0.5 * aggregate(torch.maximum(free_error, held_error))
    with torch.no_grad():
        metric_sums = {
            "critic/vf_clipfrac": (held_error > free_error).sum().float(),
            "critic/vpred_mean": values.detach().float().sum(),
        }
    return ValueLoss(loss=loss, metric_sums=metric_sums, num_tokens=values.numel())
