"""Read and check the settings of the policy update."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from services.trainer.learner.batch.train_batch import BatchCut
from sluice.algorithm.advantages.inputs import AdvantageSettings
from sluice.algorithm.losses.settings import AdpoSettings, PolicyLossSettings
from sluice.algorithm.registry import GROUP_LOSSES, batch_estimator, policy_objective
from sluice.algorithm.rollout_correction.settings import BYPASS_LOSS_MODE, RolloutCorrectionSettings
from sluice.config.derived import (
    advantage_estimator,
    is_bypassed,
    padding_step,
    rollout_correction,
)
from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorConfig
from sluice.config.sources import source_configs
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The run's configuration, checked, and what the update derives from it.

    With several sources, `sources` maps their names to their estimators and losses. A pass over the
    whole batch is needed if any source needs it.
    """

    config: RunConfig
    cut: BatchCut
    advantages: AdvantageSettings
    loss: PolicyLossSettings
    loss_mode: str
    correction: RolloutCorrectionSettings
    sources: Mapping[str, UpdateSettings] = field(default_factory=dict)

    def for_source(self, source: str) -> UpdateSettings:
        """Return the settings of a source; those of the run if there is only one."""
        return self.sources[source] if source else self

    @property
    def _all_sources(self) -> tuple[UpdateSettings, ...]:
        return tuple(self.sources.values()) or (self,)

    @property
    def actor(self) -> ActorConfig:
        """Return the policy's section."""
        return self.config.actor_rollout_ref.actor

    @property
    def temperature(self) -> float:
        """Return the sampling temperature; logits are divided by it."""
        return self.config.actor_rollout_ref.rollout.temperature

    @property
    def estimator(self) -> str:
        """Return the advantage estimator."""
        return self.config.algorithm.adv_estimator

    @property
    def kl_kind(self) -> str | None:
        """Return the estimate of the KL penalty in the rewards; None without a penalty."""
        algorithm = self.config.algorithm
        return algorithm.kl_penalty if algorithm.use_kl_in_reward else None

    @property
    def old_is_behavior(self) -> bool:
        """Return whether the behavior logprobs serve as old logprobs."""
        is_bypassed = any(settings.loss_mode == BYPASS_LOSS_MODE for settings in self._all_sources)
        return self.actor.use_rollout_log_probs or is_bypassed

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Return whether the estimator reads squared probabilities."""
        needs = (advantage_estimator(settings.config).needs for settings in self._all_sources)
        return any("sum_pi_squared" in inputs for inputs in needs)

    @property
    def needs_old_logprobs_first(self) -> bool:
        """Return whether all old logprobs must be known before the first loss."""
        return (
            self.needs_sum_pi_squared
            or self.kl_kind is not None
            or self.correction.rollout_is_batch_normalize
            or self.rejects_before_advantages
        )

    @property
    def rejects_before_advantages(self) -> bool:
        """Return whether the estimator reads which tokens are rejected."""
        return (
            self.correction.rollout_rs is not None
            and not self.old_is_behavior
            and any(advantage_estimator(part.config).reads_mask for part in self._all_sources)
        )

    @property
    def weighs_baselines(self) -> bool:
        """Return whether the estimator reads importance weights and there are any."""
        weighs = self.correction.rollout_is is not None and not self.old_is_behavior
        return self.needs_sum_pi_squared and weighs

    @property
    def trains_turn_rewards(self) -> bool:
        """Return whether each turn is credited with the rewards of turns from it on."""
        return self.config.sluice.trainer.turn_rewards

    @property
    def replays_routing(self) -> bool:
        """Return whether later passes of a micro-batch choose the experts of its first one."""
        return self.actor.router_replay.mode != "disabled"

    @property
    def needs_reference(self) -> bool:
        """Return whether a term measures the divergence from a reference model."""
        in_losses = any(settings.actor.use_kl_loss for settings in self._all_sources)
        return self.kl_kind is not None or in_losses


def update_settings(config: RunConfig, vocab_size: int) -> UpdateSettings:
    """Read and check the settings.

    Raises:
        ConfigError: a loss or estimator is unknown or not available here, or the size of
            micro-batches is missing.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    batch_estimator(algorithm.adv_estimator)
    correction = rollout_correction(config)
    loss_mode = BYPASS_LOSS_MODE if is_bypassed(config) else actor.policy_loss.loss_mode
    policy_objective(loss_mode)
    weights = algorithm.gdpo_reward_weights
    sources = {
        name: update_settings(source_config, vocab_size)
        for name, source_config in source_configs(config).items()
        if name
    }
    losses = {settings.loss_mode for settings in sources.values()} or {loss_mode}
    return UpdateSettings(
        config=config,
        cut=_cut(actor, losses),
        advantages=AdvantageSettings(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            gdpo_reward_weights=None if weights is None else tuple(weights),
        ),
        loss=_loss(config, correction, vocab_size),
        loss_mode=loss_mode,
        correction=correction,
        sources=sources,
    )


def _cut(actor: ActorConfig, losses: Set[str]) -> BatchCut:
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set; give the rows of a "
            "micro-batch, or set use_dynamic_bsz=true to cut by ppo_max_token_len_per_gpu"
        )
    return BatchCut(
        mini_batch_groups=actor.ppo_mini_batch_size,
        # Per rank, as in verl: ranks that share a sequence take as much more of it.
        token_budget=(
            actor.ppo_max_token_len_per_gpu * actor.fsdp_config.ulysses_sequence_parallel_size
            if actor.use_dynamic_bsz
            else None
        ),
        rows_per_micro=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
        whole_groups=not losses.isdisjoint(GROUP_LOSSES),
        pad_to=padding_step(actor.fsdp_config),
    )


def _loss(
    config: RunConfig, correction: RolloutCorrectionSettings, vocab_size: int
) -> PolicyLossSettings:
    actor = config.actor_rollout_ref.actor
    constants = actor.policy_loss
    return PolicyLossSettings(
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=float(actor.loss_scale_factor or config.data.max_response_length),
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        clip_cov_ratio=constants.clip_cov_ratio,
        clip_cov_lb=constants.clip_cov_lb,
        clip_cov_ub=constants.clip_cov_ub,
        kl_cov_ratio=constants.kl_cov_ratio,
        ppo_kl_coef=constants.ppo_kl_coef,
        dro_beta=constants.dro_beta,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        correction=correction,
        adpo=_adpo(config, vocab_size),
    )


def _adpo(config: RunConfig, vocab_size: int) -> AdpoSettings:
    constants = config.actor_rollout_ref.actor.policy_loss
    return AdpoSettings(
        num_generations=config.algorithm.num_generations or config.actor_rollout_ref.rollout.n,
        variant=constants.loss_variant,
        tau=constants.tau,
        beta_reward=constants.beta_reward,
        length_normalised=constants.use_length_normalization,
        clip_log_ratio=constants.clip_log_ratio,
        clip_anchored_score=constants.clip_anchored_score,
        center=constants.use_q_center,
        grad_scale_factor=constants.grad_scale_factor,
        logit_reg_coef=constants.logit_reg_coef,
        top_k=constants.top_k,
        label_smoothing=constants.label_smoothing,
        adaptive_tau_vocab=vocab_size if constants.use_adaptive_tau else None,
    )
