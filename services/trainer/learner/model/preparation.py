"""What becomes of a loaded policy before it is sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.learner.model.forward import DTYPES
from services.trainer.learner.model.loading import freeze_vision_tower
from services.trainer.learner.model.lora import add_adapters
from services.trainer.learner.model.recompute import keep_inputs_on_host, recompute_as_configured
from sluice.config.derived import adapts
from sluice.config.schema.actor_rollout_ref import ActorRolloutRefConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_policy(model: PreTrainedModel, config: ActorRolloutRefConfig) -> None:
    """Add adapters, freeze what is not trained, and choose what backward passes recompute.

    Raises:
        ConfigError: the model has nothing that a setting names.
    """
    actor = config.actor
    recompute_as_configured(model, actor.megatron.override_transformer_config)
    if config.model.enable_activation_offload:
        keep_inputs_on_host(model)
    if adapts(config.model):
        add_adapters(model, config.model, DTYPES[actor.fsdp_config.model_dtype])
    if actor.freeze_vision_tower:
        freeze_vision_tower(model)
