"""`actor_rollout_ref.*`: the policy model, its optimizer, and how it is sampled."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]
FloatDtype = Literal["float32", "bfloat16"]


class ModelConfig(Section, frozen=True):
    """Which model is trained."""

    path: Annotated[
        str,
        Meta(description="Directory of a Hugging Face causal language model with its tokenizer."),
    ] = ""
    trust_remote_code: Annotated[
        bool, Meta(description="Run model code that ships with the checkpoint.")
    ] = False
    enable_gradient_checkpointing: Annotated[
        bool,
        Meta(
            description=(
                "Recompute activations in the backward pass: less memory, about a third more "
                "compute."
            )
        ),
    ] = False
    use_remove_padding: Annotated[
        bool,
        Meta(description="Pack tokens without padding. Always on in sluice; False is refused."),
    ] = True


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
        Literal["constant", "cosine", "linear"], Meta(description="Shape after the warm-up.")
    ] = "constant"
    min_lr_ratio: Annotated[Share, Meta(description="Final multiplier of cosine and linear.")] = 0.0
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


class PolicyLossConfig(Section, frozen=True):
    """Which policy loss."""

    loss_mode: Annotated[str, Meta(description="Name of the loss; known: vanilla.")] = "vanilla"


class FsdpConfig(Section, frozen=True):
    """Precision of the trained model."""

    model_dtype: Annotated[FloatDtype, Meta(description="Dtype of the master weights.")] = "float32"
    dtype: Annotated[
        FloatDtype, Meta(description="Dtype of the forward and backward pass (autocast).")
    ] = "bfloat16"


class ActorConfig(Section, frozen=True):
    """The policy update."""

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
        Meta(description="Symmetric clip; without effect while low and high are set."),
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


class ValKwargs(Section, frozen=True):
    """Sampling during validation."""

    n: Annotated[PositiveInt, Meta(description="Responses per validation prompt.")] = 1
    temperature: Annotated[NonNegativeFloat, Meta(description="0 is greedy.")] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus mass.")] = 1.0
    top_k: Annotated[int, Meta(description="-1 is off.")] = -1


class RolloutConfig(Section, frozen=True):
    """The inference engine and how training responses are drawn."""

    name: Annotated[str, Meta(description="Engine: torch, vllm or sglang.")] = "torch"
    n: Annotated[PositiveInt, Meta(description="Responses per prompt (group size).")] = 1
    temperature: Annotated[
        PositiveFloat,
        Meta(description="Sampling temperature; logprob recomputation divides by it as well."),
    ] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus mass; 1 is off.")] = 1.0
    top_k: Annotated[int, Meta(description="Highest-probability tokens kept; -1 is off.")] = -1
    max_num_seqs: Annotated[
        PositiveInt, Meta(description="Sequences one replica generates at once (slots).")
    ] = 256
    max_model_len: Annotated[
        PositiveInt | None,
        Meta(description="Context length, tokens; none: prompt plus response length."),
    ] = None
    dtype: Annotated[
        FloatDtype,
        Meta(description="Dtype of the engine's weights and of the weights on the wire."),
    ] = "bfloat16"
    seed: Annotated[NonNegativeInt, Meta(description="Base of all sampling seeds.")] = 0
    calculate_log_probs: Annotated[
        bool, Meta(description="Behaviour logprobs are always returned; False is refused.")
    ] = True
    val_kwargs: ValKwargs = msgspec.field(default_factory=ValKwargs)


class ActorRolloutRefConfig(Section, frozen=True):
    """Policy, optimizer and sampling."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    actor: ActorConfig = msgspec.field(default_factory=ActorConfig)
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
