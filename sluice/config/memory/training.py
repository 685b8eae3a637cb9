"""One trainer: its sizes by the configuration, a guess of a rank's memory in no time, and the
operations of a step.

`sluice plan` counts by running the trainer's own code; the guess says which of many layouts are
worth counting, and which models are too small for it. Activations follow the counting of
Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", sections 4
and 5) for gated MLPs, grouped-query attention and a fused attention kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sluice.config.derived import (
    adapts_experts,
    holds_whole_model,
    is_bypassed,
    max_row_tokens,
    uses_adapters,
    uses_reference,
    world_size,
)
from sluice.config.memory.shape import DTYPE_BYTES, ModelShape, causal_pairs
from sluice.config.run import RunConfig
from sluice.config.sources import responses_per_step

MEAN_RESPONSE = 0.5
"""Mean length of a response over the longest: unknown before a run."""
_FORWARD = 1 / 3
"""Of a forward and a backward pass, the forward pass."""
_ADAPTERS = 2 / 3
"""Of both, without the gradients of frozen weights."""
_HEAD_BYTES = 4 + 2 + 2
"""Per weight of the head: its gradient adds up in float32, beside a block's product and the
result."""


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """Sizes and switches of one trainer.

    Args:
        world: trainer ranks.
        shard: ranks that divide one copy of weights, gradients and optimizer; 1: each has a copy.
        gathers: passes gather a layer's weights in the compute dtype (FSDP2, also on one rank).
        micro_tokens: tokens of a training micro-batch on one device, after sequence parallelism.
        tensor: those of `shard` that cut each matrix among them.
        pipeline: stages; each has a part of the layers and of the ranks.
        ep: ranks that divide the experts.
        master_bytes: bytes of a stored parameter (4 for float32).
        compute_bytes: bytes of a parameter and an activation in a forward pass (2 for bfloat16).
        gradient_checkpointing: backward passes recompute layers.
        recomputed_layers: layers, from the first, that are recomputed then; `None`: all.
        moments_on_device: share of the moments that is not on the host.
        adapter_rank: of adapters beside frozen weights, which are stored in `compute_bytes`; 0: all
            weights are trained.
        adapts_experts: experts get adapters too, if their family's take any.
        whole_gradients: gradients are added up whole on each rank before they are summed.
    """

    world: int
    micro_tokens: int
    shard: int = 1
    gathers: bool = True
    tensor: int = 1
    pipeline: int = 1
    ep: int = 1
    master_bytes: int = 4
    compute_bytes: int = 2
    gradient_checkpointing: bool = False
    recomputed_layers: int | None = None
    activation_offload: bool = False
    moments_on_device: float = 1.0
    reshard_after_forward: bool = True
    whole_gradients: bool = False
    adapter_rank: int = 0
    adapts_experts: bool = True

    def recomputed_of(self, layers: int) -> int:
        """Return how many of so many layers the backward pass recomputes."""
        if not self.gradient_checkpointing:
            return 0
        return layers if self.recomputed_layers is None else min(self.recomputed_layers, layers)


def training_layout(config: RunConfig) -> TrainingLayout:
    """Return the sizes that the configuration gives a trainer.

    ``fsdp_size`` ranks of each tensor index share a copy.
    """
    world, sharding = world_size(config), config.actor_rollout_ref.actor.fsdp_config
    model, megatron = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.megatron
    recompute = megatron.override_transformer_config
    granularity, is_block = recompute.recompute_granularity, recompute.recompute_method == "block"
    tensor = sharding.tensor_parallel_size
    peers = max(1, world // (tensor * sharding.pipeline_parallel_size))
    shard = tensor * (sharding.fsdp_size if 0 < sharding.fsdp_size < peers else peers)
    is_whole = holds_whole_model(sharding, shard)
    return TrainingLayout(
        world=world,
        shard=1 if is_whole else shard,
        gathers=not is_whole,
        reshard_after_forward=sharding.reshard_after_forward,
        whole_gradients=sharding.use_no_sync_for_gradient_accumulation
        or sharding.pipeline_parallel_size > 1,
        tensor=tensor,
        pipeline=sharding.pipeline_parallel_size,
        ep=sharding.expert_parallel_size,
        micro_tokens=_micro_tokens(config, ranks=sharding.ulysses_sequence_parallel_size),
        master_bytes=DTYPE_BYTES[sharding.model_dtype],
        compute_bytes=DTYPE_BYTES[sharding.dtype],
        gradient_checkpointing=granularity == "full"
        or (granularity is None and model.enable_gradient_checkpointing),
        recomputed_layers=recompute.recompute_num_layers
        if granularity == "full" and is_block
        else None,
        activation_offload=model.enable_activation_offload,
        moments_on_device=1 - sharding.optimizer_offload_fraction * sharding.optimizer_offload,
        adapter_rank=model.lora_rank,
        adapts_experts=adapts_experts(model),
    )


def _micro_tokens(config: RunConfig, *, ranks: int) -> int:
    """Return the most tokens of a micro-batch on one device.

    The token budget is per device already; rows of a fixed micro-batch are cut by `ranks`.
    """
    actor, longest = config.actor_rollout_ref.actor, max_row_tokens(config.data)
    if actor.use_dynamic_bsz:
        return max(actor.ppo_max_token_len_per_gpu, -(-longest // ranks))
    return -(-(actor.ppo_micro_batch_size_per_gpu or 1) * longest // ranks)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device in an update: of weights, gradients and moments, and of the rest."""

    state: float
    rest: float

    @property
    def peak(self) -> float:
        """Peak of the update."""
        return self.state + self.rest

    def corrected(self, correction: float) -> float:
        """Return the peak, if so many bytes of the rest were counted for one guessed."""
        return self.state + self.rest * correction

    def correction(self, peak: float) -> float:
        """Return that ratio, from the counted peak."""
        return (peak - self.state) / self.rest


