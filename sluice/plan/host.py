"""What a trainer rank holds in host memory, and the experts that it keeps to replay them."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config.derived import (
    max_row_tokens,
    replays_engine_routing,
    rows_per_batch,
    taken_samples_mb,
    uses_adapters,
    uses_critic,
    uses_reference,
    world_size,
)
from sluice.config.memory.shape import DTYPE_BYTES, ImageEncoder, ModelShape
from sluice.config.parallel_layout import trainer_layout
from sluice.config.run import RunConfig
from sluice.config.schema.actor import FsdpConfig

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """A rank's shards of a model, in bytes, wherever they are.

    Attributes:
        trained: those weights that are trained: all, none, or adapters.
        moments: of AdamW.
    """

    weights: float = 0.0
    trained: float = 0.0
    moments: float = 0.0

    def with_part(self, part: ModelBytes) -> ModelBytes:
        """Return those of the model with one more part."""
        return ModelBytes(
            self.weights + part.weights, self.trained + part.trained, self.moments + part.moments
        )


def has_reference_model(config: RunConfig) -> bool:
    """Return whether a second model computes the reference's logprobs; adapters need none."""
    return uses_reference(config) and not uses_adapters(config.actor_rollout_ref.model)


def encoder_bytes(config: RunConfig, encoder: ImageEncoder | None) -> ModelBytes:
    """Return a rank's shards of the image encoder; adapters of its layers count as nothing."""
    if encoder is None:
        return ModelBytes()
    actor, is_adapted = (
        config.actor_rollout_ref.actor,
        uses_adapters(config.actor_rollout_ref.model),
    )
    sharding = actor.fsdp_config
    dtype = sharding.dtype if is_adapted else sharding.model_dtype
    # Ranks that cut layers share the encoder too.
    ranks = trainer_layout(config, world_size(config)).copy
    weights = encoder.parameters * DTYPE_BYTES[dtype] / ranks
    trained = 0.0 if is_adapted or actor.freeze_vision_tower else weights
    return ModelBytes(weights, trained, 2 * trained)


def rank_host_bytes(
    config: RunConfig, shape: ModelShape, decoder: ModelBytes, encoder: ImageEncoder | None
) -> float:
    """Return the most bytes that a rank on a device holds in host memory during a run.

    They are the reference's shards, the policy's while another model has the device, offloaded
    moments, a critic's weights and moments if they are offloaded, copies that a checkpoint is
    written from, a batch with the pixels of its images, and the engine's experts.

    Args:
        decoder: the policy without its image encoder; a critic counts the same.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    sharding, critic = actor.fsdp_config, config.critic.fsdp
    policy = decoder.with_part(encoder_bytes(config, encoder))
    total = policy.weights * has_reference_model(config)
    if has_reference_model(config) or uses_critic(config):
        total += policy.weights * sharding.param_offload
    total += policy.moments * offloaded_share(sharding)
    # A checkpoint has all of a model, or its adapters.
    saved = policy.moments + (policy.trained if uses_adapters(model) else policy.weights)
    if uses_critic(config):
        total += decoder.weights * critic.param_offload + decoder.moments * offloaded_share(critic)
        saved += decoder.weights + decoder.moments
    total += saved * actor.checkpoint.async_save
    batch = taken_samples_mb(config, trainer_layout(config, world_size(config)).data_ranks) * MIB
    return total + batch + _pixel_bytes(config, encoder) + _engine_expert_bytes(config, shape)


def offloaded_share(sharding: FsdpConfig) -> float:
    """Return the share of a model's moments that is in host memory."""
    return sharding.optimizer_offload_fraction * sharding.optimizer_offload


def _pixel_bytes(config: RunConfig, encoder: ImageEncoder | None) -> float:
    """Return those of a rank's rows if each prompt is one image from end to end."""
    if encoder is None:
        return 0.0
    data, layout = config.data, trainer_layout(config, world_size(config))
    # A prompt's rows may be on several ranks, and each reads its images.
    prompts = min(data.train_batch_size, -(-rows_per_batch(config) // layout.data_ranks))
    return prompts * data.max_prompt_length * encoder.pixel_bytes / layout.row_ranks


def batch_expert_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the engine's experts of a batch of longest rows; 0 without R3."""
    if not replays_engine_routing(config):
        return 0
    return rows_per_batch(config) * max_row_tokens(config.data) * shape.expert_bytes_per_token


def replayed_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes on a device of the experts of a step's rows, which later passes follow."""
    if config.actor_rollout_ref.actor.router_replay.mode == "disabled":
        return 0.0
    data = config.data
    tokens = data.train_batch_size * data.max_prompt_length  # a group computes its prompt once
    tokens += rows_per_batch(config) * data.max_response_length
    return tokens * shape.expert_bytes_per_token / world_size(config)


def _engine_expert_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return those of a rank's rows, as they came and packed."""
    data_ranks = trainer_layout(config, world_size(config)).data_ranks
    received = batch_expert_bytes(config, shape) / data_ranks
    return received + replayed_bytes(config, shape) if received else 0.0
