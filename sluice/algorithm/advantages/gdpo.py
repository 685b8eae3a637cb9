"""Reward-decoupled normalisation (GDPO, arXiv 2601.05242): each reward component for itself."""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.grpo import group_relative
from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
    masked_whiten,
    missing_field,
)
from sluice.errors import ConfigError


@torch.no_grad()
def gdpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Whitened ``sum over components of weight * GRPO advantage of the component``.

    Each component is divided by its own std in the group, so none drowns the others; whitening
    counts the batch's masked positions. `rewards` is not read. Needs `group_index` and
    `reward_components`.

    Raises:
        ConfigError: there are no components, or as many weights as components were not given.
        ValueError: the batch has fewer than two masked positions.
    """
    components, weights = inputs.reward_components, settings.gdpo_reward_weights
    if not components:
        raise missing_field("reward_components", estimator="gdpo")
    if weights is None:
        weights = (1.0,) * len(components)
    if len(weights) != len(components):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(components)} "
            f"reward components ({', '.join(components)}); give one weight each"
        )
    groups = Groups.of(inputs, estimator="gdpo")
    scores = torch.zeros_like(inputs.row_rewards())
    for weight, component in zip(weights, components.values(), strict=True):
        scores += weight * group_relative(component.double(), groups, norm_by_std=True)
    advantages = masked_whiten(inputs.on_tokens(scores), inputs.mask) * inputs.mask
    return Advantages(advantages, advantages)


def gdpo_metrics(inputs: AdvantageInputs) -> dict[str, float]:
    """``gdpo/{component}/mean, std, max, min`` over rows; the std is the population's (n)."""
    metrics: dict[str, float] = {}
    for key, component in inputs.reward_components.items():
        values = component.double()
        metrics |= {
            f"gdpo/{key}/mean": float(values.mean()),
            f"gdpo/{key}/std": float(values.std(correction=0)),
            f"gdpo/{key}/max": float(values.max()),
            f"gdpo/{key}/min": float(values.min()),
        }
    return metrics
