"""What a configuration leads to that its user may not expect; no errors."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.derived import is_bypassed, is_corrected
from sluice.config.run import RunConfig
from sluice.config.strategy_rules import strategy_remark
from sluice.config.verl_run import ACTOR, ROLLOUT

_KEEPS_LONE_REWARDS = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "gdpo",
        "rloo",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
)


def remarks(config: RunConfig) -> list[str]:
    """Sentences without a full stop, for the console at the start."""
    strategy = strategy_remark(config)
    found = [
        *_divergence(config),
        *_adpo(config),
        *_correction(config),
        *_lone_responses(config),
    ]
    return [*found, strategy] if strategy else found


def _divergence(config: RunConfig) -> Iterator[str]:
    in_reward = config.algorithm.use_kl_in_reward
    in_loss = config.actor_rollout_ref.actor.use_kl_loss
    if in_reward and in_loss:
        yield (
            "the divergence from the reference model counts twice, in the reward "
            f"(algorithm.use_kl_in_reward) and in the loss ({ACTOR}.use_kl_loss)"
        )
    if in_reward or in_loss:
        yield (
            "a reference model is kept: every trainer rank holds its weights in host memory, and "
            "on its device during one more forward pass of every row"
        )


def _adpo(config: RunConfig) -> Iterator[str]:
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "adpo":
        yield (
            f"algorithm.adv_estimator and {ACTOR}.policy_loss.loss_mode are both adpo: each sets "
            "the other where that is left out"
        )


def _correction(config: RunConfig) -> Iterator[str]:
    """Told because it may have been chosen (`conversions`)."""
    staleness, correction = (
        config.sluice.asynchrony.max_staleness,
        config.algorithm.rollout_correction,
    )
    if not staleness or not is_corrected(config):
        return
    means = f"the behaviour logprobs in the place of the old ones ({ACTOR}.use_rollout_log_probs)"
    if is_bypassed(config):
        means = "the ratio to the behaviour policy (bypass mode)"
    if correction.rollout_is is not None:
        means = (
            f"truncated importance weights (algorithm.rollout_correction.rollout_is = "
            f"{correction.rollout_is}, threshold {correction.rollout_is_threshold})"
        )
    yield f"samples may be {staleness} versions old; {means} correct for it"


def _lone_responses(config: RunConfig) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.n == 1 and estimator in _KEEPS_LONE_REWARDS:
        yield (
            f"{ROLLOUT}.n = 1 with algorithm.adv_estimator = {estimator}: a group of one has "
            "nothing to be compared with, so advantages are made of the raw rewards, as in verl"
        )
