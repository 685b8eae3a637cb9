"""`critic.*`: the value model of PPO. What is null follows the actor."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.config.schema.actor import AggregationMode, CriticOptimConfig, FsdpConfig
from sluice.config.schema.section import PositiveFloat, PositiveInt, Section


class CriticModelConfig(Section, frozen=True):
    """Where the value model starts."""

    path: Annotated[
        str | None, Meta(description="Hugging Face model to start from; none: the policy's.")
    ] = None
    enable_gradient_checkpointing: Annotated[
        bool, Meta(description="Recompute activations in the critic's backward pass.")
    ] = False


class CriticConfig(Section, frozen=True):
    """The value model and its update."""

    enable: Annotated[
        bool | None, Meta(description="Train a critic; none: only if the estimator is gae.")
    ] = None
    ppo_mini_batch_size: Annotated[
        PositiveInt | None, Meta(description="Prompts per optimizer step; none: the actor's.")
    ] = None
    ppo_micro_batch_size_per_gpu: Annotated[
        PositiveInt | None, Meta(description="Rows per pass; none: the actor's.")
    ] = None
    use_dynamic_bsz: Annotated[
        bool | None, Meta(description="Cut micro-batches by tokens; none: as the actor.")
    ] = None
    ppo_max_token_len_per_gpu: Annotated[
        PositiveInt, Meta(description="Token budget of a micro-batch.")
    ] = 32768
    ppo_epochs: Annotated[
        PositiveInt | None, Meta(description="Passes over one train batch; none: the actor's.")
    ] = None
    shuffle: Annotated[
        bool | None, Meta(description="Shuffle before cutting mini-batches; none: as the actor.")
    ] = None
    data_loader_seed: Annotated[int, Meta(description="Seed of that shuffle.")] = 42
    cliprange_value: Annotated[
        PositiveFloat, Meta(description="Values move at most this far from the old ones.")
    ] = 0.5
    loss_agg_mode: Annotated[
        AggregationMode | None, Meta(description="As the actor's key; none: its value.")
    ] = None
    loss_scale_factor: Annotated[
        int | None, Meta(description="As the actor's key; none: its value.")
    ] = None
    model: CriticModelConfig = msgspec.field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = msgspec.field(default_factory=CriticOptimConfig)
    fsdp: FsdpConfig = msgspec.field(default_factory=FsdpConfig)
