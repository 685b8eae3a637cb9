"""`actor_rollout_ref.actor`: the policy update, its loss, and its optimizer (also the critic's)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class OptimConfig(Section, frozen=True):
    """AdamW and its learning-rate schedule; schedule steps are train batches."""

    lr: Annotated[PositiveFloat, Meta(description="Peak learning rate.")] = 1e-6
    lr_warmup_steps: Annotated[
        int,
        Meta(
            description=(
                "Linear warm-up in train batches; <= 0: lr_warmup_steps_ratio times the total."
            )
        ),
    ] = -1
    lr_warmup_steps_ratio: Annotated[
        Share, Meta(description="Warm-up as a share of the total.")
    ] = 0.0
    lr_scheduler_type: Annotated[
        Literal["constant", "cosine", "linear", "inverse_square_root"],
        Meta(description="Shape after the warm-up."),
    ] = "constant"
    min_lr_ratio: Annotated[
        Share, Meta(description="Least multiplier after the warm-up, of all but constant.")
    ] = 0.0
    num_cycles: Annotated[
        PositiveFloat, Meta(description="Waves of cosine; 0.5 is a single descent.")
    ] = 0.5
    total_training_steps: Annotated[
        int, Meta(description="Length of the schedule in train batches; -1: the run's.")
    ] = -1
    weight_decay: Annotated[NonNegativeFloat, Meta(description="Decoupled weight decay.")] = 0.01
    betas: Annotated[tuple[float, float], Meta(description="AdamW's betas.")] = (0.9, 0.999)
    eps: Annotated[PositiveFloat, Meta(description="AdamW's epsilon.")] = 1e-8
    clip_grad: Annotated[
        PositiveFloat,
        Meta(description="Global gradient norm above which gradients are scaled down."),
    ] = 1.0


class CriticOptimConfig(OptimConfig, frozen=True):
    """The critic's, which learns ten times faster by default (verl)."""

    lr: Annotated[PositiveFloat, Meta(description="Peak learning rate.")] = 1e-5


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


AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
FloatDtype = Literal["float32", "bfloat16"]
KlEstimator = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
]


class FsdpConfig(Section, frozen=True):
    """Precision of the trained model, and how ranks share it."""

    model_dtype: Annotated[FloatDtype, Meta(description="Dtype of the master weights.")] = "float32"
    dtype: Annotated[
        FloatDtype, Meta(description="Dtype of the forward and backward pass (autocast).")
    ] = "bfloat16"
    fsdp_size: Annotated[
        int,
        Meta(
            description="Trainer ranks that share one copy of weights, gradients and optimizer; "
            "-1: all, 1: each rank holds the whole model."
        ),
    ] = -1
    reshard_after_forward: Annotated[
        bool,
        Meta(description="Free a layer's gathered weights between its forward and its backward."),
    ] = True
    use_no_sync_for_gradient_accumulation: Annotated[
        bool,
        Meta(
            description="Sum sharded gradients over ranks once a mini-batch; until then each rank "
            "holds the whole sum of its own. Otherwise once a micro-batch."
        ),
    ] = True


class ActorConfig(Section, frozen=True):
    """The policy update."""

    freeze_vision_tower: Annotated[
        bool, Meta(description="Do not train the image encoder of a vision-language model.")
    ] = False
    ppo_mini_batch_size: Annotated[
        PositiveInt, Meta(description="Prompts per optimizer step, over all ranks.")
    ] = 256
    ppo_micro_batch_size_per_gpu: Annotated[
        PositiveInt | None,
        Meta(description="Rows per forward and backward pass; needed unless use_dynamic_bsz."),
    ] = None
    use_dynamic_bsz: Annotated[
        bool, Meta(description="Cut micro-batches by ppo_max_token_len_per_gpu instead of rows.")
    ] = False
    ppo_max_token_len_per_gpu: Annotated[
        PositiveInt, Meta(description="Token budget of a micro-batch, prompt and response.")
    ] = 16384
    clip_ratio: Annotated[
        PositiveFloat,
        Meta(description="Both bounds of the clip in one number."),
    ] = 0.2
    clip_ratio_low: Annotated[
        PositiveFloat, Meta(description="Lower clip: ratios below 1 - this are clipped.")
    ] = 0.2
    clip_ratio_high: Annotated[
        PositiveFloat,
        Meta(description="Upper clip: ratios above 1 + this are clipped (DAPO 0.28)."),
    ] = 0.2
    clip_ratio_c: Annotated[
        float,
        Meta(gt=1, description="Dual clip: bound of the loss where the advantage is negative."),
    ] = 3.0
    loss_agg_mode: Annotated[
        AggregationMode, Meta(description="How token losses become one number.")
    ] = "token-mean"
    loss_scale_factor: Annotated[
        int | None,
        Meta(description="Divisor of seq-mean-token-sum-norm; none: max_response_length."),
    ] = None
    entropy_coeff: Annotated[float, Meta(description="Weight of the entropy bonus.")] = 0.0
    calculate_entropy: Annotated[
        bool, Meta(description="Report the entropy of the update's pass although its weight is 0.")
    ] = False
    use_kl_loss: Annotated[
        bool, Meta(description="Add the divergence from a reference model to the loss.")
    ] = False
    kl_loss_coef: Annotated[NonNegativeFloat, Meta(description="Weight of that divergence.")] = (
        0.001
    )
    kl_loss_type: Annotated[
        KlEstimator,
        Meta(
            description=(
                "Its estimator for a token: kl or k1, abs, mse or k2, low_var_kl or k3; with + the "
                "gradient of k2."
            )
        ),
    ] = "low_var_kl"
    tau_pos: Annotated[
        PositiveFloat, Meta(description="sapo: temperature where the advantage is positive.")
    ] = 1.0
    tau_neg: Annotated[PositiveFloat, Meta(description="sapo: temperature elsewhere.")] = 1.05
    ppo_epochs: Annotated[PositiveInt, Meta(description="Passes over one train batch.")] = 1
    shuffle: Annotated[bool, Meta(description="Shuffle groups before cutting mini-batches.")] = (
        False
    )
    data_loader_seed: Annotated[int, Meta(description="Seed of that shuffle.")] = 42
    use_rollout_log_probs: Annotated[
        bool,
        Meta(
            description=(
                "Take the engine's behavior logprobs as the old logprobs instead of "
                "recomputing them with the trainer."
            )
        ),
    ] = False
    optim: OptimConfig = msgspec.field(default_factory=OptimConfig)
    policy_loss: PolicyLossConfig = msgspec.field(default_factory=PolicyLossConfig)
    fsdp_config: FsdpConfig = msgspec.field(default_factory=FsdpConfig)
