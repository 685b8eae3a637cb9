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
    """Weight of the KL term in rewards, and its controller (Ziegler et al. 2019, section 2.2)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: the weight stays kl_coef; adaptive: it steers the divergence to target_kl."""

    kl_coef: NonNegativeFloat = 0.001
    """Weight of the KL term in rewards; with adaptive, its first value."""

    horizon: PositiveInt = 10000
    """adaptive: rows over which the weight adapts; larger is slower."""

    target_kl: PositiveFloat = 0.1
    """adaptive: the divergence to keep."""


class FilterGroupsConfig(Section, frozen=True):
    """Dynamic sampling: train only on groups whose samples differ in the metric."""

    enable: bool = False
    """Drop groups that carry no gradient, and generate others instead."""

    metric: str = "acc"
    """acc, score, reward, seq_reward, seq_final_reward, or any key that the scorer returns."""

    max_num_gen_batches: int = 0
    """With sampling strategy rounds: waves of prompts that one batch may take before the run stops
    with an error; 0 or less: no limit.
    """

    min_yield: Share = 0.005
    """Stop if fewer than this share of the last min_yield_groups groups were kept; 0: never."""

    min_yield_groups: PositiveInt = 2000
    """Number of groups over which min_yield is measured."""


class RolloutCorrectionConfig(Section, frozen=True):
    """Correction for samples of an older policy: importance weights and rejection."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the importance weights exp(old - behavior logprob); none: no weights."""

    rollout_is_threshold: PositiveFloat | str = 2.0
    """Upper bound of the weights; larger ones are truncated to it. "low_high" instead sets weights
    outside the range to 0.
    """

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""

    rollout_rs: str | None = None
    """Rejection criteria, separated by commas: token_k1 to k3, seq_sum_k1 to k3, seq_mean_k1 to k3,
    seq_max_k2, seq_max_k3. A sample must pass all of them; none: no rejection.
    """

    rollout_rs_threshold: float | str | None = None
    """Bounds for rollout_rs: one for all, or one each, separated by commas; "low_high" for k1."""

    bypass_mode: bool = False
    """Use the engine's behavior logprobs as the old logprobs, and correct inside the loss."""

    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss in bypass mode: ppo_clip (clipped ratio) or reinforce (weighted log-likelihood)."""


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
"""The names of `sluice.algorithm.registry.BATCH_ESTIMATORS`, in its order."""


class AlgorithmConfig(Section, frozen=True):
    """Advantages, KL control, group filter and off-policy correction."""

    adv_estimator: EstimatorName = "grpo"
    """Advantage estimator; gae needs a critic."""

    gamma: Share = 1.0
    """Discount factor of later rewards."""

    lam: Share = 1.0
    """gae: the lambda of the estimator; 1 has the least bias, 0 the least variance."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages by the group's standard deviation (false: Dr. GRPO). It applies to grpo,
    grpo_vectorized, grpo_passk and adpo; gdpo always divides.
    """

    num_generations: PositiveInt | None = None
    """adpo: responses per prompt; must equal rollout.n; none: rollout.n."""

    gdpo_reward_keys: list[str] | None = None
    """gdpo: keys of the scorer's result that are rewards."""

    gdpo_reward_weights: list[float] | None = None
    """gdpo: weight of each key in gdpo_reward_keys; none: 1 each."""

    use_kl_in_reward: bool = False
    """Subtract the weighted divergence from a reference model from the rewards."""

    kl_penalty: KlEstimator = "kl"
    """Estimator of that divergence; same names as actor.kl_loss_type."""

    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
