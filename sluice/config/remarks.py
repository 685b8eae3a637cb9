"""What a configuration leads to that its user may not expect; no errors."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.run import RunConfig
from sluice.config.verl_run import ACTOR


def remarks(config: RunConfig) -> list[str]:
    """Sentences without a full stop, for the console at the start."""
    return [*_divergence(config), *_adpo(config)]


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
