"""`actor_rollout_ref.actor`, `critic` and `global_profiler`: updates, losses, optimizers, sharding,
profiles.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
)

_Beta = Annotated[float, Meta(ge=0, lt=1)]


class OptimConfig(Section, frozen=True):
    """AdamW and its learning-rate schedule. A schedule step is one train batch."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    lr_warmup_steps: int = -1
    """Linear warm-up in train batches; 0 or less: lr_warmup_steps_ratio of the total."""

    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of the total, if lr_warmup_steps is not above 0."""

    lr_scheduler_type: Literal["constant", "cosine", "linear", "inverse_square_root"] = "constant"
    """Shape of the learning rate after the warm-up. In verl, FSDP has constant and cosine alone."""

    min_lr_ratio: Share = 0.0
    """Lower bound of the learning rate after the warm-up, as a share of lr; constant ignores it."""

    num_cycles: PositiveFloat = 0.5
    """cosine: number of waves; 0.5 is a single descent."""

    total_training_steps: int = -1
    """Length of the schedule in train batches; -1: the run's length."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """AdamW's betas."""

    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""

    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""


class CriticOptimConfig(OptimConfig, frozen=True):
    """AdamW of the critic; its default learning rate is ten times the policy's, as in verl."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""


PolicyLossName = Literal[
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
    "adpo",
]
"""The names of `sluice.algorithm.registry.POLICY_OBJECTIVES`."""


class PolicyLossConfig(Section, frozen=True):
    """The policy loss. Each constant applies only to the losses that its description names."""

    loss_mode: PolicyLossName = "vanilla"
    """Name of the loss; vanilla is PPO with clipping and dual clip."""

    clip_cov_ratio: PositiveShare = 0.0002
    """clip_cov: share of tokens whose gradient is removed."""

    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance of tokens that may be chosen."""

    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of the covariance of tokens that may be chosen."""

    kl_cov_ratio: PositiveShare = 0.0002
    """kl_cov: share of tokens with a KL penalty, those of the highest covariance."""

    ppo_kl_coef: NonNegativeFloat = 0.1
    """kl_cov: weight of that penalty."""

    dro_beta: PositiveFloat | None = None
    """dro: weight of the quadratic term; required for dro."""

    loss_variant: Literal["softmax", "scaled", "plackett_luce"] = "softmax"
    """adpo: softmax is the paper's anchored cross entropy; scaled multiplies it by
    grad_scale_factor; plackett_luce is a ranking loss.
    """

    tau: PositiveFloat = 0.8
    """adpo: temperature of the anchored log-probabilities."""

    beta_reward: PositiveFloat = 0.5
    """adpo: temperature of the target distribution over advantages."""

    use_length_normalization: bool = True
    """adpo: use the mean of a response's token log-probabilities instead of their sum."""

    clip_log_ratio: PositiveFloat = 5.0
    """adpo: bound of a response's log-ratio, in both directions."""

    clip_anchored_score: PositiveFloat = 10.0
    """adpo: bound of the log-ratio divided by tau, in both directions."""

    logit_reg_coef: NonNegativeFloat = 0.0
    """adpo: weight of the squared mean log-partition."""

    use_q_center: bool = True
    """adpo: center scores under the target; affects only the term of logit_reg_coef."""

    grad_scale_factor: PositiveFloat = 20.0
    """adpo, scaled: factor of the loss."""

    top_k: NonNegativeInt = 3
    """adpo, plackett_luce: number of positions to rank; 0: all."""

    label_smoothing: Share = 0.1
    """adpo, plackett_luce: share of the uniform distribution in the target."""

    use_adaptive_tau: bool = False
    """adpo: adapt tau to entropy and reward instead of keeping it constant."""


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
    """Precision of the trained model, and how trainer ranks share it."""

    model_dtype: FloatDtype = "float32"
    """Dtype of the master weights."""

    dtype: FloatDtype = "bfloat16"
    """Dtype of the forward and backward passes."""

    fsdp_size: int = -1
    """Number of trainer ranks that share one copy of weights, gradients and optimizer state; -1:
    all ranks; 1: each rank holds the whole model.
    """

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass; gather them again for the backward.
    """

    use_no_sync_for_gradient_accumulation: bool = False
    """true: each rank accumulates whole gradients, and ranks sum them once per mini-batch; false:
    ranks sum and shard them after every micro-batch.
    """

    param_offload: bool = False
    """Keep the weights in host memory while other models of the trainer compute."""

    optimizer_offload: bool = False
    """Keep AdamW's moments in host memory; a step brings them to the device part by part."""

    optimizer_offload_fraction: Share = 1.0
    """With optimizer_offload: minimum share of the moments in host memory."""

    forward_prefetch: bool = False
    """Begin to gather the next layer's weights when a layer's forward pass begins."""

    use_torch_compile: bool = False
    """Compile each decoder layer except its attention and the products of its experts, if the
    trainer has native layers for the family (Llama, Qwen2, Qwen2.5, Qwen3 and their mixtures of
    experts and vision models); for a policy also the arithmetic on logits.
    """

    pad_to_length: bool = False
    """Pad each micro-batch to a multiple of pad_to_length_bucket tokens: fewer shapes."""

    pad_to_length_bucket: PositiveInt = 1024
    """Step of pad_to_length."""