def guessed_memory(shape: ModelShape, layout: TrainingLayout) -> MemoryEstimate:
    """Guess the memory of the device that holds most."""
    head = 0.0 if layout.adapter_rank else _HEAD_BYTES * shape.embedding_parameters / layout.tensor
    return MemoryEstimate(
        _state_bytes(shape, layout),
        _gathered_bytes(shape, layout) + _activation_bytes(shape, layout) + head,
    )


def _state_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes of parameters, gradients and moments on one device."""
    ranks, experts = layout.shard, shape.expert_parameters * _expert_share(shape, layout)
    weights = _dense_parameters(shape, layout) / ranks + experts / layout.pipeline
    parameters = trained = weights * layout.master_bytes
    if layout.adapter_rank:
        adapters = shape.adapter_parameters(layout.adapter_rank, experts=layout.adapts_experts)
        trained = adapters / (ranks * layout.pipeline) * layout.master_bytes
        parameters = weights * layout.compute_bytes + trained
    gradients = trained * ranks / layout.tensor if layout.whole_gradients else trained
    return parameters + gradients + 2 * trained * layout.moments_on_device


def _dense_parameters(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return a stage's parameters that are no experts'; it has one matrix of the vocabulary."""
    dense = shape.total_parameters - shape.expert_parameters
    if layout.pipeline == 1:
        return dense
    layers = (dense - shape.vocabulary_parameters) / layout.pipeline
    return layers + shape.embedding_parameters


