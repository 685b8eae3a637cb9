"""The root of the run configuration: verl's tree of keys plus the `sluice` section."""

from __future__ import annotations

import msgspec

from sluice.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from sluice.config.schema.algorithm import AlgorithmConfig
from sluice.config.schema.critic import CriticConfig
from sluice.config.schema.data import DataConfig
from sluice.config.schema.reward import RewardConfig
from sluice.config.schema.section import Section
from sluice.config.schema.service import ServiceConfig
from sluice.config.schema.trainer import TrainerConfig


class RunConfig(Section, frozen=True):
    """Everything a run needs; all services read the same file."""

    data: DataConfig = msgspec.field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = msgspec.field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    critic: CriticConfig = msgspec.field(default_factory=CriticConfig)
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    trainer: TrainerConfig = msgspec.field(default_factory=TrainerConfig)
    sluice: ServiceConfig = msgspec.field(default_factory=ServiceConfig)
