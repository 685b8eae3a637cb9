"""`actor_rollout_ref.actor`: the policy update."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.optim import OptimConfig
from sluice.config.policy_loss import PolicyLossConfig
from sluice.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section

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
                "Take the engine's behaviour logprobs as the old logprobs instead of "
                "recomputing them with the trainer."
            )
        ),
    ] = False
    optim: OptimConfig = msgspec.field(default_factory=OptimConfig)
    policy_loss: PolicyLossConfig = msgspec.field(default_factory=PolicyLossConfig)
    fsdp_config: FsdpConfig = msgspec.field(default_factory=FsdpConfig)
