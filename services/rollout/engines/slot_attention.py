"""Attention over the slot cache, and its registration with transformers.

Decode folds the query heads that share a key/value head into the query length, so keys and values
are never repeated (grouped-query attention, Ainslie et al., 2023), and reads only the part of the
cache in use. Transformers models find it under `NAME`; they pass only the new tokens' keys and
values, and the running `SlotForward` of this thread says where these belong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.rollout.engines.slots import SlotCache

__all__ = [
    "NAME",
    "CausalBias",
    "DecodeForward",
    "PrefillForward",
    "decode_attention",
    "prefill_attention",
    "register",
    "slot_forward",
]

NAME = "sluice_slots"


class CausalBias:
    """Rows of additive masks: 0 up to a position, minus infinity behind it.

    All rows are windows of one vector, so looking them up costs one copy and needs no memory of
    the square of the length.
    """

    def __init__(self, max_model_len: int, device: torch.device) -> None:
        self._last = max_model_len - 1
        steps = torch.zeros(2 * max_model_len, dtype=torch.float32, device=device)
        steps[max_model_len:] = -torch.inf
        self._windows = steps.as_strided((max_model_len, max_model_len), (1, 1))

    def rows(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """[rows, length] float32 for [rows] positions below `length`."""
        # Window w is zero up to index last + 0 - w: a row at position p is window last - p.
        return self._windows[:, :length].index_select(0, self._last - positions)


def _soften(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis of [..., heads, queries, keys]; `sinks` [heads, 1, 1] join it."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def decode_attention(
    queries: torch.Tensor,
    cache: SlotCache,
    layer: int,
    bias: torch.Tensor,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query token per row over the rows' cached tokens.

    Args:
        queries: [rows, heads, head dim], already scaled.
        bias: [rows, length] float32, additive.
        softcap: bound of the scores, x -> c tanh(x / c).
        sinks: [heads] extra logits without a value.

    Returns:
        [rows, heads, value head dim], contiguous.
    """
    cache_k, cache_v = cache.keys[layer], cache.values[layer]
    rows, heads, key_dim = queries.shape
    kv_heads, length = cache_k.shape[1], bias.shape[1]
    pairs, group = rows * kv_heads, heads // kv_heads
    keys = cache_k.view(-1, cache_k.shape[2], key_dim)[:pairs, :length]
    values = cache_v.view(-1, cache_v.shape[2], cache_v.shape[3])[:pairs, :length]
    scores = torch.bmm(queries.reshape(pairs, group, key_dim), keys.transpose(1, 2))
    scores = _soften(scores.view(rows, heads, length), softcap)
    scores = scores.add_(bias[:, None]) if scores.dtype == bias.dtype else scores + bias[:, None]
    weights = _weights(scores, None if sinks is None else sinks[:, None]).to(values.dtype)
    return torch.bmm(weights.reshape(pairs, group, length), values).view(rows, heads, -1)


def prefill_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of prompts over themselves; padding on the right needs no mask.

    Args:
        queries: [prompts, heads, tokens, head dim]; keys and values have kv heads.
        window: how many tokens each sees, itself included; ``None`` for all.

    Returns:
        [prompts, heads, tokens, value head dim].
    """
    heads, tokens = queries.shape[1:3]
    grouped = heads != keys.shape[1]
    windowed = window is not None and window < tokens
    if not windowed and softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device).tril_()
    if windowed and window is not None:
        seen = seen.triu_(1 - window)
    scores = _soften((queries @ keys.transpose(2, 3)).float() * scaling, softcap)
    scores = scores.masked_fill_(~seen, -torch.inf)
    weights = _weights(scores, None if sinks is None else sinks[:, None, None])
    return weights.to(values.dtype) @ values


@dataclass(slots=True, eq=False)
class PrefillForward:
    """A forward pass over prompts; collects each layer's keys and values."""

    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    windowed: bool = False


@dataclass(slots=True, eq=False)
class DecodeForward:
    """A forward pass over the rows' newest tokens; `layer` counts attention calls."""

    cache: SlotCache
    positions: torch.Tensor  # [rows]
    bias: torch.Tensor  # [rows, length]
    layer: int = 0
    _biases: dict[int, torch.Tensor] = field(default_factory=dict)
    _indexes: dict[int, torch.Tensor] = field(default_factory=dict)

    def windowed_bias(self, window: int | None) -> torch.Tensor:
        """The bias for a sliding window of so many tokens."""
        if window is None or window >= self.bias.shape[1]:
            return self.bias
        if window not in self._biases:
            keys = torch.arange(self.bias.shape[1], device=self.bias.device)
            hidden = keys <= self.positions[:, None] - window
            self._biases[window] = self.bias.masked_fill(hidden, -torch.inf)
        return self._biases[window]

    def token_index(self, heads: int) -> torch.Tensor:
        """Where the new tokens go in the cache, for layers with so many kv heads."""
        if heads not in self._indexes:
            self._indexes[heads] = self.cache.token_index(heads, self.positions)
        return self._indexes[heads]


class _Running(threading.local):
    forward: PrefillForward | DecodeForward | None = None


_running = _Running()


@contextmanager
def slot_forward(forward: PrefillForward | DecodeForward) -> Iterator[None]:
    """Makes `forward` the one that model calls of this thread belong to."""
    _running.forward = forward
    try:
        yield
    finally:
        _running.forward = None


def _attend(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: heads before tokens in, tokens before heads out."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    forward = _running.forward
    if isinstance(forward, PrefillForward):
        forward.layers.append((key, value))
        forward.windowed |= sliding_window is not None
        out = prefill_attention(
            query, key, value, scaling=scale, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        return out.transpose(1, 2).contiguous(), None
    if forward is None:
        raise RuntimeError(f"attention {NAME!r} was called outside a slot engine's forward pass")
    layer, forward.layer = forward.layer, forward.layer + 1
    index = forward.token_index(key.shape[1])
    forward.cache.append(layer, index, key[:, :, 0], value[:, :, 0])
    out = decode_attention(
        query[:, :, 0] * scale,
        forward.cache,
        layer,
        forward.windowed_bias(sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    return out[:, None], None


def register() -> None:
    """Makes `NAME` known to transformers as an attention that needs no mask. Repeatable."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
