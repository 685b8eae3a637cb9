"""What a trainer rank holds in host memory, and the experts that it keeps to replay them."""

from __future__ import annotations

from sluice.config.derived import (
    adapts,
    max_row_tokens,
    replays_engine_routing,
    rows_per_batch,
    taken_samples_mb,
    uses_critic,
    uses_reference,
    world_size,
)
from sluice.config.memory.shape import ModelShape
from sluice.config.parallel_layout import trainer_layout
from sluice.config.run import RunConfig

MIB = 1 << 20


def has_reference_model(config: RunConfig) -> bool:
    """Return whether a second model computes the reference's logprobs; adapters need none."""
    return uses_reference(config) and not adapts(config.actor_rollout_ref.model)


def rank_host_bytes(config: RunConfig, shape: ModelShape, weights: float, moments: float) -> float:
    """Return the most bytes that a rank on a device holds in host memory during a run.

    They are the reference's shards, the policy's while another model has the device, offloaded
    moments, copies that a checkpoint is written from, a batch, and the engine's experts.

    Args:
        weights: bytes of the rank's shards of the policy.
        moments: bytes of its moments, wherever they are.
    """
    actor, sharding = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.fsdp_config
    reference = weights * has_reference_model(config)
    gives_way = sharding.param_offload and (has_reference_model(config) or uses_critic(config))
    away = moments * sharding.optimizer_offload_fraction * sharding.optimizer_offload
    copies = (weights + moments) * actor.checkpoint.async_save
    batch = taken_samples_mb(config, trainer_layout(config, world_size(config)).data_ranks) * MIB
    routing = _engine_expert_bytes(config, shape)
    return reference + weights * gives_way + away + copies + batch + routing


def batch_expert_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the engine's experts of a batch of longest rows; 0 without R3."""
    if not replays_engine_routing(config):
        return 0
    return rows_per_batch(config) * max_row_tokens(config.data) * shape.expert_bytes_per_token


def replayed_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes on a device of the experts of a step's rows, which later passes follow."""
    if config.actor_rollout_ref.actor.router_replay.mode == "disabled":
        return 0.0
    return _packed_tokens(config) * shape.expert_bytes_per_token / world_size(config)


def _engine_expert_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return those of a rank's rows, as they came and packed."""
    came = batch_expert_bytes(config, shape) / trainer_layout(config, world_size(config)).data_ranks
    return came + replayed_bytes(config, shape) if came else 0.0


def _packed_tokens(config: RunConfig) -> int:
    data = config.data
    prompts = data.train_batch_size * data.max_prompt_length  # a group computes its prompt once
    return prompts + rows_per_batch(config) * data.max_response_length
