"""What the configured algorithm needs of every group, for whoever makes groups and who trains."""

from __future__ import annotations

from sluice.algorithm.losses.registry import GROUP_LOSSES
from sluice.config.run import RunConfig

GREEDY_BASELINE_ESTIMATORS = frozenset({"remax"})
"""Advantage estimators whose baseline is the reward of a greedy response to the prompt."""

OLD_LOGPROB_ESTIMATORS = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Advantage estimators that read the old policy's logprobs and squared probabilities."""

MASK_ESTIMATORS = OLD_LOGPROB_ESTIMATORS | {
    "gae",
    "gdpo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
}
"""Advantage estimators by which the tokens that count change the advantage of other tokens.

They read which tokens rollout correction rejects; the others give a row one number, whatever its
mask.
"""


def needs_greedy_baseline(config: RunConfig) -> bool:
    """Whether every group carries the reward of a greedy response."""
    return config.algorithm.adv_estimator in GREEDY_BASELINE_ESTIMATORS


def needs_whole_groups(config: RunConfig) -> bool:
    """Whether no sample of a group may be missing: the loss compares all ``rollout.n`` of them.

    Bypass mode has a loss of its own, which compares none.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    return loss_mode in GROUP_LOSSES and not config.algorithm.rollout_correction.bypass_mode
