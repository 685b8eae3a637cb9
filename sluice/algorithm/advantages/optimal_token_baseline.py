"""The optimal token baseline: one variance-minimising baseline for each position of a group.

With G_t the reward to go and ``w_t = 1 - 2 pi_t + sum(pi^2)``, the squared norm of the score
function in logits, path energy is ``W_t = w_1 + ... + w_t`` and the baseline at t the mean of G_t
over the group weighted by W_t (verl's optimal_token_baseline).
"""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.groups import Groups
from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings

WEIGHT_EPSILON = 1e-8


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
    """W_t, float [rows, width]: sum over the masked positions up to and including t."""
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
    """Positions of a group's single longest row beyond its second longest; bool [rows, width]."""
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[torch.argsort(groups.of_row[order], stable=True)]
    several = groups.sizes > 1
    first = (groups.sizes.cumsum(0) - groups.sizes)[several]
    longest, second = order[first], order[first + 1]
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
