"""The part of the run configuration that the critic needs; what is null follows the actor."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from services.trainer.learner.mini_batch import BatchCut
from sluice.config.actor import FsdpConfig
from sluice.config.critic import CriticConfig
from sluice.config.derived import uses_critic
from sluice.config.model import ModelConfig
from sluice.config.optim import OptimConfig
from sluice.config.run import RunConfig

__all__ = ["CriticSettings", "critic_settings", "uses_critic"]


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """Model, optimizer, and how a train batch is cut and its losses are aggregated."""

    model: ModelConfig
    precision: FsdpConfig
    optim: OptimConfig
    cut: BatchCut
    epochs: int
    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: float
    max_tokens: int


def critic_settings(config: RunConfig) -> CriticSettings:
    """Read them."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    scale = critic.loss_scale_factor or actor.loss_scale_factor or config.data.max_response_length
    return CriticSettings(
        model=_model(config),
        precision=critic.fsdp,
        optim=critic.optim,
        cut=_cut(critic, config),
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode or actor.loss_agg_mode,
        loss_scale_factor=float(scale),
        max_tokens=config.data.max_prompt_length + config.data.max_response_length,
    )


def _model(config: RunConfig) -> ModelConfig:
    policy, own = config.actor_rollout_ref.model, config.critic.model
    return structs.replace(
        policy,
        path=own.path or policy.path,
        enable_gradient_checkpointing=own.enable_gradient_checkpointing,
    )


def _cut(critic: CriticConfig, config: RunConfig) -> BatchCut:
    actor = config.actor_rollout_ref.actor
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    shuffles = actor.shuffle if critic.shuffle is None else critic.shuffle
    return BatchCut(
        mini_batch_groups=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        token_budget=critic.ppo_max_token_len_per_gpu if by_tokens else None,
        rows_per_micro=(
            None
            if by_tokens
            else critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
        ),
        shuffle_seed=critic.data_loader_seed if shuffles else None,
    )
