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
    scores = group_relative(inputs.row_rewards(), groups, norm_by_std=settings.norm_by_std)
    advantages = inputs.on_tokens(scores)
    return Advantages(advantages, advantages)


def group_relative(rewards: torch.Tensor, groups: Groups, *, norm_by_std: bool) -> torch.Tensor:
    """Return GRPO's number for each row, [rows], of the rewards [rows]."""
    scores = centred_or_raw(rewards, groups)
    return scores / (groups.std(rewards) + STD_EPSILON) if norm_by_std else scores


def centred_or_raw(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``R - mean of the group``, and R itself in a group of one; float [rows]."""
    return torch.where(groups.row_sizes == 1, rewards, groups.centred(rewards))
