"""Which estimators, losses, critics and corrections go together."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.algorithm.rollout_correction.plan import BYPASS_LOSS_MODE, RolloutCorrectionSettings
from sluice.config import derived
from sluice.config.run import RunConfig
from sluice.config.skipping_rules import skipping_problems
from sluice.config.verl_run import ACTOR
from sluice.errors import ConfigError

_CORRECTION = "algorithm.rollout_correction"


def algorithm_problems(config: RunConfig) -> list[str]:
    """A sentence with the remedy for every pair of settings that cannot work together."""
    checks = (_adpo, _bypass, _critic, _gdpo, _dro, _thresholds, skipping_problems)
    return [text for check in checks for text in check(config)]


def _adpo(config: RunConfig) -> Iterator[str]:
    """The loss takes the estimator's advantages for the logits of its target (ADPO, eq. 6)."""
    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if (estimator == "adpo") != (loss == "adpo"):
        yield (
            f"algorithm.adv_estimator = {estimator} with {ACTOR}.policy_loss.loss_mode = {loss}: "
            "adpo's estimator and its loss belong together; set both to adpo or neither"
        )


def _bypass(config: RunConfig) -> Iterator[str]:
    """Bypass mode has a loss of its own, a clipped ratio to the engine's policy or REINFORCE."""
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    replaces = config.algorithm.rollout_correction.bypass_mode
    if replaces and loss not in ("vanilla", BYPASS_LOSS_MODE):
        yield (
            f"{_CORRECTION}.bypass_mode = true puts a loss of its own in the place of "
            f"{ACTOR}.policy_loss.loss_mode = {loss}; set bypass_mode=false (and {ACTOR}."
            "use_rollout_log_probs=true to compare with the engine's policy all the same), or "
            "loss_mode=vanilla"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    critic, actor = config.critic, config.actor_rollout_ref.actor
    if config.algorithm.adv_estimator == "gae" and critic.enable is False:
        yield (
            "algorithm.adv_estimator = gae with critic.enable = false: its advantages are "
            "differences of the critic's values; set critic.enable=null, or another estimator"
        )
    if not derived.uses_critic(config):
        return
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    rows = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    if not by_tokens and rows is None:
        yield (
            "critic.ppo_micro_batch_size_per_gpu = null while critic.use_dynamic_bsz is false: "
            "set it to the rows of a micro-batch, or critic.use_dynamic_bsz=true"
        )
    prompts, mini = config.data.train_batch_size, critic.ppo_mini_batch_size
    if mini is not None and prompts % mini:
        yield (
            f"data.train_batch_size = {prompts} is no multiple of critic.ppo_mini_batch_size = "
            f"{mini} (both count prompts); set it to null to follow the actor"
        )


def _gdpo(config: RunConfig) -> Iterator[str]:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if config.algorithm.adv_estimator == "gdpo" and not keys:
        yield (
            "algorithm.gdpo_reward_keys = null with algorithm.adv_estimator = gdpo: name the "
            "values of the scorer that are rewards"
        )
    if keys and weights is not None and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(keys)} "
            "algorithm.gdpo_reward_keys; give one weight for each, or null"
        )


def _dro(config: RunConfig) -> Iterator[str]:
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield (
            f"{ACTOR}.policy_loss.dro_beta = null with loss_mode = dro: set the weight of its "
            "quadratic term"
        )


def _thresholds(config: RunConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    try:
        RolloutCorrectionSettings(
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
            rollout_rs=correction.rollout_rs,
            rollout_rs_threshold=correction.rollout_rs_threshold,
        )
    except ConfigError as error:
        yield str(error)
    if correction.rollout_rs is None and correction.rollout_rs_threshold is not None:
        yield (
            f"{_CORRECTION}.rollout_rs_threshold = {correction.rollout_rs_threshold} has no effect "
            "while rollout_rs is null; name the rejections in rollout_rs, or leave it out"
        )
