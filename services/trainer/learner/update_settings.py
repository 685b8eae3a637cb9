"""The part of the run configuration that the policy update needs, checked."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.algorithm.advantages.registry import advantage_estimator
from sluice.algorithm.losses.registry import policy_loss
from sluice.algorithm.packing import plan_minibatches
from sluice.config.actor_rollout_ref import ActorConfig
from sluice.config.run import RunConfig
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What one update does; `actor` as configured, the rest taken from other sections."""

    actor: ActorConfig
    adv_estimator: str
    norm_adv_by_std: bool
    temperature: float
    importance_level: str | None
    importance_threshold: float
    loss_scale_factor: float
    max_prompt_tokens: int
    max_response_tokens: int


def update_settings(config: RunConfig) -> UpdateSettings:
    """Read and check the settings.

    Raises:
        ConfigError: a loss or estimator is unknown, the batch does not divide into
            mini-batches, or the size of micro-batches is not given.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    advantage_estimator(algorithm.adv_estimator)
    policy_loss(actor.policy_loss.loss_mode)
    plan_minibatches(config.data.train_batch_size, actor.ppo_mini_batch_size)
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set; give the rows of a "
            "micro-batch, or set use_dynamic_bsz=true to cut by ppo_max_token_len_per_gpu"
        )
    correction = algorithm.rollout_correction
    return UpdateSettings(
        actor=actor,
        adv_estimator=algorithm.adv_estimator,
        norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo,
        temperature=config.actor_rollout_ref.rollout.temperature,
        importance_level=correction.rollout_is,
        importance_threshold=correction.rollout_is_threshold,
        loss_scale_factor=float(actor.loss_scale_factor or config.data.max_response_length),
        max_prompt_tokens=config.data.max_prompt_length,
        max_response_tokens=config.data.max_response_length,
    )
