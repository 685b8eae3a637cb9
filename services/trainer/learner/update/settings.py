"""The checked part of the run configuration for the policy update."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.learner.batch.train_batch import BatchCut
from services.trainer.learner.update.advantages import AdvantageRules
from sluice.algorithm.advantages.inputs import AdvantageSettings
from sluice.algorithm.advantages.rewards import KlController
from sluice.algorithm.losses.settings import (
    AdaptiveTauSettings,
    AdpoSettings,
    PolicyLossSettings,
)
from sluice.algorithm.packing import plan_minibatches
from sluice.algorithm.registry import GROUP_LOSSES, batch_estimator, policy_objective
from sluice.algorithm.rollout_correction.correction import bypass_corrector
from sluice.algorithm.rollout_correction.plan import (
    CorrectionPlan,
    OldLogprobs,
    RolloutCorrectionSettings,
    correction_plan,
)
from sluice.config.derived import MASK_ESTIMATORS, OLD_LOGPROB_ESTIMATORS
from sluice.config.run import RunConfig
from sluice.config.schema.actor import ActorConfig
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of one update: `actor` as configured, the rest from other sections."""

    actor: ActorConfig
    cut: BatchCut
    advantages: AdvantageRules
    component_keys: tuple[str, ...]
    kl_controller: KlController
    loss: PolicyLossSettings
    plan: CorrectionPlan
    correction: RolloutCorrectionSettings
    critic_warmup: int
    temperature: float
    max_prompt_tokens: int
    max_response_tokens: int
    skip_zero_advantage: bool

    @property
    def old_is_behavior(self) -> bool:
        """Return whether the behavior logprobs serve as old logprobs."""
        return self.actor.use_rollout_log_probs or self.plan.old_logprobs is OldLogprobs.ROLLOUT

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Return whether the estimator reads squared probabilities."""
        return self.advantages.estimator in OLD_LOGPROB_ESTIMATORS

    @property
    def needs_old_logprobs_first(self) -> bool:
        """Return whether all old logprobs must be known before the first loss."""
        return (
            self.needs_sum_pi_squared
            or self.advantages.kl_kind is not None
            or self.correction.rollout_is_batch_normalize
            or self.rejects_before_advantages
        )

    @property
    def rejects_before_advantages(self) -> bool:
        """Return whether the estimator reads which tokens are rejected."""
        return (
            self.correction.rollout_rs is not None
            and self.plan.corrects_old_policy
            and not self.old_is_behavior
            and self.advantages.estimator in MASK_ESTIMATORS
        )

    @property
    def weighs_baselines(self) -> bool:
        """Return whether the estimator reads importance weights and there are any."""
        weighs = self.correction.rollout_is is not None and not self.old_is_behavior
        return self.needs_sum_pi_squared and weighs

    @property
    def needs_reference(self) -> bool:
        """Return whether a term measures the divergence from a reference model."""
        return self.advantages.kl_kind is not None or self.actor.use_kl_loss


def update_settings(config: RunConfig, vocab_size: int) -> UpdateSettings:
    """Read and check the settings.

    Args:
        config: the run.
        vocab_size: the policy's.

    Raises:
        ConfigError: a loss or estimator is unknown or not available here, the batch does not
            divide into mini-batches, or the size of micro-batches is missing.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    batch_estimator(algorithm.adv_estimator)
    plan_minibatches(config.data.train_batch_size, actor.ppo_mini_batch_size)
    correction = _correction(config)
    plan = correction_plan(correction, loss_mode=actor.policy_loss.loss_mode)
    policy_objective(plan.loss_mode)
    weights = algorithm.gdpo_reward_weights
    return UpdateSettings(
        actor=actor,
        cut=_cut(actor, plan.loss_mode),
        advantages=AdvantageRules(
            algorithm.adv_estimator,
            AdvantageSettings(
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                gdpo_reward_weights=None if weights is None else tuple(weights),
                scale_rewards=algorithm.norm_adv_by_std_in_grpo,
            ),
            algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        ),
        component_keys=tuple(algorithm.gdpo_reward_keys or ()),
        kl_controller=KlController(
            type=algorithm.kl_ctrl.type,
            coef=algorithm.kl_ctrl.kl_coef,
            target_kl=algorithm.kl_ctrl.target_kl,
            horizon=algorithm.kl_ctrl.horizon,
        ),
        loss=_loss(config, correction, plan, vocab_size),
        plan=plan,
        correction=correction,
        critic_warmup=config.trainer.critic_warmup,
        temperature=config.actor_rollout_ref.rollout.temperature,
        max_prompt_tokens=config.data.max_prompt_length,
        max_response_tokens=config.data.max_response_length,
        skip_zero_advantage=config.sluice.trainer.skip_zero_advantage,
    )


def _cut(actor: ActorConfig, loss_mode: str) -> BatchCut:
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set; give the rows of a "
            "micro-batch, or set use_dynamic_bsz=true to cut by ppo_max_token_len_per_gpu"
        )
    return BatchCut(
        mini_batch_groups=actor.ppo_mini_batch_size,
        token_budget=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        rows_per_micro=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
        whole_groups=loss_mode in GROUP_LOSSES,
    )


def _correction(config: RunConfig) -> RolloutCorrectionSettings:
    section = config.algorithm.rollout_correction
    return RolloutCorrectionSettings(
        rollout_is=section.rollout_is,
        rollout_is_threshold=section.rollout_is_threshold,
        rollout_is_batch_normalize=section.rollout_is_batch_normalize,
        rollout_rs=section.rollout_rs,
        rollout_rs_threshold=section.rollout_rs_threshold,
        bypass_mode=section.bypass_mode,
        loss_type=section.loss_type,
    )


def _loss(
    config: RunConfig,
    correction: RolloutCorrectionSettings,
    plan: CorrectionPlan,
    vocab_size: int,
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
        bypass_loss=correction.loss_type,
        bypass_corrector=bypass_corrector(correction) if plan.corrects_in_loss else None,
        adpo=_adpo(config, vocab_size),
    )


def _adpo(config: RunConfig, vocab_size: int) -> AdpoSettings:
    constants = config.actor_rollout_ref.actor.policy_loss
    samples = config.algorithm.num_generations or config.actor_rollout_ref.rollout.n
    return AdpoSettings(
        num_generations=max(2, samples) if constants.loss_mode != "adpo" else samples,
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
        adaptive_tau=AdaptiveTauSettings(vocab_size) if constants.use_adaptive_tau else None,
    )
