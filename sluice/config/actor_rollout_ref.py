"""`actor_rollout_ref.*`: the policy model, its update, its reference, and how it is sampled."""

from __future__ import annotations

import msgspec

from sluice.config.actor import ActorConfig, AggregationMode, FloatDtype, FsdpConfig
from sluice.config.model import ModelConfig
from sluice.config.optim import OptimConfig
from sluice.config.policy_loss import PolicyLossConfig
from sluice.config.rollout import RolloutConfig, ValKwargs
from sluice.config.section import Section

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AggregationMode",
    "FloatDtype",
    "FsdpConfig",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RolloutConfig",
    "ValKwargs",
]


class ActorRolloutRefConfig(Section, frozen=True):
    """Policy, optimizer and sampling. verl's `ref` has no field: the reference follows them."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    actor: ActorConfig = msgspec.field(default_factory=ActorConfig)
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
