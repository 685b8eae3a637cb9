"""One engine: its sizes by the configuration, and the memory of one of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config.derived import max_row_tokens
from sluice.config.memory.shape import DTYPE_BYTES, ModelShape
from sluice.config.run import RunConfig

GIB = 1 << 30
_FIT_BYTES = 2
"""The guide's rule counts bfloat16 weights, whatever the engine's quantisation."""


def in_gib(size: float) -> str:
    """Return bytes as a number of GiB for tables."""
    return f"{size / GIB:.2f}"


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """One engine.

    Args:
        tp: tensor parallel size.
        ep: expert parallel size; 1: experts are cut like everything else, by `tp`.
        utilization: share of the device the engine may fill, graphs excepted.
        weight_bytes: 2 for bfloat16, 1 for fp8.
        batched_tokens: token budget of one engine step.
        max_num_seqs: sequences that run at once.
        longest_row: prompt and response, tokens.
    """

    tp: int
    ep: int
    utilization: float
    weight_bytes: int
    kv_bytes: int
    batched_tokens: int
    max_num_seqs: int
    longest_row: int


def rollout_layout(config: RunConfig) -> RolloutLayout:
    """Return the sizes that the configuration gives an engine."""
    rollout = config.actor_rollout_ref.rollout
    return RolloutLayout(
        tp=rollout.tensor_model_parallel_size,
        ep=rollout.expert_parallel_size,
        utilization=rollout.gpu_memory_utilization,
        weight_bytes=1 if rollout.quantization == "fp8" else DTYPE_BYTES[rollout.dtype],
        kv_bytes=DTYPE_BYTES[rollout.dtype],
        batched_tokens=rollout.max_num_batched_tokens,
        max_num_seqs=rollout.max_num_seqs,
        longest_row=max_row_tokens(config.data),
    )


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Bytes on one device; the last three need the device's size and are `None` without it."""

    weights: float
    activations: float
    kv_per_token: int
    kv_of_all_sequences: int
    kv_cache: float | None
    kv_tokens: int | None
    longest_rows: int | None


def rollout_memory(
    shape: ModelShape, layout: RolloutLayout, device_bytes: float | None
) -> RolloutMemory:
    """Estimate an engine's memory; the cache gets what weights and activations leave."""
    weights, activations = engine_weights(shape, layout), engine_activations(shape, layout)
    per_token = kv_bytes_per_token(shape, layout.tp, layout.kv_bytes)
    longest_cache = per_token * layout.longest_row * layout.max_num_seqs
    if device_bytes is None:
        return RolloutMemory(weights, activations, per_token, longest_cache, None, None, None)
    cache = max(device_bytes * layout.utilization - weights - activations, 0.0)
    tokens = int(cache // per_token)
    return RolloutMemory(
        weights, activations, per_token, longest_cache, cache, tokens, tokens // layout.longest_row
    )


def engine_weights(shape: ModelShape, layout: RolloutLayout) -> float:
    """Return the bytes of weights on a device: all over `tp`, but experts over `ep` if used."""
    experts = shape.expert_parameters / (layout.ep if layout.ep > 1 else layout.tp)
    shared = (shape.total_parameters - shape.expert_parameters) / layout.tp
    return (experts + shared) * layout.weight_bytes


def engine_activations(shape: ModelShape, layout: RolloutLayout) -> float:
    """Return the bytes of one step: residual stream, widest MLP, and float32 logits."""
    widest = 2 * shape.hidden + 2 * shape.mlp_width / layout.tp
    return layout.batched_tokens * widest * 2 + layout.max_num_seqs * shape.vocab * 4


def kv_bytes_per_token(shape: ModelShape, tp: int, kv_bytes: int = 2) -> int:
    """Return the cache bytes of a token on one device: key and value of each layer.

    Heads are cut by `tp`; below one head per device they are replicated.
    """
    heads = -(-shape.kv_heads // tp)
    return 2 * shape.layers * heads * shape.head_dim * kv_bytes


def smallest_tensor_parallel(
    shape: ModelShape, device_bytes: float, utilization: float
) -> int | None:
    """Return the smallest size that fits: memory × utilization × TP > parameters × 2 bytes.

    Only sizes that divide the attention heads are possible; `None` if not even all heads' number
    of devices is enough.
    """
    needed_bytes = shape.total_parameters * _FIT_BYTES
    sizes = (size for size in range(1, shape.heads + 1) if shape.heads % size == 0)
    return next((tp for tp in sizes if device_bytes * utilization * tp > needed_bytes), None)


def fits(shape: ModelShape, layout: RolloutLayout, device_bytes: float) -> bool:
    """Return whether that rule holds for the layout's own tensor parallel size."""
    return device_bytes * layout.utilization * layout.tp > shape.total_parameters * _FIT_BYTES
