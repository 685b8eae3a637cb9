"""`actor_rollout_ref.model`: which model is trained."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluice.config.section import Section


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
