"""`actor_rollout_ref.*`: the policy model, its update, its reference, and how it is sampled."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.config.schema.actor import (
    ActorConfig,
)
from sluice.config.schema.rollout import RolloutConfig
from sluice.config.schema.section import Section


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


class ActorRolloutRefConfig(Section, frozen=True):
    """Policy, optimizer and sampling. verl's `ref` has no field: the reference follows them."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    actor: ActorConfig = msgspec.field(default_factory=ActorConfig)
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
