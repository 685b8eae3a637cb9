"""`critic.*`: the value model of PPO. A null key has the actor's value."""

from __future__ import annotations

from sluice.config.schema.actor import AggregationMode, CriticOptimConfig, FsdpConfig
from sluice.config.schema.section import PositiveFloat, PositiveInt, Section


class CriticModelConfig(Section, frozen=True):
    """The first weights of the value model."""

    path: str | None = None
    """Hugging Face model to start from; none: the policy's."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the critic's backward pass."""


class CriticConfig(Section, frozen=True):
    """The value model and its update."""

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
