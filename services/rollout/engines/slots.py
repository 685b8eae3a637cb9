"""The slot cache: one preallocated key and value tensor per layer.

Each has the shape [slots, kv heads, max_model_len, head dim]. A token is written in place, a
prefilled prompt is copied into the rows of its samples, and a freed row is filled by moving another
one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engines.decoder import PrefilledPrompts

__all__ = ["SlotCache"]


class SlotCache:
    """Keys and values of all layers.

    Args:
        shapes: per layer (kv heads, key head dim, value head dim).
        slots: rows.
        max_model_len: positions a row may have.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        slots: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.max_model_len = slots, max_model_len
        # Zeros, not empty: masked positions still meet a zero weight, and 0 * inf is nan.
        self.keys = [
            torch.zeros(slots, heads, max_model_len, key_dim, dtype=dtype, device=device)
            for heads, key_dim, _ in shapes
        ]
        self.values = [
            torch.zeros(slots, heads, max_model_len, value_dim, dtype=dtype, device=device)
            for heads, _, value_dim in shapes
        ]
        self._offsets = {
            heads: torch.arange(slots * heads, device=device).view(slots, heads) * max_model_len
            for heads, _, _ in shapes
        }

    def token_index(self, heads: int, positions: torch.Tensor) -> torch.Tensor:
        """Where `append` writes: flat (slot, head, position) indexes, [rows * heads]."""
        return (self._offsets[heads][: positions.shape[0]] + positions[:, None]).view(-1)

    def append(
        self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes one token per row; `keys` and `values` are [rows, kv heads, head dim]."""
        cache_k, cache_v = self.keys[layer], self.values[layer]
        key_dim, value_dim = cache_k.shape[3], cache_v.shape[3]
        cache_k.view(-1, key_dim).index_copy_(0, index, keys.reshape(-1, key_dim))
        cache_v.view(-1, value_dim).index_copy_(0, index, values.reshape(-1, value_dim))

    def insert(self, prefilled: PrefilledPrompts, index: int, rows: npt.NDArray[np.int64]) -> None:
        """Copies a prefilled prompt into `rows`."""
        length = prefilled.lengths[index]
        for layer, (keys, values) in enumerate(prefilled.layers):
            target = torch.from_numpy(rows).to(keys.device)
            self.keys[layer][:, :, :length][target] = keys[index, :, :length]
            self.values[layer][:, :, :length][target] = values[index, :, :length]

    def move(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], length: int
    ) -> None:
        """Copies `length` positions from rows to rows; the two sets share no row."""
        for cache in (*self.keys, *self.values):
            used = cache[:, :, :length]
            used[torch.from_numpy(targets).to(cache.device)] = used[
                torch.from_numpy(sources).to(cache.device)
            ]
