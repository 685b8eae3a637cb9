"""The preallocated keys and values of every slot, and attention over them.

Decode folds the query heads that share a key/value head into the query length, so keys and values
are never repeated (grouped-query attention, Ainslie et al., 2023), and reads only the used part of
the cache. Transformers models find the attention under `NAME`. They pass only the new tokens' keys
and values; the running forward of this thread knows where these belong.

A sample that ends leaves a copy of its keys and values in `PrefixCache`, under the name of its
conversation. A later prompt of that name takes what it shares with one of them, so that a retry, a
branch and each of several agents find their part too. The copies lie beside the slots: what runs
never waits for them.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.rollout.engines.embedded.decoder import (
    CachedPrefix,
    Decoder,
    PrefilledPrompts,
    Rows,
    TokenRow,
)
from sluice.errors import ConfigError
from sluice.vision.image_prompts import ImagePrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CacheShape = tuple[int, int, int]
"""Layers, KV heads, head dim."""
NAME = "sluice_slots"
_MAX_MASK_ELEMENTS = 1 << 27
"""Most elements of the mask for new tokens after a known prefix; a whole prompt needs no mask."""


class SlotCache:
    """Keys and values of all layers, in one tensor.

    Args:
        shape: the model's shape; equal for all layers, and for keys and values.
        slots: rows.
        max_model_len: most positions of a row.

    Raises:
        ConfigError: the device has no memory for them.
    """

    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers, self.heads, dim = shape
        # Zeros, not empty: masked positions still meet a zero weight, and 0 * inf is nan.
        size = (layers, slots, self.heads, 2, max_model_len, dim)
        try:
            self._stack = torch.zeros(size, dtype=dtype, device=device)
        except RuntimeError as error:  # also raised by a CPU without memory
            raise ConfigError(
                f"actor_rollout_ref.rollout.max_num_seqs={slots}: the cache of so many rows of "
                f"max_model_len {max_model_len} takes {math.prod(size) * dtype.itemsize / 1e9:.1f} "
                f"GB, which {device} does not have; lower one of them ({error})"
            ) from error
        self._layers = self._stack.unbind(0)
        self._tokens = self._stack.view(layers, -1, dim).unbind(0)
        # Flat index of position 0 by slot, then key and value, then head: the order of `append`.
        self._starts = (
            torch.arange(slots * self.heads * 2, device=device)
            .view(slots, self.heads, 2)
            .transpose(1, 2)
            .reshape(slots, 2 * self.heads)
            * max_model_len
        )

    def append_index(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where `append` writes the rows' tokens."""
        return (self._starts[: positions.shape[0]] + positions[:, None]).view(-1)

    def append(self, layer: int, index: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Write one token per row.

        Args:
            index: of `append_index`.
            keys_values: [rows, 2 * kv heads, head dim], the keys of all heads before the values.
        """
        tokens = self._tokens[layer]
        tokens.index_copy_(0, index, keys_values.reshape(-1, tokens.shape[1]))

    def views(self, rows: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of the first rows by layer: [rows * kv heads, length, dim]."""
        # One view of all layers: slicing each would cost as much as a small matrix product.
        per_layer, _, per_head, per_kind, per_token, _ = self._stack.stride()
        size = (len(self._layers), rows * self.heads, length, self._stack.shape[-1])
        strides = (per_layer, per_head, per_token, 1)
        keys = self._stack.as_strided(size, strides).unbind(0)
        values = self._stack.as_strided(size, strides, per_kind).unbind(0)
        return list(zip(keys, values, strict=True))

    def insert(self, prefilled: PrefilledPrompts, prompts: Rows, rows: Rows) -> None:
        """Copy prefilled prompts into rows, padding included: it lies after each position."""
        device = self._stack.device
        source, target = torch.from_numpy(prompts).to(device), torch.from_numpy(rows).to(device)
        for layer, pair in zip(self._layers, prefilled.layers, strict=True):
            for kind, new_states in enumerate(pair):
                layer[:, :, kind, : new_states.shape[2]][target] = new_states[source]

    def copy(self, row: int, length: int) -> torch.Tensor:
        """Return a copy of a row's first positions, [layers, kv heads, 2, length, dim]."""
        return self._stack[:, row, :, :, :length].clone()

    def move(self, sources: Rows, targets: Rows, length: int) -> None:
        """Copy `length` positions from rows to rows; the two sets share no row."""
        # So no copy overwrites what another one reads.
        device = self._stack.device
        source, target = torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device)
        for layer in self._layers:
            part = layer[:, :, :, :length]
            part[target] = part[source]


