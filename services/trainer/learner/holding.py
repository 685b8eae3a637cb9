"""What rank 0 needs whole of the tensors that ranks hold in shards."""

from __future__ import annotations

from enum import StrEnum


class Holding(StrEnum):
    """A set of named tensors; moments are what AdamW keeps of the parameters."""

    WIRE_WEIGHTS = "wire_weights"
    """The policy's weights as they travel, in ``actor_rollout_ref.rollout.dtype``."""
    WEIGHTS = "weights"
    MOMENTS = "moments"
    CRITIC_WEIGHTS = "critic_weights"
    CRITIC_MOMENTS = "critic_moments"
