"""What every policy objective returns, and the rule that token losses share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from sluice.algorithm.losses.aggregate import aggregate
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, MetricMean
from sluice.algorithm.losses.settings import PolicyLossSettings


@dataclass(frozen=True, slots=True, eq=False)
class PolicyObjective:
    """This micro-batch's share of the mini-batch's loss (0-d, to differentiate) and metrics."""

    loss: torch.Tensor
    metrics: Mapping[str, MetricMean]


class ObjectiveFunction(Protocol):
    """A policy objective as the registry holds it."""

    def __call__(
        self, inputs: LossInputs, counts: GlobalCounts, settings: PolicyLossSettings
    ) -> PolicyObjective:
        """The share of these tokens in the loss of a mini-batch with these counts."""
        ...


def token_metric(values: torch.Tensor) -> MetricMean:
    """Mean of `values` [N], a number or a condition of each token."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return MetricMean(values.detach().sum(dtype=dtype), values.numel())


def zero_metric(inputs: LossInputs) -> MetricMean:
    """The token mean of a condition that a loss does not have."""
    return MetricMean(torch.zeros((), device=inputs.logprobs.device), inputs.num_tokens)


def token_objective(
    token_loss: torch.Tensor,
    inputs: LossInputs,
    counts: GlobalCounts,
    settings: PolicyLossSettings,
    metrics: Mapping[str, MetricMean],
    *,
    mode: str | None = None,
) -> PolicyObjective:
    """Weigh per-token losses [N] with the importance weights, if any, and aggregate them.

    `mode` overrides ``settings.loss_agg_mode`` for losses that are defined over sequences.
    """
    if inputs.rollout_weights is not None:
        token_loss = token_loss * inputs.rollout_weights
    loss = aggregate_share(token_loss, inputs, counts, settings, mode=mode)
    return PolicyObjective(loss, metrics)


def aggregate_share(
    values: torch.Tensor,
    inputs: LossInputs,
    counts: GlobalCounts,
    settings: PolicyLossSettings,
    *,
    mode: str | None = None,
) -> torch.Tensor:
    """`aggregate` with the settings' mode and the counts' denominators, 0-d."""
    return aggregate(
        values,
        inputs.row_index,
        mode=mode or settings.loss_agg_mode,
        global_tokens=counts.tokens,
        global_rows=counts.rows,
        loss_scale_factor=settings.loss_scale_factor,
        averaged_ranks=counts.averaged_ranks,
    )
