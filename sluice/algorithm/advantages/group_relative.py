"""Estimators that compare a response's score with its group's scores: one number per response, on
all its tokens.
"""

from __future__ import annotations

import torch

from sluice.algorithm.advantages.inputs import (
    AdvantageInputs,
    Advantages,
    AdvantageSettings,
    Groups,
    masked_whiten,
)
from sluice.errors import ConfigError

STD_EPSILON = 1e-6
ADPO_STD_FLOOR = 1e-5


@torch.no_grad()
def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """``A = (R - mean) / (std + 1e-6)`` within the group, on every token of the row.

    GRPO (DeepSeekMath §4.1.2); Dr. GRPO without the division. The std is unbiased (n - 1); without
    `settings.norm_by_std` there is no division. A group of one keeps its raw reward (mean 0,
    std 1), as in verl; a group of equal rewards gets exactly 0. Needs `group_index`.

    With `turn_rewards` R is the return from the token's turn on, and mean and std are those of the
    group's whole returns; a group with equal returns, up to float32 rounding, gets exactly 0. Do
    not compute them per turn index: the policy decides how many turns there are, so such a baseline
    would depend on its actions and credit the wrong turn.
    """
    groups = Groups.of(inputs)
    rewards = inputs.row_rewards()
    scores = group_relative(rewards, groups, norm_by_std=settings.norm_by_std)
    advantages = inputs.spread_over_tokens(scores)
    if inputs.turn_rewards is not None:
        std = groups.std(rewards)
        scale = 1.0 / (std + STD_EPSILON) if settings.norm_by_std else torch.ones_like(rewards)
        earned_before = inputs.turn_rewards.cumsum(-1) - inputs.turn_rewards
        advantages -= earned_before * inputs.spread_over_tokens(scale)
        # Equal sums of different float32 rewards differ by their rounding.
        sizes = inputs.rewards.abs().sum(-1, dtype=torch.float64)
        size = (groups.sum(sizes.square()) / groups.row_sizes).sqrt()
        differs = std > torch.finfo(torch.float32).eps * size
        counts = (differs | (groups.row_sizes == 1)).unsqueeze(-1)
        advantages = torch.where(counts, advantages, 0.0)  # removes infinite values
    return Advantages(advantages, advantages)


@torch.no_grad()
def grpo_vectorized(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Return the same as `grpo`, under verl's other name.

    verl always divides by the std under this name; here the setting holds for both names.
    Needs `group_index`.
    """
    return grpo(inputs, settings)


def group_relative(rewards: torch.Tensor, groups: Groups, *, norm_by_std: bool) -> torch.Tensor:
    """Return GRPO's advantage of each row, [rows], from the rewards [rows]."""
    scores = centred_or_raw(rewards, groups)
    return scores / (groups.std(rewards) + STD_EPSILON) if norm_by_std else scores


def centred_or_raw(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return ``R - mean of the group``, or R in a group of one; float [rows]."""
    return torch.where(groups.row_sizes == 1, rewards, groups.subtract_means(rewards))


def _scores_on_tokens(inputs: AdvantageInputs, scores: torch.Tensor) -> Advantages:
    """Return the scores [rows] on their rows' tokens, as both advantages and returns."""
    advantages = inputs.spread_over_tokens(scores)
    return Advantages(advantages, advantages)


@torch.no_grad()
def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Return ``(best - second best) / (std + 1e-6)`` on the best row of each group, 0 on all
    others.

    For pass@k (Tang et al. 2025, arXiv 2503.19595: leave-one-out maximum). The std is the group's,
    unbiased; without `settings.norm_by_std` there is no division. If two rows share the best
    reward, all advantages are 0. Needs `group_index`.

    Raises:
        ValueError: a group has one row only.
    """
    groups = Groups.of(inputs)
    if int(groups.sizes.min()) < 2:
        raise ValueError(
            "algorithm.adv_estimator: 'grpo_passk' needs groups of at least 2 rows, got one of "
            "size 1; set actor_rollout_ref.rollout.n to 2 or more"
        )
    rewards = inputs.row_rewards()
    best, second = groups.two_largest(rewards)
    scores = torch.zeros_like(rewards)
    scores[best] = rewards[best] - rewards[second]
    if settings.norm_by_std:
        scores = scores / (groups.std(rewards) + STD_EPSILON)
    return _scores_on_tokens(inputs, scores)


@torch.no_grad()
def gdpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Whitened ``sum over components of weight * GRPO advantage of the component``.

    Reward-decoupled normalisation (GDPO, arXiv 2601.05242): each component is divided by its own
    std in the group, so none drowns the others; whitening counts the batch's masked positions.
    `rewards` is not read. Needs `group_index` and `reward_components`.

    Raises:
        ConfigError: there are no components, or another number of weights.
        ValueError: the batch has fewer than two masked positions.
    """
    components = inputs.reward_components
    weights = settings.gdpo_reward_weights or (1.0,) * len(components)
    if not components:
        raise ConfigError("algorithm.gdpo_reward_keys names no reward component; gdpo needs one")
    if len(weights) != len(components):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(components)} "
            f"reward components ({', '.join(components)}); give one weight each"
        )
    groups = Groups.of(inputs)
    scores = torch.zeros_like(inputs.row_rewards())
    for weight, component in zip(weights, components.values(), strict=True):
        scores += weight * group_relative(component.double(), groups, norm_by_std=True)
    return _whiten_scores(inputs, scores)