class CausalBias:
    """Rows of additive masks: 0 up to a position, minus infinity after it.

    All rows are windows of one vector. So a look-up costs one copy, and no memory that grows with
    the square of the length.
    """

    def __init__(self, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._last_position = max_model_len - 1
        steps = torch.zeros(2 * max_model_len, dtype=dtype, device=device)
        steps[max_model_len:] = -torch.inf
        self._windows = steps.as_strided((max_model_len, max_model_len), (1, 1))

    def rows(self, positions: torch.Tensor, length: int, kv_heads: int) -> torch.Tensor:
        """Return [rows * kv heads, 1, length] for [rows] positions below `length`."""
        # Window w is zero up to index last - w, so a row at position p is window last - p.
        windows = (self._last_position - positions)[:, None].expand(-1, kv_heads).reshape(-1)
        return self._windows.narrow(1, 0, length).index_select(0, windows).unsqueeze(1)


class SlotDecoder(Decoder):
    """Base of decoders with a slot cache; subclasses set their device first."""

    _device: torch.device

    def __init__(
        self, shape: CacheShape, slots: int, max_model_len: int, model: PreTrainedModel
    ) -> None:
        self._cache = SlotCache(shape, slots, max_model_len, model.dtype, model.device)
        self._bias = CausalBias(max_model_len, model.dtype, model.device)

    @abstractmethod
    def _compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        forward: PrefillForward,
        *,
        to_end: bool = False,
    ) -> torch.Tensor:
        """Compute the state of padded tokens, [prompts, longest]; `forward` collects it.

        With `to_end`, return the logits after each token, [..., vocab].
        """

    def prefill(
        self, prompts: Sequence[TokenRow], images: Sequence[ImagePrompt | None] = ()
    ) -> PrefilledPrompts:
        if any(image is not None for image in images):
            raise NotImplementedError("images")
        forward = PrefillForward()
        self._compute(*pad_right(prompts, self._device), forward)
        return PrefilledPrompts(tuple(forward.layers))

    def score(self, prompt: TokenRow) -> tuple[PrefilledPrompts, torch.Tensor]:
        forward = PrefillForward()
        logits = self._compute(*pad_right([prompt], self._device), forward, to_end=True)
        return PrefilledPrompts(tuple(forward.layers)), logits.flatten(0, -2)

    def extend(
        self, prefixes: Sequence[CachedPrefix], prompts: Sequence[TokenRow]
    ) -> PrefilledPrompts:
        extension = PrefixExtension(prefixes, prompts, self._device)
        forward = PrefillForward(extension=extension)
        self._compute(extension.token_ids, extension.positions, forward)
        return PrefilledPrompts(tuple(forward.layers))

    def insert(self, prefilled: PrefilledPrompts, prompts: Rows, rows: Rows) -> None:
        self._cache.insert(prefilled, prompts, rows)

    def keep(self, row: int, tokens: TokenRow) -> CachedPrefix | None:
        return CachedPrefix(tokens, self._cache.copy(row, len(tokens)))

    def move(self, sources: Rows, targets: Rows, length: int) -> None:
        self._cache.move(sources, targets, length)


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend with one query token per row to the rows' cached tokens.

    Args:
        queries: [rows, heads, head dim].
        keys: [rows * kv heads, length, head dim]; values alike.
        bias: [rows * kv heads, 1, length], additive.
        scaling: factor of the scores.

    Returns:
        [rows * kv heads, heads / kv heads, head dim], contiguous.
    """
    rows, heads = queries.shape[:2]
    group = rows * heads // keys.shape[0]
    # The heads of a group become the query length: one product serves all of them.
    queries = queries.reshape(keys.shape[0], group, -1)
    # Mask, scale and product in one kernel.
    scores = torch.baddbmm(bias.expand(-1, group, -1), queries, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(torch.softmax(scores, -1), values)


def pad_right(
    prompts: Sequence[TokenRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, padded with zeros, and positions; both [prompts, longest] int64.

    In a causal model no real token sees the padding after it.
    """
    longest = max(len(prompt) for prompt in prompts)
    token_ids = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    return torch.from_numpy(token_ids).to(device), positions


