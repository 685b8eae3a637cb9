"""Settings of the policy losses, with verl's defaults and checked bounds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.algorithm.losses.inputs import Corrector

ADPO_VARIANTS = ("softmax", "scaled", "plackett_luce")
ADPO_UNSUPPORTED = ("decoupled", "alphapo", "gopo", "wgopo", "opo", "cltr", "direct")
BYPASS_LOSSES = ("ppo_clip", "reinforce")


@dataclass(frozen=True, slots=True)
class AdaptiveTauSettings:
    """ADPO's temperature that follows entropy and reward (the defaults are verlm's).

    `vocab_size` normalises entropies by ``ln vocab_size``.
    """

    vocab_size: int
    alpha: float = 0.2
    beta: float = 0.5
    minimum: float = 0.2
    maximum: float = 1.5


@dataclass(frozen=True, slots=True)
class AdpoSettings:
    """Anchored Direct Preference Optimization (arXiv 2510.18913); bounds of 0 are off.

    Args:
        num_generations: G, rows of each prompt.
        variant: ``softmax`` (the paper's cross entropy), ``scaled`` or ``plackett_luce``.
        tau: temperature of the anchored scores (paper 0.8; verlm's code falls back to 0.5).
        beta_reward: temperature of the target (paper 0.5; verlm's code falls back to 0.3).
        length_normalised: a row's log-probability is the mean over its tokens, else the sum.
        clip_log_ratio: bound of ``l - l_old``.
        clip_anchored_score: bound of ``(l - l_old) / tau``.
        anchor_coef: A in ``u = (l - A l_old - B q - C) / tau``; 0 drops the anchor.
        target_coef: B.
        constant_coef: C.
        center: shift scores by their mean under the target; changes only `logit_reg_coef`'s term.
        grad_scale_factor: factor of ``scaled``.
        logit_reg_coef: weight of the squared mean log-partition.
        top_k: positions that ``plackett_luce`` ranks; 0 for all.
        label_smoothing: share of the uniform target in ``plackett_luce``.
        poly_epsilon: weight of its term ``1 - p``.
        adaptive_tau: replaces `tau` by a varying one.

    Raises:
        ConfigError: a value is outside its range or the variant is not supported.
    """

    num_generations: int = 8
    variant: str = "softmax"
    tau: float = 0.8
    beta_reward: float = 0.5
    length_normalised: bool = True
    clip_log_ratio: float = 5.0
    clip_anchored_score: float = 10.0
    anchor_coef: float = 1.0
    target_coef: float = 0.0
    constant_coef: float = 0.0
    center: bool = True
    grad_scale_factor: float = 20.0
    logit_reg_coef: float = 0.0
    top_k: int = 3
    label_smoothing: float = 0.1
    poly_epsilon: float = 1.0
    adaptive_tau: AdaptiveTauSettings | None = None

    def __post_init__(self) -> None:
        key, known = "actor_rollout_ref.actor.policy_loss.loss_variant", ", ".join(ADPO_VARIANTS)
        if self.variant in ADPO_UNSUPPORTED:
            raise ConfigError(
                f"{key}={self.variant} is not supported: only verlm has it and no paper states "
                f"its formula; choose one of {known}"
            )
        if self.variant not in ADPO_VARIANTS:
            raise ConfigError(f"{key}: unknown value '{self.variant}'; known: {known}")
        for name in ("tau", "beta_reward"):
            if getattr(self, name) <= 0.0:
                raise ConfigError(
                    f"actor_rollout_ref.actor.policy_loss.{name} must be > 0, got "
                    f"{getattr(self, name)}"
                )
        if self.num_generations < 2:
            raise ConfigError(
                f"algorithm.num_generations={self.num_generations}: ADPO compares the responses "
                "of a prompt; give 2 or more, and the same as actor_rollout_ref.rollout.n"
            )


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """Everything any policy loss reads; each takes what it names.

    Args:
        loss_agg_mode: a `LossAggregation`; some losses override it.
        loss_scale_factor: divisor of ``seq-mean-token-sum-norm``.
        clip_low: ratios count down to ``1 - clip_low``.
        clip_high: ratios count up to ``1 + clip_high``.
        clip_c: dual-clip constant, and the largest ratio of the DPPO losses; > 1.
        clip_cov_ratio: share of tokens that ``clip_cov`` cuts off.
        clip_cov_lb: it chooses among covariances above this
        clip_cov_ub: and below this.
        kl_cov_ratio: share of tokens that ``kl_cov`` penalises.
        ppo_kl_coef: weight of that penalty.
        dro_beta: weight of ``dro``'s squared log-ratio, > 0 where it is used.
        tau_pos: SAPO's temperature where the advantage is positive
        tau_neg: and elsewhere.
        bypass_loss: what ``bypass_mode`` optimises, ``ppo_clip`` or ``reinforce``.
        bypass_corrector: its importance weights and rejections, none by default.
        adpo: of ``adpo``.

    Raises:
        ConfigError: a value is outside its range.
    """

    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    bypass_loss: str = "ppo_clip"
    bypass_corrector: Corrector | None = None
    adpo: AdpoSettings = field(default_factory=AdpoSettings)

    def __post_init__(self) -> None:
        check_clip_bounds(self.clip_low, self.clip_high, self.clip_c)
        for key, value in (
            ("policy_loss.clip_cov_ratio", self.clip_cov_ratio),
            ("policy_loss.kl_cov_ratio", self.kl_cov_ratio),
            ("tau_pos", self.tau_pos),
            ("tau_neg", self.tau_neg),
        ):
            if value <= 0.0:
                raise ConfigError(f"actor_rollout_ref.actor.{key} must be > 0, got {value}")
        if self.bypass_loss not in BYPASS_LOSSES:
            raise ConfigError(
                f"algorithm.rollout_correction.loss_type: unknown value '{self.bypass_loss}'; "
                f"known: {', '.join(BYPASS_LOSSES)}"
            )


def check_clip_bounds(clip_low: float, clip_high: float, clip_c: float) -> None:
    """Refuse bounds that no ratio can meet.

    Raises:
        ConfigError: ``clip_c <= 1`` or a negative clip bound.
    """
    if clip_c <= 1.0 or clip_low < 0.0 or clip_high < 0.0:
        raise ConfigError(
            "actor_rollout_ref.actor.clip_ratio_c must be > 1 and clip_ratio_low, "
            f"clip_ratio_high >= 0; got {clip_c}, {clip_low}, {clip_high}"
        )