class ActorFsdpConfig(FsdpConfig, frozen=True):
    """FSDP of the policy; reference and critic divide sequences, layers and experts alike."""

    ulysses_sequence_parallel_size: PositiveInt = 1
    """Neighboring trainer ranks that share each packed sequence (Ulysses); it divides the ranks
    and the attention heads. A token budget is per rank, so a micro-batch grows with it.
    """

    expert_parallel_size: PositiveInt = 1
    """Neighboring trainer ranks that divide the experts of each layer; it divides the experts and
    the ranks of a copy: fsdp_size times tensor_parallel_size.
    """

    tensor_parallel_size: PositiveInt = 1
    """Neighboring trainer ranks that cut the matrices of each layer among them, and the tokens
    between matrices; it divides attention heads, key-value heads and the width of the layers.
    """

    pipeline_parallel_size: PositiveInt = 1
    """Stages of the trainer, each with a part of the layers; neighboring ranks form a stage."""


class RouterReplayConfig(Section, frozen=True):
    """Mixture of experts: whether passes over a sample choose the same experts."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """R2: training passes take the experts that the trainer's pass for old logprobs chose.
    R3: all of them take those that the engine chose for the sample's tokens.
    """


class CheckpointConfig(Section, frozen=True):
    """How a checkpoint is written."""

    async_save: bool = False
    """Copy weights and optimizer state to host memory, and write them while training continues."""


class TransformerOverrides(Section, frozen=True):
    """What the backward pass recomputes, and where stages are cut, in Megatron's words."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """full: whole layers; selective: recompute_modules of each layer; none: as
    model.enable_gradient_checkpointing says.
    """

    recompute_method: Literal["uniform", "block"] | None = None
    """full: block recomputes the first recompute_num_layers layers of a stage, all else every
    layer."""

    recompute_num_layers: PositiveInt | None = None
    """block: number of layers."""

    recompute_modules: list[str] = msgspec.field(default_factory=lambda: ["core_attn"])
    """selective: some of core_attn, layernorm, mlp and moe. core_attn never keeps anything."""

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first of fsdp_config.pipeline_parallel_size stages; others share the rest."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage."""

    account_for_embedding_in_pipeline_split: bool | None = None
    """true: count the embedding as a layer of the first stage, and cut stages of equal numbers."""

    account_for_loss_in_pipeline_split: bool | None = None
    """true: count the head and the loss as a layer of the last stage, in the same way."""


class MegatronConfig(Section, frozen=True):
    """Keys of verl's Megatron backend that mean the same here."""

    override_transformer_config: TransformerOverrides = TransformerOverrides()


ProfilerTool = Literal["torch", "npu", "nsys", "torch_memory", "precision_debugger"]


class GlobalProfilerConfig(Section, frozen=True):
    """Which steps are traced, and where the traces go."""

    tool: ProfilerTool | None = None
    """torch: torch's profiler traces the training steps of the trainer's ranks; none: no traces."""

    steps: list[PositiveInt] | None = None
    """Numbers of the traced steps, from 1; none: no traces."""

    save_path: str = "outputs/profile"
    """Folder of the traces, relative to where the trainer runs."""


