"""Group-relative advantages (GRPO, DeepSeekMath §4.1.2; Dr. GRPO without the division)."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
)

STD_EPSILON = 1e-6


@torch.no_grad()
def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``A = (R - mean) / (std + 1e-6)`` within the group, on every token of the row.

    The std is unbiased (n - 1); without `settings.norm_by_std` there is no division. A group of
    one keeps its raw reward (mean 0, std 1), as in verl; a group of equal rewards gets exactly 0.
    Needs `group_index`.

    With `turn_rewards` R is the return from the token's turn on, and mean and std are those of the
    group's whole returns. They must not be taken by the turn's index: the policy decides how many
    turns there are, so that such a baseline depends on what it did, and rewards or punishes it for
    another turn.
    """
    return _on_tokens(inputs, settings, estimator="grpo")


@torch.no_grad()
def grpo_vectorized(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Return the same as `grpo`, under verl's other name.

    verl always divides by the std under this name; here the setting holds for both names.
    Needs `group_index`.
    """
    return _on_tokens(inputs, settings, estimator="grpo_vectorized")


def _on_tokens(
    inputs: AdvantageInputs, settings: AdvantageSettings, *, estimator: str
) -> Advantages:
    groups = Groups.of(inputs, estimator=estimator)
    rewards = inputs.row_rewards()
    scores = group_relative(rewards, groups, norm_by_std=settings.norm_by_std)
    advantages = inputs.on_tokens(scores)
    if inputs.turn_rewards is not None:
        scale = torch.ones_like(rewards)
        if settings.norm_by_std:
            std = groups.std(rewards)
            scale = torch.where(std > 0, 1.0 / (std + STD_EPSILON), 0.0)
        advantages -= _earned_before(inputs.turn_rewards) * inputs.on_tokens(scale)
    return Advantages(advantages, advantages)


def _earned_before(turn_rewards: torch.Tensor) -> torch.Tensor:
    """Return the rewards of the turns before each token's, [rows, width]."""
    return turn_rewards.cumsum(-1) - turn_rewards


def group_relative(rewards: torch.Tensor, groups: Groups, *, norm_by_std: bool) -> torch.Tensor:
    """Return GRPO's number for each row, [rows], of the rewards [rows]."""
    scores = centred_or_raw(rewards, groups)
    return scores / (groups.std(rewards) + STD_EPSILON) if norm_by_std else scores


def centred_or_raw(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``R - mean of the group``, and R itself in a group of one; float [rows]."""
    return torch.where(groups.row_sizes == 1, rewards, groups.centred(rewards))
