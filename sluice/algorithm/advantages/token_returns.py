"""Estimators that sum the rewards from each token on, minus a baseline from a critic, a greedy
response or the group's other responses.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sluice.algorithm.advantages.inputs import (
    TABLES,
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
    masked_whiten,
)

WEIGHT_EPSILON = 1e-8


@torch.no_grad()
def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``.

    Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16). A
    position outside the mask (an observation of a tool) is skipped: V and A of the next masked
    position are carried past it. Returns are ``A + V`` with A before whitening; the advantages are
    whitened over the whole batch, positions outside the mask are not set to 0. Needs `values`.

    Raises:
        ValueError: the batch has fewer than two masked positions.
    """
    values = inputs.required("values")
    raw = torch.empty_like(inputs.rewards)
    next_value = torch.zeros_like(inputs.rewards[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(raw.shape[1])):
        delta = inputs.rewards[:, t] + settings.gamma * next_value - values[:, t]
        advantage = delta + settings.gamma * settings.lam * next_advantage
        next_value = torch.where(inputs.mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(inputs.mask[:, t], advantage, next_advantage)
        raw[:, t] = next_advantage
    return Advantages(masked_whiten(raw, inputs.mask), raw + values)


@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``G_t = r_t + gamma G_{t+1}``; advantages are G whitened over the batch, 0 off the mask.

    REINFORCE++ (Hu 2025, arXiv 2501.03262). A position outside the mask gets return 0, and the
    return of the next masked position is carried past it, so a response continues after a tool's
    observation. No groups.

    Raises:
        ValueError: the batch has fewer than two masked positions.
    """
    returns = torch.zeros_like(inputs.rewards)
    carried = torch.zeros_like(inputs.rewards[:, 0])
    for t in reversed(range(returns.shape[1])):
        chosen = inputs.mask[:, t]
        carried = torch.where(chosen, inputs.rewards[:, t] + settings.gamma * carried, carried)
        returns[:, t] = carried * chosen
    return Advantages(masked_whiten(returns, inputs.mask) * inputs.mask, returns)


@torch.no_grad()
def remax(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``A_t = G_t - b`` on the mask and G_t off it; returns are G, the rewards to go.

    ReMax (Li et al. 2024, arXiv 2310.10505): b is the greedy response's reward. Needs `baselines`.
    """
    baselines = inputs.required("baselines")
    returns = inputs.reward_to_go()
    return Advantages(returns - inputs.spread_over_tokens(baselines), returns)


@torch.no_grad()
def optimal_token_baseline(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``A_t = G_t - B_t``, ``B_t = sum(G_t W_t) / (sum(W_t) + 1e-8)`` over the group's rows at t.

    Importance weights, where given, enter w squared. B is 0 in a group of one, and in the part of
    the group's single longest row beyond the second longest, where there is nothing to compare
    with; lengths count masked positions. Returns are G. Needs `group_index`, `old_logprobs` and
    `sum_pi_squared`.
    """
    groups, energy = Groups.of(inputs), path_energy(inputs)
    returns = inputs.reward_to_go()
    baselines = energy_baselines(returns, energy * inputs.mask, groups)
    return Advantages(_without_tail(inputs, baselines, groups, returns), returns)


def path_energy(inputs: AdvantageInputs) -> torch.Tensor:
    """Return W_t, float [rows, width]: sum over the masked positions up to and including t."""
    probability = inputs.required("old_logprobs").exp()
    sum_pi_squared = inputs.required("sum_pi_squared")
    energy = 1.0 - 2.0 * probability + sum_pi_squared
    if inputs.importance_weights is not None:
        energy = energy * inputs.importance_weights.square()
    return torch.where(inputs.mask, energy, torch.zeros_like(energy)).cumsum(-1)


def energy_baselines(returns: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Weighted mean of the returns over each group at each position; 0 in a group of one."""
    baselines = groups.sum(returns * weights) / (groups.sum(weights) + WEIGHT_EPSILON)
    return torch.where((groups.row_sizes == 1).unsqueeze(-1), 0.0, baselines)


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
    reordered = optimal_token_baseline(_reorder(inputs, order), settings)
    advantages = torch.zeros_like(inputs.rewards).scatter(-1, order, reordered.advantages)
    return Advantages(advantages, inputs.reward_to_go())


def _reorder(inputs: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    tables = {name: getattr(inputs, name) for name in ("rewards", *TABLES)}
    moved = {name: table.gather(-1, order) for name, table in tables.items() if table is not None}
    return replace(inputs, **moved)
