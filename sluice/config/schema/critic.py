"""`critic.*`: the value model of PPO. Keys that are null follow the actor."""

from __future__ import annotations

from sluice.config.schema.actor import AggregationMode, CriticOptimConfig, FsdpConfig
from sluice.config.schema.section import PositiveFloat, PositiveInt, Section


class CriticModelConfig(Section, frozen=True):
    """Where the value model starts."""

    path: str | None = None
    """Hugging Face model to start from; none: the policy's."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the critic's backward pass."""


class CriticConfig(Section, frozen=True):
    """The value model and its update."""

    enable: bool | None = None
    """Train a critic; none: only if the estimator is gae."""

    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; none: the actor's."""

    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows per pass; none: the actor's."""

    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; none: as the actor."""

    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Token budget of a micro-batch."""

    ppo_epochs: PositiveInt | None = None
    """Passes over one train batch; none: the actor's."""

    shuffle: bool | None = None
    """Shuffle before cutting mini-batches; none: as the actor."""

    data_loader_seed: int = 42
    """Seed of that shuffle."""

    cliprange_value: PositiveFloat = 0.5
    """Values move at most this far from the old ones."""

    loss_agg_mode: AggregationMode | None = None
    """As the actor's key; none: its value."""

    loss_scale_factor: PositiveInt | None = None
    """As the actor's key; none: its value."""

    model: CriticModelConfig = CriticModelConfig()
    optim: CriticOptimConfig = CriticOptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
