"""`actor_rollout_ref.*`: the policy model, its update, its reference, and how it is sampled."""

from __future__ import annotations

from sluice.config.schema.actor import ActorConfig
from sluice.config.schema.rollout import RolloutConfig
from sluice.config.schema.section import Section


class ModelConfig(Section, frozen=True):
    """The model to train."""

    path: str = ""
    """Folder of a Hugging Face causal language model with its tokenizer."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""


class ActorRolloutRefConfig(Section, frozen=True):
    """Policy, optimizer and sampling. verl's `ref` has no field: the reference follows them."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
