"""Where samples without a gradient may be skipped (`sluice.trainer.skip_zero_advantage`)."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.algorithm.losses.registry import SILENT_AT_ZERO_ADVANTAGE
from sluice.config import derived
from sluice.config.group_needs import MASK_ESTIMATORS, OLD_LOGPROB_ESTIMATORS
from sluice.config.run import RunConfig
from sluice.config.verl_run import ACTOR

KEY = "sluice.trainer.skip_zero_advantage"

_WHITENING = frozenset({"gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators that shift advantages over the batch: where rewards are equal they are not 0."""


def skipping_problems(config: RunConfig) -> Iterator[str]:
    """A sentence with the remedy for each setting by which a skipped sample would be missed."""
    if not config.sluice.trainer.skip_zero_advantage:
        return
    for setting, why, remedy in (*_gradients(config), *_passes(config)):
        yield f"{KEY} = true with {setting}: {why}; set {KEY}=false, or {remedy}"


def _gradients(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Settings, reasons and remedies where a sample without an advantage has a gradient."""
    actor = config.actor_rollout_ref.actor
    has_gradient = "it has a gradient where the advantage is 0 too"
    if actor.entropy_coeff != 0.0:
        yield f"{ACTOR}.entropy_coeff = {actor.entropy_coeff}", has_gradient, "entropy_coeff=0"
    if actor.calculate_entropy:
        yield (
            f"{ACTOR}.calculate_entropy = true",
            "actor/entropy_loss would lack the skipped samples",
            "calculate_entropy=false; actor/entropy is reported all the same",
        )
    if actor.use_kl_loss:
        yield f"{ACTOR}.use_kl_loss = true", has_gradient, "use_kl_loss=false"
    loss = actor.policy_loss.loss_mode
    if loss not in SILENT_AT_ZERO_ADVANTAGE:
        yield (
            f"{ACTOR}.policy_loss.loss_mode = {loss}",
            "that loss reads samples whose advantage is 0 too",
            f"one of {', '.join(sorted(SILENT_AT_ZERO_ADVANTAGE))}",
        )


def _passes(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Settings by which advantages are only known after passes over all samples."""
    algorithm = config.algorithm
    passes = "advantages or weights come of passes over all samples"
    if derived.uses_critic(config):
        yield "a critic", passes, "critic.enable=false"
    if algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward = true", passes, "use_kl_in_reward=false"
    if algorithm.adv_estimator in OLD_LOGPROB_ESTIMATORS:
        estimator = algorithm.adv_estimator
        yield f"algorithm.adv_estimator = {estimator}", passes, "another estimator, such as grpo"
    if algorithm.adv_estimator in _WHITENING:
        yield (
            f"algorithm.adv_estimator = {algorithm.adv_estimator}",
            "it whitens advantages over the batch, so that hardly any is 0",
            "another estimator, such as grpo",
        )
    correction = algorithm.rollout_correction
    rejects = correction.rollout_rs is not None and not derived.is_bypassed(config)
    if rejects and algorithm.adv_estimator in MASK_ESTIMATORS:
        yield (
            f"algorithm.rollout_correction.rollout_rs = {correction.rollout_rs} and "
            f"algorithm.adv_estimator = {algorithm.adv_estimator}",
            passes,
            "another estimator, such as grpo",
        )
    if correction.rollout_is_batch_normalize:
        key = "algorithm.rollout_correction.rollout_is_batch_normalize"
        yield f"{key} = true", passes, "rollout_is_batch_normalize=false"
