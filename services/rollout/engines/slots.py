"""The slot cache: keys and values of every row, preallocated.

Per layer one tensor [slots, kv heads, 2, max_model_len, head dim], keys at 0 and values at 1 of the
third axis. So a token's keys and values are written in place by one copy, and those of any number
of leading rows are batches of matrices without a copy. A prefilled prompt is copied into the rows
of its samples; a freed row is filled by moving another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.rollout.engines.decoder import PrefilledPrompts, Rows

__all__ = ["LayerShape", "SlotCache"]

LayerShape = tuple[int, int, int]
"""KV heads, key head dim, value head dim."""


class SlotCache:
    """Keys and values of all layers.

    Args:
        shapes: of each layer. Where key and value dims differ, the narrower one is padded.
        slots: rows.
        max_model_len: positions a row may have.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = tuple(shapes)
        # Zeros, not empty: masked positions still meet a zero weight, and 0 * inf is nan.
        sizes = [(slots, heads, 2, max_model_len, max(k, v)) for heads, k, v in shapes]
        self._stack: torch.Tensor | None = None
        if len(set(shapes)) == 1:
            self._stack = torch.zeros(len(sizes), *sizes[0], dtype=dtype, device=device)
            self._layers = list(self._stack.unbind(0))
        else:
            self._layers = [torch.zeros(*size, dtype=dtype, device=device) for size in sizes]
        self._tokens = [layer.view(-1, layer.shape[-1]) for layer in self._layers]
        # Flat index of position 0 by slot, then key and value, then head: the order of `append`.
        self._starts = {
            heads: torch.arange(slots * heads * 2, device=device)
            .view(slots, heads, 2)
            .transpose(1, 2)
            .reshape(slots, 2 * heads)
            * max_model_len
            for heads, _, _ in shapes
        }

    def append_index(self, heads: int, positions: torch.Tensor) -> torch.Tensor:
        """Where `append` writes the rows' tokens at `positions`, for layers with so many heads."""
        return (self._starts[heads][: positions.shape[0]] + positions[:, None]).view(-1)

    def append(self, layer: int, index: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Writes one token per row.

        Args:
            index: of `append_index`.
            keys_values: [rows, 2 * kv heads, head dim], the keys of all heads before the values.
        """
        tokens = self._tokens[layer]
        tokens.index_copy_(0, index, keys_values.reshape(-1, tokens.shape[1]))

    def used(self, rows: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer the keys and values of the first rows, each [rows * kv heads, length, dim]."""
        heads, key_dim, value_dim = self._shapes[0]
        if self._stack is not None and key_dim == value_dim:
            # One view of all layers: slicing each would cost as much as a small matrix product.
            size = (len(self._layers), rows * heads, length, key_dim)
            per_layer, _, per_head, per_kind, per_token, _ = self._stack.stride()
            strides = (per_layer, per_head, per_token, 1)
            keys = self._stack.as_strided(size, strides).unbind(0)
            values = self._stack.as_strided(size, strides, per_kind).unbind(0)
            return list(zip(keys, values, strict=True))
        pairs = []
        for layer, (heads, key_dim, value_dim) in zip(self._layers, self._shapes, strict=True):
            part = layer.view(-1, *layer.shape[2:])[: rows * heads, :, :length]
            pairs.append((part[:, 0, :, :key_dim], part[:, 1, :, :value_dim]))
        return pairs

    def insert(self, prefilled: PrefilledPrompts, prompts: Rows, rows: Rows) -> None:
        """Copies prefilled prompts into rows, with the padding: it lies behind each position."""
        device = self._layers[0].device
        source, target = torch.from_numpy(prompts).to(device), torch.from_numpy(rows).to(device)
        for layer, (keys, values) in zip(self._layers, prefilled.layers, strict=True):
            layer[:, :, 0, : keys.shape[2], : keys.shape[3]][target] = keys[source]
            layer[:, :, 1, : values.shape[2], : values.shape[3]][target] = values[source]

    def move(self, sources: Rows, targets: Rows, length: int) -> None:
        """Copies `length` positions from rows to rows; the two sets share no row."""
        device = self._layers[0].device
        source, target = torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device)
        for layer in self._layers:
            part = layer[:, :, :, :length]
            part[target] = part[source]
