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


def prepare_policy(
    model: PreTrainedModel, config: ActorRolloutRefConfig, first_layer: int = 0
) -> None:
    """Add adapters, freeze what is not trained, and choose what backward passes recompute.

    Args:
        model: not cut into stages yet.
        config: of the policy.
        first_layer: of this rank's stage.

    Raises:
        ConfigError: the model has nothing that a setting names.
    """
    actor = config.actor
    recompute_as_configured(model, actor.megatron.override_transformer_config, first_layer)
    if config.model.enable_activation_offload:
        keep_inputs_on_host(model)
    if adapts(config.model):
        add_adapters(model, config.model, DTYPES[actor.fsdp_config.model_dtype])
    if actor.freeze_vision_tower:
        freeze_vision_tower(model)