class ActorProfilerConfig(Section, frozen=True):
    """Which ranks of the trainer are traced."""

    enable: bool = False
    """Trace this run's global_profiler.steps."""

    tool: ProfilerTool | None = None
    """As global_profiler.tool; none: that one."""

    all_ranks: bool = False
    """Trace every rank."""

    ranks: list[NonNegativeInt] = msgspec.field(default_factory=list)
    """Traced ranks, unless all_ranks is true."""

    save_path: str | None = None
    """As global_profiler.save_path; none: that one."""


class ActorConfig(Section, frozen=True):
    """The policy update: batches, loss and passes."""

    freeze_vision_tower: bool = False
    """Do not train the image encoder of a vision-language model."""

    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step, summed over all ranks."""

    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per forward and backward pass of one rank; required unless use_dynamic_bsz is true."""

    use_dynamic_bsz: bool = False
    """Limit micro-batches by tokens (ppo_max_token_len_per_gpu) instead of rows."""

    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of a micro-batch of one rank, prompts and responses together."""

    clip_ratio: PositiveFloat = 0.2
    """Sets both clip_ratio_low and clip_ratio_high."""

    clip_ratio_low: PositiveFloat = 0.2
    """Ratios below 1 minus this value are clipped."""

    clip_ratio_high: PositiveFloat = 0.2
    """Ratios above 1 plus this value are clipped; DAPO uses 0.28."""

    clip_ratio_c: Annotated[float, Meta(gt=1)] = 3.0
    """Dual clip: largest ratio that counts where the advantage is negative."""

    loss_agg_mode: AggregationMode = "token-mean"
    """How the token losses of a mini-batch are combined into one number."""

    loss_scale_factor: PositiveInt | None = None
    """seq-mean-token-sum-norm: divisor of the sum, in tokens; none: max_response_length."""

    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss."""

    calculate_entropy: bool = False
    """Compute and report the entropy even if entropy_coeff is 0."""

    use_kl_loss: bool = False
    """Add the divergence from a reference model to the loss."""

    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of that divergence."""

    kl_loss_type: KlEstimator = "low_var_kl"
    """Estimator of the divergence per token: kl or k1, abs, mse or k2, low_var_kl or k3. A + at the
    end takes the gradient of k2 instead.
    """

    tau_pos: PositiveFloat = 1.0
    """sapo: temperature where the advantage is positive."""

    tau_neg: PositiveFloat = 1.05
    """sapo: temperature where the advantage is not positive."""

    ppo_epochs: PositiveInt = 1
    """Number of passes of the update over one train batch."""

    shuffle: bool = False
    """Shuffle the groups of a train batch before it is cut into mini-batches."""

    data_loader_seed: int = 42
    """Seed of that shuffle."""

    use_rollout_log_probs: bool = False
    """Use the engine's behavior logprobs as the old ones instead of recomputing them."""

    optim: OptimConfig = OptimConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    fsdp_config: ActorFsdpConfig = ActorFsdpConfig()
    megatron: MegatronConfig = MegatronConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    profiler: ActorProfilerConfig = ActorProfilerConfig()


class CriticModelConfig(Section, frozen=True):
    """The first weights of the value model."""

    path: str | None = None
    """Hugging Face model to start from; none: the policy's."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the critic's backward pass."""


class CriticConfig(Section, frozen=True):
    """The value model of PPO and its update. A null key has the actor's value, except `enable`."""

    enable: bool | None = None
    """Train a critic; none: only if algorithm.adv_estimator is gae."""

    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; none: as the actor."""

    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per pass of one rank; none: as the actor."""

    use_dynamic_bsz: bool | None = None
    """Limit micro-batches by tokens instead of rows; none: as the actor."""

    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Token budget of a micro-batch of one rank."""

    ppo_epochs: PositiveInt | None = None
    """Number of passes of the update over one train batch; none: as the actor."""

    shuffle: bool | None = None
    """Shuffle groups before they are cut into mini-batches; none: as the actor."""

    data_loader_seed: int = 42
    """Seed of that shuffle."""

    cliprange_value: PositiveFloat = 0.5
    """Largest change of a predicted value that counts in one update."""

    loss_agg_mode: AggregationMode | None = None
    """How token losses are combined into one number; none: as the actor."""

    loss_scale_factor: PositiveInt | None = None
    """seq-mean-token-sum-norm: divisor of the sum, in tokens; none: as the actor."""

    model: CriticModelConfig = CriticModelConfig()
    optim: CriticOptimConfig = CriticOptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
