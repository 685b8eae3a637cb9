"""Attention over packed sequences, as an attention function for transformers' models.

Linear layers, norms and embeddings of the model run on the packed tokens. Only attention gathers
them into the blocks of a `PackedLayout` and brings the results back into packed order, or calls
variable-length FlashAttention on all sequences end to end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.trainer.learner.batch.micro_batch import (
    AttentionBlock,
    Gathering,
    PackedLayout,
    RaggedSequences,
)
from sluice.errors import ConfigError

PACKED_ATTENTION = "sluice_packed"
varlen_attn: Any = None
_VARLEN_OPTIONS: frozenset[str] = frozenset()
with suppress(ImportError):  # missing in torch 2.9, with another signature in 2.10
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)

RAGGED_DTYPES = frozenset({torch.bfloat16})
_LARGEST_RAGGED_HEAD = 256
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence and, from a row, to its prompt.

    Args:
        query: [1, heads, T, head dim].
        key: [1, kv heads, T, head dim]; heads are a multiple of kv heads.
        value: [1, kv heads, T, value dim].
        attention_mask: must be ``None``; the layout defines which token sees which.
        scaling: factor on the scores; ``None``: 1 / sqrt(head dim).
        packed_layout: the layout, passed on by the model's forward.

    Returns:
        [1, T, heads, value dim], and ``None`` for attention weights.

    Raises:
        ConfigError: the model does not pass the layout on, or its attention needs a feature that
            is missing here (sliding window, soft capping, sinks, position bias).
    """
    if packed_layout is None:
        raise ConfigError(
            f"model.path: {type(module).__name__} does not pass keyword arguments of the model's "
            "forward on to its attention, which packing needs; choose another model family"
        )
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window >= packed_layout.longest:
        del kwargs["sliding_window"]  # longer than every sequence: it hides nothing
    _refuse_unsupported(module, attention_mask, kwargs)
    query, key, share = query.to(value.dtype), key.to(value.dtype), packed_layout.share
    if share is None:
        return _attend(query, key, value, packed_layout, scaling), None
    tokens = packed_layout.outputs.index.numel()
    query, key, value = share.tokens_for_heads(query, key, value, tokens)
    attended = _attend(query, key, value, packed_layout, scaling)
    return share.heads_for_tokens(attended), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None
) -> Tensor:
    """Attend over all tokens of some heads; shapes as in `packed_attention`."""
    if layout.ragged is not None and _takes_ragged(query, value):
        return _attend_ragged(query, key, value, layout.ragged, scaling)
    blocks = layout.blocks
    queries = _gather(query, layout.queries, [block.query_shape for block in blocks])
    shapes = [block.key_shape for block in blocks]
    keys, values = (_gather(states, layout.keys, shapes) for states in (key, value))
    outputs = []
    for block, q, k, v in zip(blocks, queries, keys, values, strict=True):
        attended = _attend_block(q, k, v, block, scaling)
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    packed: Tensor = _Gathered.apply(joined, layout.outputs)  # type: ignore[no-untyped-call]
    return packed.view(1, packed.shape[0], query.shape[1], -1)


# No mask function has that name, so transformers builds no mask at all.
AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _refuse_unsupported(
    module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, object]
) -> None:
    class_name = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(
            f"model.path: {class_name} builds its own attention mask, which packing would ignore; "
            "choose another model family"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"model.path: {class_name} uses {name}, which sluice's trainer does "
                "not compute; choose a model with plain causal attention"
            )


class _GatheringContext(FunctionCtx):
    gathering: Gathering


class _Gathered(torch.autograd.Function):
    """Gather [T, ...] into [P, ...]. Only gradients of values gathered more than once (prompts that
    rows share) are added up, since a GPU's atomic sums are slow.
    """

    @staticmethod
    def forward(ctx: _GatheringContext, packed: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering = gathering
        return packed.index_select(0, gathering.index)

    @staticmethod
    def backward(ctx: _GatheringContext, of_places: Tensor) -> tuple[Tensor, None]:
        gathering = ctx.gathering
        gradient = of_places.index_select(0, gathering.places).index_fill_(0, gathering.unused, 0.0)
        if gathering.extra.numel():
            gradient.index_add_(0, gathering.of_extra, of_places.index_select(0, gathering.extra))
        return gradient, None


def _gather(states: Tensor, gathering: Gathering, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Gather states [1, heads, T, dim] into blocks of shapes [B, L]: [B, heads, L, dim] each.

    One call gathers all blocks, and one returns their gradients. Without gradients this needs more
    memory than gathering block by block: all blocks of a layer at once.
    """
    heads = states.shape[1]
    packed = states.squeeze(0).transpose(0, 1).flatten(1)  # a view of a projection's output
    rows: Tensor = _Gathered.apply(packed, gathering)  # type: ignore[no-untyped-call]
    parts = rows.split([math.prod(shape) for shape in shapes])
    return [
        part.view(*shape, heads, -1).transpose(1, 2)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scaling: float | None
) -> Tensor:
    if block.mask is not None and query.device.type != "cpu":
        # With a mask, accelerators have fused kernels only for equal numbers of heads.
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=block.mask,
        is_causal=block.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _takes_ragged(query: Tensor, value: Tensor) -> bool:
    """Return whether FlashAttention takes these heads."""
    width = value.shape[-1]
    has_size = query.shape[-1] == width and width % 8 == 0 and width <= _LARGEST_RAGGED_HEAD
    return has_size and value.dtype in RAGGED_DTYPES and "window_size" in _VARLEN_OPTIONS


def _attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, ragged: RaggedSequences, scaling: float | None
) -> Tensor:
    """Attend over sequences end to end; shapes as in `packed_attention`."""
    queries, keys, values = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    # Since torch 2.12 grouped heads are an option; before, the kernel accepts them as they are.
    grouped = {"enable_gqa": True} if "enable_gqa" in _VARLEN_OPTIONS else {}
    output: Tensor = varlen_attn(
        queries,
        _Gathered.apply(keys, ragged.keys),  # type: ignore[no-untyped-call]
        _Gathered.apply(values, ragged.keys),  # type: ignore[no-untyped-call]
        ragged.query_ends,
        ragged.key_ends,
        ragged.longest_query,
        ragged.longest_key,
        scale=scaling,
        window_size=(-1, 0),  # causal
        **grouped,
    )
    return output.unsqueeze(0)