def _whiten_scores(inputs: AdvantageInputs, scores: torch.Tensor) -> Advantages:
    advantages = masked_whiten(inputs.spread_over_tokens(scores), inputs.mask) * inputs.mask
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


@torch.no_grad()
def reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, _settings: AdvantageSettings
) -> Advantages:
    """``R - mean of the group`` on every token, then whitened over the batch's tokens.

    The variant of REINFORCE++ (Hu 2025, arXiv 2501.03262) with a baseline. A group of one keeps R.
    Long rows weigh more in the whitening, since it counts tokens. Needs `group_index`.

    Raises:
        ValueError: the batch has fewer than two masked positions.
    """
    groups = Groups.of(inputs)
    return _whiten_scores(inputs, centred_or_raw(inputs.row_rewards(), groups))


@torch.no_grad()
def rloo(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``R - mean of the group's other rewards``; a group of one keeps R. Needs `group_index`.

    REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, §3.3).
    """
    groups = Groups.of(inputs)
    return _scores_on_tokens(inputs, _leave_one_out(inputs.row_rewards(), groups))


@torch.no_grad()
def rloo_vectorized(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """`rloo`, but a group of one gets 0, as in verl. Needs `group_index`."""
    groups = Groups.of(inputs)
    scores = _leave_one_out(inputs.row_rewards(), groups)
    return _scores_on_tokens(inputs, torch.where(groups.row_sizes == 1, 0.0, scores))


def _leave_one_out(rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
    # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
    n = groups.row_sizes
    return centred_or_raw(rewards, groups) * n / (n - 1).clamp(min=1)


@torch.no_grad()
def opo(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``R - sum(length R) / sum(length)`` over the group; a group of one keeps R.

    The optimal reward baseline (OPO, Hao et al. 2025, arXiv 2505.23585). Lengths count masked
    positions; the baseline of a group without any is 0. Needs `group_index`.
    """
    groups = Groups.of(inputs)
    rewards, lengths = inputs.row_rewards(), inputs.mask.sum(-1)
    baselines = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return _scores_on_tokens(inputs, rewards - torch.where(groups.row_sizes == 1, 0.0, baselines))


@torch.no_grad()
def gpg(inputs: AdvantageInputs, _settings: AdvantageSettings) -> Advantages:
    """``alpha (R - mean of the group)`` with alpha = rows / max(rows with R != 0, 1).

    Group policy gradient (GPG, Chu et al. 2025, arXiv 2504.02546). The mean of a group of one is
    0. Needs `group_index`.
    """
    groups = Groups.of(inputs)
    rewards = inputs.row_rewards()
    alpha = rewards.numel() / max(int(torch.count_nonzero(rewards)), 1)
    return _scores_on_tokens(inputs, alpha * centred_or_raw(rewards, groups))


@torch.no_grad()
def adpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Z-score of the reward in its group: ``(R - mean) / max(std, 1e-5)``, std unbiased.

    Of anchored direct preference optimisation (ADPO, arXiv 2510.18913). R sums the rewards on the
    mask only. Without `settings.norm_by_std` there is no division. A group of one gets 0: a
    ranking of one candidate prefers nothing. Returns are R on the mask. The ADPO loss reads one
    number a row, here on all of its tokens. Needs `group_index`.
    """
    groups = Groups.of(inputs)
    masked = torch.where(inputs.mask, inputs.rewards, torch.zeros_like(inputs.rewards))
    rewards = masked.sum(-1, dtype=torch.float64)
    scores = groups.subtract_means(rewards)
    if settings.norm_by_std:
        scores = scores / groups.std(rewards).clamp(min=ADPO_STD_FLOOR)
    return Advantages(inputs.spread_over_tokens(scores), inputs.spread_over_tokens(rewards))
