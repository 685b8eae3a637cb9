"""`actor_rollout_ref.actor.policy_loss`: the loss and the constants of its variants."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
    Share,
)


class PolicyLossConfig(Section, frozen=True):
    """Which policy loss. Each constant belongs to the variant that its description names."""

    loss_mode: Annotated[
        str,
        Meta(
            description=(
                "Name of the loss: vanilla (clipped PPO with dual clip), dppo_tv, dppo_kl, gspo, "
                "sapo, gpg, clip_cov, kl_cov, geo_mean, dro, cispo, bypass_mode, adpo."
            )
        ),
    ] = "vanilla"
    clip_cov_ratio: Annotated[
        Share, Meta(description="clip_cov: share of tokens whose gradient is removed.")
    ] = 0.0002
    clip_cov_lb: Annotated[
        float, Meta(description="clip_cov: covariance above which a token may be chosen.")
    ] = 1.0
    clip_cov_ub: Annotated[
        float, Meta(description="clip_cov: covariance below which a token may be chosen.")
    ] = 5.0
    kl_cov_ratio: Annotated[
        Share, Meta(description="kl_cov: share of tokens, highest covariance first, penalised.")
    ] = 0.0002
    ppo_kl_coef: Annotated[
        NonNegativeFloat, Meta(description="kl_cov: weight of that penalty.")
    ] = 0.1
    dro_beta: Annotated[
        PositiveFloat | None, Meta(description="dro: weight of the quadratic term; required there.")
    ] = None
    loss_variant: Annotated[
        Literal["softmax", "scaled", "plackett_luce"],
        Meta(
            description=(
                "adpo: softmax is the anchored cross entropy of the paper, scaled the same times "
                "grad_scale_factor, plackett_luce a ranking loss."
            )
        ),
    ] = "softmax"
    tau: Annotated[
        PositiveFloat, Meta(description="adpo: temperature of the anchored log-probs.")
    ] = 0.8
    beta_reward: Annotated[
        PositiveFloat, Meta(description="adpo: temperature of the target over advantages.")
    ] = 0.5
    use_length_normalization: Annotated[
        bool, Meta(description="adpo: mean, not sum, of token log-probs for a response.")
    ] = True
    clip_log_ratio: Annotated[
        PositiveFloat, Meta(description="adpo: bound of a response's log-ratio.")
    ] = 5.0
    clip_anchored_score: Annotated[
        PositiveFloat, Meta(description="adpo: bound of the log-ratio over tau.")
    ] = 10.0
    logit_reg_coef: Annotated[
        NonNegativeFloat, Meta(description="adpo: weight of the squared mean log-partition.")
    ] = 0.0
    use_q_center: Annotated[
        bool, Meta(description="adpo: centre scores under the target; changes logit_reg_coef only.")
    ] = True
    grad_scale_factor: Annotated[
        PositiveFloat, Meta(description="adpo, scaled: factor of the loss.")
    ] = 20.0
    top_k: Annotated[
        NonNegativeInt, Meta(description="adpo, plackett_luce: positions ranked; 0: all.")
    ] = 3
    label_smoothing: Annotated[
        Share, Meta(description="adpo, plackett_luce: share of the uniform target.")
    ] = 0.1
    use_adaptive_tau: Annotated[
        bool, Meta(description="adpo: let tau follow entropy and reward instead of being constant.")
    ] = False
