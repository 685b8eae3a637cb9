"""Settings of the policy losses, with verl's defaults. The configuration's schema and rules check
their values. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.algorithm.rollout_correction.settings import RolloutCorrectionSettings


@dataclass(frozen=True, slots=True)
class AdpoSettings:
    """Anchored Direct Preference Optimization (arXiv 2510.18913).

    Args:
        num_generations: G, rows of each prompt, at least 2.
        variant: ``softmax`` (the paper's cross entropy), ``scaled`` or ``plackett_luce``.
        tau: temperature of the anchored scores (paper 0.8; verlm's code falls back to 0.5).
        beta_reward: temperature of the target (paper 0.5; verlm's code falls back to 0.3).
        length_normalised: a row's log-probability is the mean over its tokens, else the sum.
        clip_log_ratio: bound of ``l - l_old``.
        clip_anchored_score: bound of ``(l - l_old) / tau``.
        center: shift scores by their mean under the target; changes only `logit_reg_coef`'s term.
        grad_scale_factor: factor of ``scaled``.
        logit_reg_coef: weight of the squared mean log-partition.
        top_k: positions that ``plackett_luce`` ranks; 0 for all.
        label_smoothing: share of the uniform target in ``plackett_luce``.
        adaptive_tau_vocab: size of the vocabulary; with it the temperature follows entropy and
            reward, starting from `tau`.
    """

    num_generations: int = 8
    variant: str = "softmax"
    tau: float = 0.8
    beta_reward: float = 0.5
    length_normalised: bool = True
    clip_log_ratio: float = 5.0
    clip_anchored_score: float = 10.0
    center: bool = True
    grad_scale_factor: float = 20.0
    logit_reg_coef: float = 0.0
    top_k: int = 3
    label_smoothing: float = 0.1
    adaptive_tau_vocab: int | None = None


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The settings of all policy losses; each loss reads those that it names.

    Args:
        loss_agg_mode: a `LossAggregation`; some losses override it.
        loss_scale_factor: divisor of ``seq-mean-token-sum-norm``.
        clip_low: ratios count down to ``1 - clip_low``.
        clip_high: ratios count up to ``1 + clip_high``.
        clip_c: dual-clip constant, and the largest ratio of the DPPO losses; > 1.
        clip_cov_ratio: share of tokens that ``clip_cov`` cuts off.
        clip_cov_lb: it chooses among covariances above this.
        clip_cov_ub: it chooses among covariances below this.
        kl_cov_ratio: share of tokens that ``kl_cov`` penalises.
        ppo_kl_coef: weight of that penalty.
        dro_beta: weight of ``dro``'s squared log-ratio, > 0 where it is used.
        tau_pos: SAPO's temperature where the advantage is positive.
        tau_neg: SAPO's temperature elsewhere.
        correction: the corrections within ``bypass_mode``, and what it optimises (`loss_type`).
    """

    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float = 1.0
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
    correction: RolloutCorrectionSettings = field(default_factory=RolloutCorrectionSettings)
    adpo: AdpoSettings = field(default_factory=AdpoSettings)
