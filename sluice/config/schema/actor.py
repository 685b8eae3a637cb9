"""`actor_rollout_ref.actor`: the policy update, its loss, and its optimizer (also the critic's)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)

_Beta = Annotated[float, Meta(ge=0, lt=1)]


class OptimConfig(Section, frozen=True):
    """AdamW and its learning-rate schedule; schedule steps are train batches."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    lr_warmup_steps: int = -1
    """Linear warm-up in train batches; <= 0: lr_warmup_steps_ratio times the total."""

    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of the total."""

    lr_scheduler_type: Literal["constant", "cosine", "linear", "inverse_square_root"] = "constant"
    """Shape after the warm-up."""

    min_lr_ratio: Share = 0.0
    """Least multiplier after the warm-up, of all but constant."""

    num_cycles: PositiveFloat = 0.5
    """Waves of cosine; 0.5 is a single descent."""

    total_training_steps: int = -1
    """Length of the schedule in train batches; -1: the run's."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """AdamW's betas."""

    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""

    clip_grad: PositiveFloat = 1.0
    """Global gradient norm above which gradients are scaled down."""


class CriticOptimConfig(OptimConfig, frozen=True):
    """The critic's, which learns ten times faster by default (verl)."""

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
    """Which policy loss. Each constant belongs to the variant that its description names."""

    loss_mode: PolicyLossName = "vanilla"
    """Name of the loss; vanilla is clipped PPO with dual clip."""

    clip_cov_ratio: Share = 0.0002
    """clip_cov: share of tokens whose gradient is removed."""

    clip_cov_lb: float = 1.0
    """clip_cov: covariance above which a token may be chosen."""

    clip_cov_ub: float = 5.0
    """clip_cov: covariance below which a token may be chosen."""

    kl_cov_ratio: Share = 0.0002
    """kl_cov: share of tokens, highest covariance first, penalised."""

    ppo_kl_coef: NonNegativeFloat = 0.1
    """kl_cov: weight of that penalty."""

    dro_beta: PositiveFloat | None = None
    """dro: weight of the quadratic term; required there."""

    loss_variant: Literal["softmax", "scaled", "plackett_luce"] = "softmax"
    """adpo: softmax is the anchored cross entropy of the paper, scaled the same times
    grad_scale_factor, plackett_luce a ranking loss.
    """

    tau: PositiveFloat = 0.8
    """adpo: temperature of the anchored log-probs."""

    beta_reward: PositiveFloat = 0.5
    """adpo: temperature of the target over advantages."""

    use_length_normalization: bool = True
    """adpo: mean, not sum, of token log-probs for a response."""

    clip_log_ratio: PositiveFloat = 5.0
    """adpo: bound of a response's log-ratio."""

    clip_anchored_score: PositiveFloat = 10.0
    """adpo: bound of the log-ratio over tau."""

    logit_reg_coef: NonNegativeFloat = 0.0
    """adpo: weight of the squared mean log-partition."""

    use_q_center: bool = True
    """adpo: centre scores under the target; changes logit_reg_coef only."""

    grad_scale_factor: PositiveFloat = 20.0
    """adpo, scaled: factor of the loss."""

    top_k: NonNegativeInt = 3
    """adpo, plackett_luce: positions ranked; 0: all."""

    label_smoothing: Share = 0.1
    """adpo, plackett_luce: share of the uniform target."""

    use_adaptive_tau: bool = False
    """adpo: let tau follow entropy and reward instead of being constant."""


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

    model_dtype: FloatDtype = "float32"
    """Dtype of the master weights."""

    dtype: FloatDtype = "bfloat16"
    """Dtype of the forward and backward pass (autocast)."""

    fsdp_size: int = -1
    """Trainer ranks that share one copy of weights, gradients and optimizer; -1: all, 1: each rank
    holds the whole model.
    """

    reshard_after_forward: bool = True
    """Free a layer's gathered weights between its forward and its backward."""

    use_no_sync_for_gradient_accumulation: bool = True
    """Sum sharded gradients over ranks once a mini-batch; until then each rank holds the whole sum
    of its own. Otherwise once a micro-batch.
    """


class ActorConfig(Section, frozen=True):
    """The policy update."""

    freeze_vision_tower: bool = False
    """Do not train the image encoder of a vision-language model."""

    ppo_mini_batch_size: PositiveInt = 256
    """Prompts per optimizer step, over all ranks."""

    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per forward and backward pass; needed unless use_dynamic_bsz."""

    use_dynamic_bsz: bool = False
    """Cut micro-batches by ppo_max_token_len_per_gpu instead of rows."""

    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of a micro-batch, prompt and response."""

    clip_ratio: PositiveFloat = 0.2
    """Both bounds of the clip in one number."""

    clip_ratio_low: PositiveFloat = 0.2
    """Lower clip: ratios below 1 - this are clipped."""

    clip_ratio_high: PositiveFloat = 0.2
    """Upper clip: ratios above 1 + this are clipped (DAPO 0.28)."""

    clip_ratio_c: Annotated[float, Meta(gt=1)] = 3.0
    """Dual clip: bound of the loss where the advantage is negative."""

    loss_agg_mode: AggregationMode = "token-mean"
    """How token losses become one number."""

    loss_scale_factor: PositiveInt | None = None
    """Divisor of seq-mean-token-sum-norm; none: max_response_length."""

    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""

    calculate_entropy: bool = False
    """Report the entropy of the update's pass although its weight is 0."""

    use_kl_loss: bool = False
    """Add the divergence from a reference model to the loss."""

    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of that divergence."""

    kl_loss_type: KlEstimator = "low_var_kl"
    """Its estimator for a token: kl or k1, abs, mse or k2, low_var_kl or k3; with + the gradient of
    k2.
    """

    tau_pos: PositiveFloat = 1.0
    """sapo: temperature where the advantage is positive."""

    tau_neg: PositiveFloat = 1.05
    """sapo: temperature elsewhere."""

    ppo_epochs: PositiveInt = 1
    """Passes over one train batch."""

    shuffle: bool = False
    """Shuffle groups before cutting mini-batches."""

    data_loader_seed: int = 42
    """Seed of that shuffle."""

    use_rollout_log_probs: bool = False
    """Take the engine's behavior logprobs as the old logprobs instead of recomputing them with the
    trainer.
    """

    optim: OptimConfig = OptimConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    fsdp_config: FsdpConfig = FsdpConfig()
