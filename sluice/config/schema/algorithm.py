"""`algorithm.*`: advantages, KL control, group filter, correction for off-policy samples."""

from __future__ import annotations

from typing import Literal

from sluice.config.schema.actor import KlEstimator
from sluice.config.schema.section import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class KlControlConfig(Section, frozen=True):
    """Controller of the weight (Ziegler et al. 2019, section 2.2)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: constant; adaptive: steered towards target_kl."""

    kl_coef: NonNegativeFloat = 0.001
    """The weight, or its first value."""

    horizon: PositiveInt = 10000
    """adaptive: rows over which the weight reacts."""

    target_kl: PositiveFloat = 0.1
    """adaptive: divergence to hold."""


class FilterGroupsConfig(Section, frozen=True):
    """Dynamic sampling: only groups whose metric differs within the group are trained on."""

    enable: bool = False
    """Filter groups that carry no gradient and generate others instead."""

    metric: str = "acc"
    """acc, score, seq_reward, seq_final_reward, or any key the scorer returns."""

    max_num_gen_batches: int = 0
    """sampling strategy rounds: waves of prompts a batch may take before the run gives up; 0 or
    less: any number.
    """

    min_yield: Share = 0.005
    """Give up when fewer than this share of min_yield_groups groups was kept; 0: never."""

    min_yield_groups: PositiveInt = 2000
    """Groups the share is taken over."""


class RolloutCorrectionConfig(Section, frozen=True):
    """Importance weights for the samples of an older policy."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the truncated importance weights exp(old - behavior); none: no weights."""

    rollout_is_threshold: PositiveFloat | str = 2.0
    """Upper truncation of the weights; "low_high" instead sets weights outside to 0."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""

    rollout_rs: str | None = None
    """Rejections, separated by commas; a sample must pass all of them: token_k1 to k3, seq_sum_k1
    to k3, seq_mean_k1 to k3, seq_max_k2, seq_max_k3; none: no rejection.
    """

    rollout_rs_threshold: float | str | None = None
    """Bound of the rejections, one for all or one each, separated by commas; "low_high" for k1."""

    bypass_mode: bool = False
    """Take the engine's behavior logprobs as the old ones and correct inside the loss."""

    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss in bypass mode: clipped ratio, or weighted log-likelihood."""


EstimatorName = Literal[
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "remax",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "adpo",
]
"""The names of `sluice.algorithm.registry.BATCH_ESTIMATORS`."""


class AlgorithmConfig(Section, frozen=True):
    """How rewards become gradients."""

    adv_estimator: EstimatorName = "grpo"
    """Advantage estimator; gae needs a critic."""

    gamma: Share = 1.0
    """Discount of later rewards."""

    lam: Share = 1.0
    """gae: weight of longer returns."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO. It reaches grpo,
    grpo_vectorized, grpo_passk and adpo; gdpo always divides.
    """

    num_generations: PositiveInt | None = None
    """adpo: responses per prompt; must equal rollout.n; none: rollout.n."""

    gdpo_reward_keys: list[str] | None = None
    """gdpo: values of the scorer that are rewards."""

    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each; none: 1."""

    use_kl_in_reward: bool = False
    """Subtract the divergence from a reference model from every reward."""

    kl_penalty: KlEstimator = "kl"
    """Its estimator; the names of actor.kl_loss_type."""

    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