def causal_mask(positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Return which of `length` places tokens at [..., tokens] positions see, [..., tokens, length].

    Args:
        positions: of the tokens.
        length: number of places.
        window: how many tokens each sees, itself included; ``None`` for all.
    """
    places = torch.arange(length, device=positions.device)
    visible = places <= positions[..., None]
    return visible if window is None else visible & (places > positions[..., None] - window)


class PrefixExtension:
    """New tokens of prompts after their known prefixes.

    Args:
        prefixes: the known prefix of each prompt.
        prompts: each longer than its known prefix.
        device: the model's device.

    Attributes:
        token_ids: [prompts, most new tokens] int64, padded on the right.
        positions: their positions; also those of padding lie within the longest prompt.
    """

    def __init__(
        self, prefixes: Sequence[CachedPrefix], prompts: Sequence[TokenRow], device: torch.device
    ) -> None:
        self._prefixes = prefixes
        starts = np.array([len(prefix.tokens) for prefix in prefixes])
        news = [prompt[start:] for start, prompt in zip(starts, prompts, strict=True)]
        self._length = max(map(len, prompts))
        self.token_ids, steps = pad_right(news, device)
        places = torch.from_numpy(starts).to(device)[:, None] + steps
        self.positions = places.clamp(max=self._length - 1)
        sizes = torch.tensor([len(new_tokens) for new_tokens in news], device=device)
        # Padding must not be written over the last tokens of the longest prompt.
        self._row, self._step = (steps < sizes[:, None]).nonzero(as_tuple=True)
        self._place = places[self._row, self._step]
        self._masks: dict[int | None, torch.Tensor] = {}

    def join_layer(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of whole prompts, [prompts, kv heads, longest, dim].

        Args:
            layer: its number.
            keys: of the new tokens, [prompts, kv heads, most new tokens, dim]; values alike.
        """
        first_prefix = self._prefixes[0].layers[layer]
        # Zeros, as in `SlotCache`.
        size = (len(self._prefixes), first_prefix.shape[0], 2, self._length, first_prefix.shape[3])
        joined = first_prefix.new_zeros(size)
        for row, prefix in zip(joined, self._prefixes, strict=True):
            row[:, :, : len(prefix.tokens)] = prefix.layers[layer]
        parts = []
        for kind, new_tensor in enumerate((keys, values)):
            part = joined[:, :, kind]
            part[self._row, :, self._place] = new_tensor[self._row, :, self._step]
            parts.append(part)
        return parts[0], parts[1]

    def visibility(self, window: int | None = None) -> torch.Tensor:
        """Return which tokens of its prompt each new token sees; see `prefill_attention`."""
        if window not in self._masks:
            self._masks[window] = causal_mask(self.positions, self._length, window)
        return self._masks[window]


def prefill_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within prompts, causally; padding on the right needs no mask.

    Args:
        queries: [prompts, heads, tokens, head dim]; keys and values have kv heads.
        window: how many tokens each sees, itself included; ``None`` for all.
        visible: [prompts, tokens, keys] bool, where there are more keys than queries: which of them
            each sees, by the window too.

    Returns:
        [prompts, heads, tokens, head dim].
    """
    heads, tokens = queries.shape[1:3]
    if visible is None and window is not None and window < tokens:
        steps = torch.arange(tokens, device=queries.device)
        visible = causal_mask(steps[None], tokens, window)
    mask = None if visible is None else visible[:, None]
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=heads != keys.shape[1],
    )


@dataclass(slots=True, eq=False)
class PrefillForward:
    """A forward pass over prompts, or what extends them; collects each layer's keys and values."""

    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    windowed: bool = False
    extension: PrefixExtension | None = None

    def add(
        self, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Take a layer's keys and values; return those of whole prompts, and what is seen."""
        visible = None
        if self.extension is not None:
            keys, values = self.extension.join_layer(len(self.layers), keys, values)
            visible = self.extension.visibility(window)
        self.layers.append((keys, values))
        self.windowed |= window is not None
        return keys, values, visible


@dataclass(slots=True, eq=False)
class DecodeForward:
    """A forward pass over the rows' newest tokens; `layer` counts attention calls."""

    cache: SlotCache
    causal_bias: CausalBias
    positions: torch.Tensor  # [rows]
    length: int
    layer: int = 0
    _index: torch.Tensor = field(init=False)
    _views: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    _biases: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = self.cache.append_index(self.positions)
        self._views = self.cache.views(self.positions.shape[0], self.length)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the next layer's tokens, [rows, kv heads, dim]; return all its keys and values."""
        # Attention calls come in the order of the layers; transformers does not pass the number.
        layer, self.layer = self.layer, self.layer + 1
        self.cache.append(layer, self._index, torch.cat((keys, values), 1))
        return self._views[layer]

    def bias(self, window: int | None) -> torch.Tensor:
        """Return the mask for layers with a sliding window, if any."""
        window = None if window is None or window >= self.length else window
        # Layers of one kind share their mask.
        if window not in self._biases:
            heads = self.cache.heads
            bias = self.causal_bias.rows(self.positions, self.length, heads)
            if window is not None:
                places = torch.arange(self.length, device=bias.device)
                too_old = places <= self.positions.repeat_interleave(heads)[:, None] - window
                bias = bias.masked_fill(too_old[:, None], -torch.inf)
            self._biases[window] = bias
        return self._biases[window]


class _Running(threading.local):
    forward: PrefillForward | DecodeForward | None = None


_running = _Running()


@contextmanager
def slot_forward(forward: PrefillForward | DecodeForward) -> Iterator[None]:
    """Make `forward` the one of all model calls of this thread."""
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
    """Implement transformers' attention: heads before tokens in, tokens before heads out."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("soft caps and sinks of attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    forward = _running.forward
    if isinstance(forward, PrefillForward):
        key, value, visible = forward.add(key, value, sliding_window)
        out = prefill_attention(
            query, key, value, scaling=scale, window=sliding_window, visible=visible
        )
        return out.transpose(1, 2).contiguous(), None
    if forward is None:
        raise RuntimeError(f"attention {NAME!r} was called outside a slot engine's forward pass")
    keys, values = forward.append(key[:, :, 0], value[:, :, 0])
    out = decode_attention(query[:, :, 0], keys, values, forward.bias(sliding_window), scale)
    return out.view(query.shape[0], 1, query.shape[1], -1), None


def register() -> None:
    """Make `NAME` known to transformers as an attention that needs no mask. Repeatable."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)


class PrefixCache:
    """Kept prefixes by conversation name; the least recently used are dropped first.

    Args:
        max_tokens: most tokens of all prefixes together; 0 keeps none.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._names: OrderedDict[CachedPrefix, str] = OrderedDict()
        self._by_name: dict[str, list[CachedPrefix]] = {}

    def put(self, name: str, prefix: CachedPrefix) -> None:
        """Keep a prefix, unless it alone exceeds the bound."""
        if len(prefix.tokens) > self.max_tokens:
            return
        while self.num_tokens + len(prefix.tokens) > self.max_tokens:
            self._remove(next(iter(self._names)))
        self._names[prefix] = name
        self._by_name.setdefault(name, []).append(prefix)
        self.num_tokens += len(prefix.tokens)

    def take(self, name: str, tokens: TokenRow) -> CachedPrefix | None:
        """Return the longest kept beginning of `tokens`, which leaves at least one to compute;
        ``None``: there is none, or the rest is so long that the whole prompt is cheaper.

        A prefix that is used to its end leaves: the sample's own will take its place.
        """
        candidates = self._by_name.get(name, ())
        shared, best = max(
            ((_num_shared(prefix.tokens, tokens[:-1]), prefix) for prefix in candidates),
            key=lambda candidate: candidate[0],
            default=(0, None),
        )
        is_dear = (len(tokens) - shared) * len(tokens) > _MAX_MASK_ELEMENTS
        if best is None or shared == 0 or is_dear:
            return None
        if shared == len(best.tokens):
            self._remove(best)
        else:
            self._names.move_to_end(best)
        return best.cut(shared)

    def clear(self) -> None:
        """Drop all prefixes, since other weights computed them."""
        self._names.clear()
        self._by_name.clear()
        self.num_tokens = 0

    def _remove(self, prefix: CachedPrefix) -> None:
        name = self._names.pop(prefix)
        self._by_name[name].remove(prefix)
        if not self._by_name[name]:
            del self._by_name[name]
        self.num_tokens -= len(prefix.tokens)


def _num_shared(first: TokenRow, second: TokenRow) -> int:
    """Return the length of the common prefix of two token rows."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if differs.size else length
