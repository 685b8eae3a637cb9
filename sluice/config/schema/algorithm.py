"""`algorithm.*`: advantages, KL control, group filter, correction for off-policy samples."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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

    type: Annotated[
        Literal["fixed", "adaptive"],
        Meta(description="fixed: constant; adaptive: steered towards target_kl."),
    ] = "fixed"
    kl_coef: Annotated[NonNegativeFloat, Meta(description="The weight, or its first value.")] = (
        0.001
    )
    horizon: Annotated[
        PositiveInt, Meta(description="adaptive: rows over which the weight reacts.")
    ] = 10000
    target_kl: Annotated[PositiveFloat, Meta(description="adaptive: divergence to hold.")] = 0.1


class FilterGroupsConfig(Section, frozen=True):
    """Dynamic sampling: only groups whose metric differs within the group are trained on."""

    enable: Annotated[
        bool, Meta(description="Filter groups that carry no gradient and generate others instead.")
    ] = False
    metric: Annotated[
        str,
        Meta(
            description="acc, score, seq_reward, seq_final_reward, or any key the scorer returns."
        ),
    ] = "acc"
    max_num_gen_batches: Annotated[
        int,
        Meta(
            description=(
                "sampling strategy rounds: waves of prompts a batch may take before the run gives "
                "up; 0 or less: any number."
            )
        ),
    ] = 0
    min_yield: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Give up when fewer than this share of min_yield_groups groups was kept; 0: never."
            ),
        ),
    ] = 0.005
    min_yield_groups: Annotated[int, Meta(ge=1, description="Groups the share is taken over.")] = (
        2000
    )


class RolloutCorrectionConfig(Section, frozen=True):
    """Importance weights for the samples of an older policy."""

    rollout_is: Annotated[
        Literal["token", "sequence"] | None,
        Meta(
            description=(
                "Level of the truncated importance weights exp(old - behavior); none: no weights."
            )
        ),
    ] = None
    rollout_is_threshold: Annotated[
        PositiveFloat | str,
        Meta(
            description=(
                'Upper truncation of the weights; "low_high" instead sets weights outside to 0.'
            )
        ),
    ] = 2.0
    rollout_is_batch_normalize: Annotated[
        bool, Meta(description="Divide the weights by their mean.")
    ] = False
    rollout_rs: Annotated[
        str | None,
        Meta(
            description=(
                "Rejections, separated by commas; a sample must pass all of them: token_k1 to k3, "
                "seq_sum_k1 to k3, seq_mean_k1 to k3, seq_max_k2, seq_max_k3; none: no rejection."
            )
        ),
    ] = None
    rollout_rs_threshold: Annotated[
        float | str | None,
        Meta(
            description=(
                'Bound of the rejections, one for all or one each, separated by commas; "low_high" '
                "for k1."
            )
        ),
    ] = None
    bypass_mode: Annotated[
        bool,
        Meta(
            description=(
                "Take the engine's behavior logprobs as the old ones and correct inside the loss."
            )
        ),
    ] = False
    loss_type: Annotated[
        Literal["ppo_clip", "reinforce"],
        Meta(description="Loss in bypass mode: clipped ratio, or weighted log-likelihood."),
    ] = "ppo_clip"


class AlgorithmConfig(Section, frozen=True):
    """How rewards become gradients."""

    adv_estimator: Annotated[
        str,
        Meta(
            description=(
                "Advantage estimator: gae (with a critic), grpo, grpo_vectorized, grpo_passk, "
                "gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo, "
                "rloo_vectorized, opo, gpg, optimal_token_baseline, "
                "tir_optimal_token_baseline, adpo."
            )
        ),
    ] = "grpo"
    gamma: Annotated[Share, Meta(description="Discount of later rewards.")] = 1.0
    lam: Annotated[Share, Meta(description="gae: weight of longer returns.")] = 1.0
    norm_adv_by_std_in_grpo: Annotated[
        bool,
        Meta(
            description="Divide by the group's standard deviation; False is Dr. GRPO. It reaches "
            "grpo, grpo_vectorized, grpo_passk and adpo; gdpo always divides."
        ),
    ] = True
    num_generations: Annotated[
        PositiveInt | None,
        Meta(description="adpo: responses per prompt; must equal rollout.n; none: rollout.n."),
    ] = None
    gdpo_reward_keys: Annotated[
        list[str] | None, Meta(description="gdpo: values of the scorer that are rewards.")
    ] = None
    gdpo_reward_weights: Annotated[
        list[float] | None, Meta(description="gdpo: weight of each; none: 1.")
    ] = None
    use_kl_in_reward: Annotated[
        bool,
        Meta(description="Subtract the divergence from a reference model from every reward."),
    ] = False
    kl_penalty: Annotated[
        KlEstimator, Meta(description="Its estimator; the names of actor.kl_loss_type.")
    ] = "kl"
    kl_ctrl: KlControlConfig = msgspec.field(default_factory=KlControlConfig)
    filter_groups: FilterGroupsConfig = msgspec.field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = msgspec.field(
        default_factory=RolloutCorrectionConfig
    )
