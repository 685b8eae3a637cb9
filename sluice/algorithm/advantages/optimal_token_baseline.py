"""The optimal token baseline, for plain responses and for responses with tool observations
between turns.
"""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
)

WEIGHT_EPSILON = 1e-8

_NAME = "tir_optimal_token_baseline"


@torch.no_grad()
def optimal_token_baseline(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``A_t = G_t - B_t``, ``B_t = sum(G_t W_t) / (sum(W_t) + 1e-8)`` over the group's rows at t.

    Importance weights, where given, enter w squared. B is 0 in a group of one, and in the part of
    the group's single longest row beyond the second longest, where there is nothing to compare
    with; lengths count masked positions. Returns are G. Needs `group_index`, `old_logprobs` and
    `sum_pi_squared`.
    """
    name = "optimal_token_baseline"
    groups, energy = Groups.of(inputs, estimator=name), path_energy(inputs, estimator=name)
    returns = inputs.reward_to_go()
    baselines = energy_baselines(returns, energy * inputs.mask, groups)
    return Advantages(_without_tail(inputs, baselines, groups, returns), returns)


def path_energy(inputs: AdvantageInputs, *, estimator: str) -> torch.Tensor:
    """Return W_t, float [rows, width]: sum over the masked positions up to and including t."""
    probability = inputs.required("old_logprobs", estimator=estimator).exp()
    sum_pi_squared = inputs.required("sum_pi_squared", estimator=estimator)
    energy = 1.0 - 2.0 * probability + sum_pi_squared
    if inputs.importance_weights is not None:
        energy = energy * inputs.importance_weights.square()
    return torch.where(inputs.mask, energy, torch.zeros_like(energy)).cumsum(-1)


def energy_baselines(returns: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Weighted mean of the returns over each group at each position; 0 in a group of one."""
    found = groups.sum(returns * weights) / (groups.sum(weights) + WEIGHT_EPSILON)
    return torch.where((groups.row_sizes == 1).unsqueeze(-1), 0.0, found)


def lone_tail(lengths: torch.Tensor, groups: Groups, width: int) -> torch.Tensor:
    """Mark a group's single longest row beyond its second longest; bool [rows, width]."""
    longest, second = groups.two_largest(lengths)
    tail = torch.zeros((lengths.numel(), width), dtype=torch.bool, device=lengths.device)
    positions = torch.arange(width, device=lengths.device)
    beyond = positions >= lengths[second].unsqueeze(-1)
    tail[longest] = beyond & (lengths[longest] > lengths[second]).unsqueeze(-1)
    return tail


def _without_tail(
    inputs: AdvantageInputs, baselines: torch.Tensor, groups: Groups, returns: torch.Tensor
) -> torch.Tensor:
    tail = lone_tail(inputs.mask.sum(-1), groups, returns.shape[1])
    return (returns - torch.where(tail, 0.0, baselines)) * inputs.mask


@torch.no_grad()
def tir_optimal_token_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Compute `optimal_token_baseline` on rows without their unmasked positions.

    The k-th token that the policy chose is compared with the k-th of the group's other rows,
    wherever observations stand. Needs `group_index`, `old_logprobs` and `sum_pi_squared`.
    """
    # A stable sort by "not chosen" moves the chosen positions to the front, in their order.
    order = torch.argsort((~inputs.mask).to(torch.int8), dim=-1, stable=True)
    found = optimal_token_baseline(_reordered(inputs, order), settings)
    advantages = torch.zeros_like(inputs.rewards).scatter(-1, order, found.advantages)
    return Advantages(advantages, inputs.reward_to_go())


def _reordered(inputs: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    weights = inputs.importance_weights
    return AdvantageInputs(
        rewards=inputs.rewards.gather(-1, order),
        mask=inputs.mask.gather(-1, order),
        group_index=inputs.required("group_index", estimator=_NAME),
        old_logprobs=inputs.required("old_logprobs", estimator=_NAME).gather(-1, order),
        sum_pi_squared=inputs.required("sum_pi_squared", estimator=_NAME).gather(-1, order),
        importance_weights=None if weights is None else weights.gather(-1, order),
    )