def _expert_share(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the share of the experts on the fullest rank: FSDP2 cuts between whole experts.

    Only experts that ranks divide are cut within, each matrix whose rows are a multiple of the
    ranks: gate and up together, two thirds, and down.
    """
    if not shape.experts:
        return 0.0
    per_rank, over = shape.experts // layout.ep, max(layout.shard // layout.ep, 1)
    share = 0.0
    for part, rows in ((2 / 3, 2 * shape.expert_intermediate), (1 / 3, shape.hidden)):
        is_even = layout.ep * layout.tensor > 1 and rows % over == 0
        share += part * (
            1 / layout.shard if is_even else math.ceil(per_rank / over) / shape.experts
        )
    return share


def _gathered_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes of parameters that are gathered in the compute dtype."""
    if not layout.gathers:
        return 0.0
    if not layout.reshard_after_forward:
        experts = shape.expert_parameters / (layout.ep * layout.pipeline)
        parameters = _dense_parameters(shape, layout) / layout.tensor + experts
        return parameters * layout.compute_bytes
    # The root unit (vocabulary matrices) stays whole; one layer works while the next arrives.
    # Experts that ranks divide are gathered among those that hold the same ones.
    experts = shape.expert_parameters / shape.layers
    layer = (shape.layer_parameters - experts) / layout.tensor + experts / layout.ep
    is_whole = layout.pipeline == 1
    vocabulary = shape.vocabulary_parameters if is_whole else shape.embedding_parameters
    units = vocabulary / layout.tensor + 2 * layer
    return units * layout.compute_bytes


def activation_values(shape: ModelShape) -> int:
    """Return the values that one layer keeps per token for its backward pass (2 bytes each).

    A norm that computes in float32, as Transformers' do, keeps a float32 copy of its input, the
    normalised values and its output: 4h for each of the two, and three times the heads' width more
    where queries and keys are normalised. Attention keeps queries and its output (2Hd), keys and
    values (2KVd); the gated MLP gate, its activation, up and the product (4 times its width);
    routing the permuted copies of each token's input and output.
    """
    norms = 8 * shape.hidden
    if shape.qk_norm:
        norms += 3 * (shape.query_width + shape.kv_width)
    attention = 2 * shape.query_width + 2 * shape.kv_width
    routing = 2 * shape.experts_per_token * shape.hidden if shape.expert_layers else 0
    return norms + attention + 4 * shape.mlp_width + routing


def _activation_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes that all layers keep, and the bytes of the layer at work."""
    # Ranks that cut a layer divide what it keeps, but for two inputs, which they gather whole.
    part = 1 / layout.tensor
    values = activation_values(shape) * part + 2 * shape.hidden * (1 - part)
    layer = values * layout.micro_tokens * layout.compute_bytes
    inputs = part * shape.hidden * layout.micro_tokens * layout.compute_bytes
    if layout.activation_offload:
        # The layer at work and the inputs that are on their way to and from the host.
        return layer + 2 * inputs
    recomputed = layout.recomputed_of(shape.layers)
    not_recomputed = shape.layers - recomputed
    return recomputed * inputs + not_recomputed * layer + (layer if recomputed else 0.0)


def group_flops(config: RunConfig, shape: ModelShape) -> float:
    """Return the operations of all passes over one group: a prompt once, and its responses.

    Each epoch has a forward and a backward pass, which computes recomputed layers again. Passes
    without gradients compute the reference's logprobs, and old ones of all mini-batches but the
    first, unless the behavior policy's are taken. Critic and images do not count. Of several
    sources it is the mean group of a batch.
    """
    data, actor = config.data, config.actor_rollout_ref.actor
    n, prompt = responses_per_step(config) / data.train_batch_size, data.max_prompt_length
    response = data.max_response_length * MEAN_RESPONSE
    tokens = prompt + n * response
    pairs = causal_pairs(prompt) + n * (response * prompt + causal_pairs(response))
    passes = shape.training_flops(tokens, n * response, pairs)
    update = passes * (_ADAPTERS if uses_adapters(config.actor_rollout_ref.model) else 1)
    layout = training_layout(config)
    again = layout.recomputed_of(shape.layers) / shape.layers
    update += again * shape.training_flops(tokens, 0, pairs) * _FORWARD
    old_share = 0.0
    if not (actor.use_rollout_log_probs or is_bypassed(config)):
        old_share = max(0.0, 1 - actor.ppo_mini_batch_size / data.train_batch_size)
    return actor.ppo_epochs * update + (old_share + uses_reference(config)) * passes * _FORWARD
