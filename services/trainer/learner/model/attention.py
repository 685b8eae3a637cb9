"""Attention over a packed micro-batch, as an implementation transformers models can be told to use.

Linear layers, norms and embeddings of the model run on the packed tokens; only here are they
gathered into the blocks of a `PackedLayout`, attended, and brought back into packed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.trainer.learner.batch.packing import AttentionBlock, PackedLayout
from sluice.errors import ConfigError

PACKED_ATTENTION = "sluice_packed"

_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence and, from a row, to its prompt.

    Args:
        module: the model's attention layer.
        query: [1, heads, T, head dim].
        key: [1, kv heads, T, head dim]; heads are a multiple of kv heads.
        value: [1, kv heads, T, value dim].
        attention_mask: must be ``None``; the layout says who sees whom.
        scaling: factor on the scores; ``None``: 1 / sqrt(head dim).
        dropout: attention dropout, 0 in this trainer.
        packed_layout: passed to the model's forward and handed down by it.

    Returns:
        [1, T, heads, value dim], and no weights.

    Raises:
        ConfigError: the model does not hand the layout down, or its attention needs what is not
            honoured here (sliding window, soft capping, sinks, position bias).
    """
    if packed_layout is None:
        raise ConfigError(
            f"model.path: {type(module).__name__} does not hand keyword arguments of the model's "
            "forward to its attention, which packing needs; choose another model family"
        )
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window >= packed_layout.longest:
        del kwargs["sliding_window"]  # reaches over every sequence, hides nothing
    _refuse(module, attention_mask, kwargs)
    heads, kv_heads = query.shape[1], key.shape[1]
    blocks = packed_layout.blocks
    query_index = [block.query_index for block in blocks]
    key_index = [block.key_index for block in blocks]
    queries = _gather(query.to(value.dtype), query_index, heads)
    keys = _gather(key.to(value.dtype), key_index, kv_heads)
    values = _gather(value, key_index, kv_heads)
    outputs = []
    for block, q, k, v in zip(blocks, queries, keys, values, strict=True):
        attended = _attend(q, k, v, block, scaling, dropout)
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    packed = joined.index_select(0, packed_layout.output_index)
    return packed.view(1, packed.shape[0], heads, -1), None


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` known to transformers.

    No mask function is registered under the name: transformers then builds no mask at all.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _refuse(
    module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, object]
) -> None:
    where = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(
            f"model.path: {where} builds an attention mask of its own, which packing would ignore; "
            "choose another model family"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"model.path: {where} uses {name}, which sluice's trainer does "
                "not compute; choose a model with plain causal attention"
            )


def _gather(states: Tensor, indexes: Sequence[Tensor], heads: int) -> list[Tensor]:
    """[1, heads, T, dim] by blocks of indexes [B, L], each as [B, heads, L, dim].

    All blocks are gathered by one call, and their gradients brought back by one. Without gradients
    that holds more memory than block after block would: all of a layer's at once.
    """
    packed = states.squeeze(0).transpose(0, 1).flatten(1)  # no copy where a projection made it
    rows = packed.index_select(0, torch.cat([index.flatten() for index in indexes]))
    parts = rows.split([index.numel() for index in indexes])
    return [
        part.view(*index.shape, heads, -1).transpose(1, 2)
        for part, index in zip(parts, indexes, strict=True)
    ]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: AttentionBlock,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    if block.mask is not None and query.device.type != "cpu":
        # With a mask, accelerators leave the fused kernels unless the heads agree in number.
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=block.mask,
        dropout_p=dropout,
        is_causal=block.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
