"""`actor_rollout_ref.*`: the policy model, its update, its reference, and how it is sampled."""

from __future__ import annotations

from sluice.config.schema.actor import ActorConfig
from sluice.config.schema.rollout import RolloutConfig
from sluice.config.schema.section import NonNegativeInt, PositiveFloat, Section


class ModelConfig(Section, frozen=True):
    """The model to train."""

    path: str = ""
    """Folder of a Hugging Face causal language model with its tokenizer."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    enable_activation_offload: bool = False
    """Let the inputs of recomputed layers wait in host memory for the backward pass."""

    float32_head: bool = False
    """Compute logits in float32, in trainer and engines, whatever the dtype of the layers."""

    lora_rank: NonNegativeInt = 0
    """Rank of low-rank adapters; the model's own weights stay frozen. 0: train all weights."""

    lora_alpha: PositiveFloat = 16.0
    """An adapter's product counts lora_alpha / lora_rank times."""

    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: all-linear (all but the head), ends of names, or a regular
    expression for whole names.
    """

    exclude_modules: str | list[str] | None = None
    """Layers that get none, in the same words."""

    lora_adapter_path: str | None = None
    """Folder of an adapter to start from, as peft saves it: its layers, rank and scale apply."""


class ActorRolloutRefConfig(Section, frozen=True):
    """Policy, optimizer and sampling. verl's `ref` has no field: the reference follows them."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
